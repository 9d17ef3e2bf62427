"""``treadle::expect``: a condition that capture took for granted, looked at when the step runs.

::

    expect(holds) -> ()        ``NotExpected`` unless the 0-dim ``holds`` is true

Everything that a step writes is written after it, so a call that meets ``NotExpected`` has changed
nothing but the state of random generators.
"""

from typing import Any

import torch
from torch import Tensor


class NotExpected(Exception):
    """What the compiled step takes for granted does not hold in this call; or the text of an error
    that was met before that was known."""


def require_expected(holds: Tensor) -> None:
    """``NotExpected`` unless ``holds``. Of a tensor on a GPU this waits for its value."""
    if not holds.item():
        raise NotExpected


def _nothing(holds: Tensor) -> None:
    """Of a value that is not there."""


_library = torch.library.Library("treadle", "FRAGMENT")
_library.define("expect(Tensor holds) -> ()")
_library.impl("expect", require_expected, "CompositeExplicitAutograd")
torch.library.register_fake("treadle::expect", _nothing, lib=_library)
expect: Any = torch.ops.treadle.expect.default

__all__ = ["NotExpected", "expect", "require_expected"]
