"""How many calls run eagerly before the next one is tried.

::

    a call finds no variant for its path, and no room for one    the next one is eager's
    and so does the one after that, which was tried              the next three are eager's, then 7
    a variant serves a call                                      the next one is tried

A call learns which path it takes by running the variant of another one up to the branch, and its
conditions again. Where nearly every call takes a path of its own, that costs more than the call.
"""

from dataclasses import dataclass
from typing import final

_MOST = 63
"""What a variant could serve runs eagerly for this long at most."""


@final
@dataclass
class EagerCalls:
    """Of one step. ``why``: its last call that was tried ran eagerly."""

    why: str = ""
    _in_a_row: int = 0  # as the last call that was tried began
    _left: int = 0

    def takes(self) -> bool:
        """Whether the next call is one of them."""
        self._left -= 1
        return self._left >= 0

    def begin(self, why: str) -> None:
        """A call that was tried was eager's."""
        self.why = why
        self._left = self._in_a_row = min(2 * self._in_a_row + 1, _MOST)

    def end(self) -> None:
        """A variant has served a call."""
        self._left = self._in_a_row = 0
