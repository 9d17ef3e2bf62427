"""The assumptions of a compiled step, checked in each call."""

from torch import Tensor


class NotExpected(Exception):
    """What the compiled step takes for granted does not hold in this call; or the text of an error
    that was met before that was known."""


class LeftToEager(NotExpected):
    """The call is eager's, whichever path it takes."""


def require_expected(holds: Tensor) -> None:
    """``NotExpected`` unless ``holds``. Of a tensor on a GPU this waits for its value."""
    if not holds.item():
        raise NotExpected
