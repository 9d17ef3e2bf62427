"""How many calls run eagerly before the next one is tried.

::

    a call finds no variant for its path, and no room for one    the next one is eager's
    and so does the one after that, which was tried              the next three are eager's, then 7
    a variant serves a call                                      the next one is tried
    eight calls that were tried, in a row, were captured again   the next one is eager's, then 3, 7

A call learns which path it takes by running the variant of another one up to the branch, and its
conditions again. Where nearly every call takes a path of its own, that costs more than the call.
So does a capture, by far: what differs at every call (a table that an optimizer keeps beside its
state) makes each of them for nothing.
"""

from dataclasses import dataclass
from typing import final

_MOST = 63
"""What a variant could serve runs eagerly for this long at most."""
_MOST_CAPTURED = 4095  # a capture takes as long as hundreds of calls
_CAPTURES = 8
"""In a row, without a call between them that a known variant serves."""
_WHY_CAPTURED = (
    f"it was captured again at {_CAPTURES} calls in a row, so most are not tried; step.recaptures "
    "lists what changed"
)


@final
@dataclass
class EagerCalls:
    """Of one step. ``why``: its last call that was tried ran eagerly."""

    why: str = ""
    _in_a_row: int = 0  # as the last call that was tried began
    _left: int = 0
    _captures: int = 0  # since a known variant has served a call

    def takes(self) -> bool:
        """Whether the next call is one of them."""
        self._left -= 1
        return self._left >= 0

    def begin(self, why: str) -> None:
        """A call that was tried was eager's."""
        self._begin(why, _MOST)

    def captured(self) -> None:
        """A call was captured, only to run the program of another variant."""
        self._captures += 1
        if self._captures >= _CAPTURES:
            self._begin(_WHY_CAPTURED, _MOST_CAPTURED)

    def end(self) -> None:
        """A variant has served a call."""
        self._left = self._in_a_row = self._captures = 0

    def _begin(self, why: str, most: int) -> None:
        self.why = why
        self._left = self._in_a_row = min(2 * self._in_a_row + 1, most)
