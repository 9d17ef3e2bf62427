"""The messages between the ranks of a group in its store, and the first fault of the group.

::

    address/2     where rank 2 is
    asked         the last call in which a rank was about to run another step than in the one before
    vote/7/...    what the ranks said to that (``votes.py``)
    at/2          which collective rank 2 waits for, once it has waited for a second
    ended/2       the error that ended the script of rank 2
    heard         how many ranks know of the first fault
    broken        the first fault and its call; after that, no rank goes on with this group

All keys begin with ``treadle/``.
"""

import json
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from torch import distributed

from treadle.compat.distributed.process_groups import host_of, ranks_of, store_of
from treadle.runtime.ranks.liveness import Liveness, ProcessAddress, listening
from treadle.util.errors import GroupFailure

GRACE = 5.0
"""Seconds for the system to notice a death, and for others to hear of a fault."""
RESTART = "start all ranks again from the last checkpoint"


@final
@dataclass(frozen=True, slots=True)
class Awaited:
    """A collective that was started: its call, its number in the call, its kind, and when it
    began."""

    call: int
    number: int
    what: str
    began: float

    def __str__(self) -> str:
        return f"{self.what}, collective {self.number} of call {self.call}"


@final
@dataclass(frozen=True, slots=True)
class Told:
    """A fault of the group, the call in which it was found, and when this rank heard of it."""

    call: int
    fault: GroupFailure
    heard: float

    @staticmethod
    def parse(text: bytes) -> "Told":
        """Read from the text under ``broken``."""
        call, code, message, where, remedy = json.loads(text)
        fault = GroupFailure(message, code=code, where=where, remedy=remedy)
        return Told(call, fault, time.monotonic())

    def ends(self, call: int, began: float) -> bool:
        """Whether it ends a wait in ``call`` that began at ``began``."""
        return self.call <= call or time.monotonic() - max(self.heard, began) > GRACE


@final
class GroupStore:
    """The messages of this rank to its group and from it. ``rank``: its own number."""

    def __init__(self, group: "distributed.ProcessGroup") -> None:
        store = store_of(group)
        self.ranks = ranks_of(group)
        self.rank = distributed.get_rank()
        self.keys: distributed.Store = distributed.PrefixStore("treadle", store)
        self._host = host_of(store)
        self.is_held_here = self.rank == 0 and bool(self._host)

    @property
    def following(self) -> int:
        """The next rank. This rank checks that it is alive, so that each death is noticed."""
        return self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]

    def tell_address(self) -> None:
        """Publish the address of this rank."""
        self.keys.set(f"address/{self.rank}", listening(self._host).text())

    def ask(self, call: int) -> None:
        """Ask all ranks to say what they run in ``call``."""
        self.keys.set("asked", str(call))

    def asked(self) -> int | None:
        """The last call for which a rank asked that."""
        return int(self.keys.get("asked")) if self.keys.check(["asked"]) else None

    def tell_waiting(self, awaited: Awaited) -> None:
        """Publish what this rank waits for."""
        self.keys.set(f"at/{self.rank}", json.dumps([awaited.call, str(awaited)]))

    def tell_end(self, error: BaseException) -> None:
        """Publish that the script of this rank ends with ``error``."""
        self.keys.set(f"ended/{self.rank}", in_words(error))

    def waits_at(self, rank: int, awaited: Awaited) -> bool:
        """Whether ``rank`` waits for the same as this one."""
        return rank == self.rank or self._place_of(rank) == (awaited.call, str(awaited))

    def last_seen(self, rank: int, call: int) -> str:
        """What the rank last published about its position, in words; ``call``: that of the rank
        that asks."""
        place = self._place_of(rank)
        if not self.keys.check([f"address/{rank}"]):
            return f"rank {rank}, which has not started a call"
        if place is None or place[0] < call:
            return f"rank {rank}, which is alive but was not seen waiting in this call"
        return f"rank {rank}, which waits for {place[1]}"

    def ended(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of ``ranks`` that have ended, in words."""
        gone: dict[int, str] = {}
        for rank in ranks:
            if rank == self.rank:
                continue
            if self.keys.check([f"ended/{rank}"]):
                gone[rank] = f"rank {rank} ended with {self.keys.get(f'ended/{rank}').decode()}"
            elif self.keys.check([f"address/{rank}"]):
                address = ProcessAddress.parse(self.keys.get(f"address/{rank}").decode())
                if address.look() is Liveness.ENDED:
                    gone[rank] = f"rank {rank} has ended ({address} is gone)"
        return gone

    def _place_of(self, rank: int) -> tuple[int, str] | None:
        if not self.keys.check([f"at/{rank}"]):
            return None
        call, what = json.loads(self.keys.get(f"at/{rank}"))
        return call, what


@final
class GroupFault:
    """The first fault of a group. ``raised``: the error that this rank has raised for it;
    afterwards this rank runs nothing with the group."""

    def __init__(self, store: GroupStore) -> None:
        self.raised: GroupFailure | None = None
        self._store = store
        self._told: Told | None = None
        self._left = False  # whether this rank has said that it knows

    def heard(self) -> Told | None:
        """The fault that the group knows of. The store is asked until there is one, and the answer
        is kept: the store may be gone when a later call raises the fault."""
        if self._told is None and self._store.keys.check(["broken"]):
            self._told = Told.parse(self._store.keys.get("broken"))
        return self._told

    def adopted(self, told: Told) -> GroupFailure:
        """The fault of the group, as an error of this rank."""
        self.raised = told.fault
        return self.raised

    def declare(self, fault: GroupFailure, call: int) -> GroupFailure:
        """The first fault of the group: ``fault``, found in ``call``, unless another rank has
        declared one before. A rank that finds one has begun ``call``, or votes in it, and has done
        its part of all earlier calls."""
        if self.raised is None:
            text = json.dumps([call, fault.code, fault.message, fault.where, fault.remedy])
            self._told = Told.parse(self._store.keys.compare_set("broken", "", text))
            self.adopted(self._told)
        assert self.raised is not None
        self.leave()
        return self.raised

    def leave(self) -> None:
        """Publish once that this rank knows of the fault. The process that holds the store waits
        until all ranks know."""
        if not self._left:
            self._left = True
            self._store.keys.add("heard", 1)
            if self._store.is_held_here:
                self._stay()

    def _stay(self) -> None:
        """Wait until the others know, or for a limited time, because the store ends with this
        process."""
        store, end = self._store, time.monotonic() + GRACE
        while time.monotonic() < end:
            if store.keys.add("heard", 0) >= len(store.ranks) - len(store.ended(store.ranks)):
                return
            time.sleep(0.05)

    @contextmanager
    def of_store(self) -> Generator[None]:
        """Turn an error of the store into one of the process that holds it."""
        try:
            yield
        except RuntimeError as error:
            raise self.without_store(error) from error

    def without_store(self, error: RuntimeError) -> GroupFailure:
        """TR-503: the other ranks cannot be reached. A fault that was heard of before explains
        it."""
        if self._told is not None:
            return self.adopted(self._told)
        self.raised = GroupFailure(
            "the store of the process group cannot be reached: the process that holds it, rank "
            f"0 or torchrun, has ended ({str(error).splitlines()[0]})",
            code="TR-503",
            remedy=f"see the output of rank 0; {RESTART}",
        )
        return self.raised


def in_words(error: BaseException) -> str:
    """Its type and text."""
    return f"{type(error).__name__}: {error}".strip()
