"""Whether the calls of a program are recorded, and when: for whole steps and for joint graphs."""

from collections.abc import Sequence
from typing import Protocol, final

from torch import Tensor

from treadle.runtime.execute.step_memory import StepMemory
from treadle.runtime.replay.fixed_places import FixedPlaces
from treadle.runtime.replay.shared_recordings import Recorded, RecordingBytes

_TIMED_CALLS = (3, 5, 9)
"""The first calls compile kernels, and libraries choose their algorithms in them. A call during
which other processes used the GPU tells little of launching, so one call does not decide against a
recording."""
_SHARE = 0.3
"""Recording pays if launching takes at least this share of a call."""
_ATTEMPTS = 4
"""After so many recordings, a program whose tensors still move is never recorded again."""


@final
class WhenToRecord:
    """``note``: why calls are or are not recorded, in words; ``is_off``: none is recorded any more;
    ``is_due``: the next one is to be recorded."""

    def __init__(self, refusal: str) -> None:
        self.note = refusal
        self.is_off = bool(refusal)
        self.is_due = False
        self._calls = self._attempts = 0
        self._pays = False
        self._is_put_off = False

    def is_timed(self) -> bool:
        """Count a call that is launched as usual; whether it is the one to time."""
        if self.is_off:
            return False
        if self._is_put_off:
            self._is_put_off, self.is_due = False, True
            return False
        self._calls += 1
        return self._calls in _TIMED_CALLS

    def time_another(self) -> None:
        """Time another call, because the one that was to be timed did not end."""
        self._calls -= 1

    def took(self, launching: float, total: float) -> None:
        """Decide by the seconds of the call that was timed."""
        times = f"launching took {1e3 * launching:.2f} of {1e3 * total:.2f} ms"
        self.is_due = self._pays = launching >= _SHARE * total
        self.is_off = not self._pays and self._calls >= _TIMED_CALLS[-1]
        self.note = times if self._pays else f"not recorded: {times}"

    def put_off(self, *, again: bool = False) -> None:
        """After the loss of a recording: launch one call as usual, which prepares what a recording
        needs, and then record again. ``again``: however often there was one. If recording is not
        known to pay, nothing changes."""
        if self.is_off or not self._pays:
            return
        self.is_due, self._is_put_off = False, True
        self._attempts -= again
        self.note = f"{self.note.split(';')[0]}; to be recorded again"

    def why_not(self) -> str:
        """Count an attempt; the reason, in words, if it must not be made."""
        self.is_due = False
        self._attempts += 1
        return "its tensors move from call to call" if self._attempts > _ATTEMPTS else ""

    def give_up(self, why: str) -> None:
        """Launch as usual for good."""
        self.is_off, self.is_due, self._is_put_off = True, False, False
        self.note = f"not recorded: {why}"

    def recorded(self, what: str) -> None:
        """Note that calls are replayed from now on, as ``what``."""
        self.note = f"{self.note.split(';')[0]}; replayed as {what}"


class Replayed(Recorded, Protocol):
    """Something that has recordings of its calls, or is to have them."""

    def give_up(self, why: str) -> None:
        """Launch as usual for good."""
        ...


def memory_for_recording(
    member: Replayed,
    when: WhenToRecord,
    places: FixedPlaces,
    memory: StepMemory,
    need: RecordingBytes,
    inputs: Sequence[Tensor],
    refusal: str = "",
) -> Tensor | None:
    """Memory for the places of a recording of the call with ``inputs``; ``None`` if this call is
    not recorded, because another one will be or ``member`` gives up recording. A ``refusal`` makes
    it give up at once."""
    why = when.why_not() or refusal
    if not why and not (places.are_alike(inputs) and memory.keeps_block()):
        when.put_off()
        return None
    admitted = None if why else memory.admit(member, need)
    if admitted is None:
        member.give_up(why or need.without_room)
    return admitted
