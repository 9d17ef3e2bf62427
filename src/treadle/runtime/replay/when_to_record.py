"""Whether the calls of a program are recorded, and when: for whole steps and for joint graphs."""

from typing import final

_TIMED_CALL = 3
"""The first calls compile kernels, and libraries choose their algorithms in them."""
_SHARE = 0.3
"""Recording pays if launching takes at least this share of a call."""
_ATTEMPTS = 4
"""After so many recordings, a program whose tensors still move is launched as usual for good."""


@final
class WhenToRecord:
    """``note``: why calls are recorded or are not, in words; ``is_off``: they never are again;
    ``is_due``: the next one is to be."""

    def __init__(self, refusal: str) -> None:
        self.note = refusal
        self.is_off = bool(refusal)
        self.is_due = False
        self._calls = self._attempts = 0
        self._is_put_off = False

    def is_timed(self) -> bool:
        """Count a call that is launched as usual; whether it is the one to be timed."""
        if self.is_off:
            return False
        if self._is_put_off:
            self._is_put_off, self.is_due = False, True
            return False
        self._calls += 1
        return self._calls == _TIMED_CALL

    def time_another(self) -> None:
        """The call that was to be timed did not end."""
        self._calls -= 1

    def took(self, launching: float, total: float) -> None:
        """Seconds of the call that was timed."""
        times = f"launching took {1e3 * launching:.2f} of {1e3 * total:.2f} ms"
        self.is_due = launching >= _SHARE * total
        self.is_off = not self.is_due
        self.note = times if self.is_due else f"not recorded: {times}"

    def put_off(self, *, again: bool = False) -> None:
        """The recording is gone: once more as usual, which prepares what a recording needs, and
        then a new one. ``again``: however often there was one."""
        self.is_due, self._is_put_off = False, not self.is_off
        self._attempts -= again
        self.note = f"{self.note.split(';')[0]}; to be recorded again"

    def why_not(self) -> str:
        """Count an attempt; why it must not be, in words, if so."""
        self.is_due = False
        self._attempts += 1
        return "its tensors move from call to call" if self._attempts > _ATTEMPTS else ""

    def give_up(self, why: str) -> None:
        """Launch as usual for good."""
        self.is_off, self.is_due, self._is_put_off = True, False, False
        self.note = f"not recorded: {why}"

    def recorded(self, what: str) -> None:
        """From now on calls are replayed, as ``what``."""
        self.note = f"{self.note.split(';')[0]}; replayed as {what}"
