"""The recordings that share an arena, and their other shared memory.

::

    what launches allocate    one pool, of the recorder: nothing in it outlives the call
    places of inputs          one block, as large as the largest need
    results                   each recording's own, until they are copied out

A recording needs bytes in addition to the plan. If all of them together would exceed the available
room, or if there are too many, the least recently used one is dropped first.
"""

from dataclasses import dataclass
from typing import Protocol, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from treadle.runtime.replay.replay_policy import Recorder

_MOST = 24
"""The largest number of recordings at once: the driver keeps the arguments of every launch of
each."""


@final
@dataclass(frozen=True, slots=True)
class RecordingBytes:
    """Bytes of a recording. ``places``: those of inputs, which are shared; ``results``: those that
    the recording alone keeps."""

    places: int
    results: int

    @property
    def without_room(self) -> str:
        """The reason to give if there is no room for these."""
        return f"copies of {self.places + self.results} bytes do not fit beside the plan"


class Recorded(Protocol):
    """An executable that may have a recording. ``limit_bytes``: the most that its calls may hold,
    including all recordings."""

    limit_bytes: int

    @property
    def place_bytes(self) -> int:
        """Bytes of the places that its inputs need."""
        ...

    def lose_recording(self, *, again: bool) -> None:
        """Forget the recording. ``again``: it will be made again, however often it was made."""
        ...


@final
class SharedRecordings:
    """``recorder``: the recorder of all of them. ``newest``: the identity of the one that was used
    last (a reference would keep it alive); 0 if there is none."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._members: WeakSet[Recorded] = WeakSet()
        self._held: WeakKeyDictionary[Recorded, RecordingBytes] = WeakKeyDictionary()
        """The members with recordings, the least recently used first."""
        self.newest = 0
        self._changes = 0  # of what is held
        self._block: Tensor | None = None

    def join(self, member: Recorded) -> None:
        """Add a member, which may have a recording from now on."""
        self._members.add(member)
        self._changes += 1

    @property
    def nbytes(self) -> int:
        """Bytes of all recordings; the shared block counts once."""
        return self.block_bytes + sum(each.results for each in self._held.values())

    @property
    def block_bytes(self) -> int:
        """Bytes of the shared places."""
        return 0 if self._block is None else self._block.numel()

    def result_bytes(self, member: Recorded) -> int:
        """Bytes of the results that the recording of ``member`` keeps."""
        held = self._held.get(member)
        return 0 if held is None else held.results

    def stamp(self) -> tuple[int, int]:
        """A value that changes whenever a recording is made or dropped, or a member joins or
        dies."""
        return self._changes, len(self._members)

    def use(self, member: Recorded) -> None:
        """Note ``member`` as the most recently used one."""
        if self.newest != id(member):
            self._held[member] = self._held.pop(member)
            self.newest = id(member)

    def keep_within(self, promised: int) -> None:
        """Drop as many recordings as needed to fit beside the ``promised`` bytes of the plans,
        which may have grown since they were made."""
        while self._held and self.nbytes > self._room(promised):
            self._lose_oldest()

    def admit(
        self, member: Recorded, need: RecordingBytes, promised: int, device: torch.device
    ) -> Tensor | None:
        """Memory for the places of a recording that is made now, beside the ``promised`` bytes of
        the plans. Other recordings are dropped if necessary. ``None`` if there is no room even
        without them."""
        room = self._room(promised) - need.results
        while self._held and (len(self._held) >= _MOST or not self._fits(need.places, room)):
            self._lose_oldest()
        if not self._fits(need.places, room):
            return None
        if self._block is None or need.places > self.block_bytes:
            self.lose_all(again=True)  # their launches read the old block
            known = max(each.place_bytes for each in self._members)
            size = known if known <= room else need.places
            self._block = torch.empty(size, dtype=torch.uint8, device=device)
        self._held[member], self.newest = need, id(member)
        self._changes += 1
        return self._block

    def leave(self, member: Recorded) -> None:
        """Note that the recording of ``member`` is gone."""
        self._held.pop(member, None)
        self._changes += 1
        if not self._held:
            self._block, self.newest = None, 0

    def lose_all(self, *, again: bool) -> None:
        """Drop all recordings, because none is valid any more. ``again``: they will be made again,
        however often they were made."""
        for member in list(self._held):
            self._lose(member, again=again)

    def _lose_oldest(self) -> None:
        self._lose(next(iter(list(self._held))), again=False)

    def _lose(self, member: Recorded, *, again: bool) -> None:
        self.leave(member)
        member.lose_recording(again=again)

    def _room(self, promised: int) -> int:
        return max((each.limit_bytes for each in self._members), default=0) - promised

    def _fits(self, places: int, room: int) -> bool:
        results = sum(each.results for each in self._held.values())
        return max(self.block_bytes, places) + results <= room
