"""The other ranks of a process group: that they run the same step, and why they cannot go on.

A rank speaks to the others in the store of the group, under keys that begin with ``treadle/``::

    address/2     where rank 2 is
    asked         the last call in which a rank was about to run another step than in the one before
    vote/7/...    what the ranks said to that (``votes.py``)
    at/2          which collective rank 2 waits for, once it has waited for a second
    ended/2       the error that ended the script of rank 2
    heard         how many ranks know of the first fault
    broken        the first fault and its call; after that, no rank goes on with this group

What is looked at when: a call that runs the step of the call before asks the store nothing. A rank
whose step is another one asks all ranks before its first collective. A rank that waits for longer
than a few milliseconds, in a collective or in a vote, looks whether others ask or have failed.

A fault ends what waits in its call or a later one. A rank that found it has done its part of every
earlier call, where the others may still be receiving: such a wait ends by itself, or after a while.
"""

import atexit
import json
import sys
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
from torch import distributed

from treadle.compat.distributed.collectives import name_of_group
from treadle.compat.distributed.process_groups import host_of, ranks_of, store_of, timeout_of
from treadle.runtime.ranks.liveness import Liveness, ProcessAddress, listening
from treadle.runtime.ranks.votes import VariantText, Votes
from treadle.util.errors import GroupFailure

_SHORTEST, _LONGEST = 1e-4, 0.25  # seconds between two looks while waiting
_MILLISECOND = 1e-3  # a shorter wait for a collective is one without limit
_SEEN_WAITING = 1.0  # seconds after which a rank says what it waits for
_GRACE = 5.0  # seconds for the system to notice a death, and for others to hear of a fault
_NOTHING = VariantText((), ())
_RESTART = "start all ranks again from the last checkpoint"


@final
@dataclass(frozen=True, slots=True)
class Awaited:
    """A collective that was started: the how-many-th of which call, what, and when."""

    call: int
    number: int
    what: str
    began: float

    def __str__(self) -> str:
        return f"{self.what}, collective {self.number} of call {self.call}"


@final
@dataclass(frozen=True, slots=True)
class _Told:
    """A fault of the group, the call in which it was found, and when this rank heard of it."""

    call: int
    fault: GroupFailure
    heard: float

    @staticmethod
    def parse(text: bytes) -> "_Told":
        """From the text under ``broken``."""
        call, code, message, where, remedy = json.loads(text)
        fault = GroupFailure(message, code=code, where=where, remedy=remedy)
        return _Told(call, fault, time.monotonic())

    def ends(self, call: int, began: float) -> bool:
        """Whether a wait of ``call`` since ``began`` is over by it."""
        return self.call <= call or time.monotonic() - max(self.heard, began) > _GRACE


@final
class Peers:
    """What this rank knows of its group; ``device``: of the collectives."""

    def __init__(self, group: "distributed.ProcessGroup", device: torch.device) -> None:
        store = store_of(group)
        self.ranks = ranks_of(group)
        self.rank = distributed.get_rank()
        self.call = 0  # the last one that began
        self._within = False  # whether it goes on
        self._store = distributed.PrefixStore("treadle", store)
        self._holds_store = self.rank == 0 and bool(host_of(store))
        self._timeout = timeout_of(group, device)
        self._number = 0  # of collectives in this call
        self._agreed = _NOTHING
        self._voted = 0  # the last call in which this rank voted
        self._told: _Told | None = None
        self._fault: GroupFailure | None = None  # that this rank has raised
        self._left = False  # whether it has said so
        with self._reached():
            self._store.set(f"address/{self.rank}", listening(host_of(store)).text())
        atexit.register(_note_end, weakref.ref(self))

    def begin(self, variant: VariantText) -> None:
        """A call of a step that communicates. TR-502 on all ranks, before any of them starts a
        collective of it, unless all run the same."""
        self._go_on()
        self.call += 1
        self._within = True
        self._number = 0
        if variant.digest == self._agreed.digest:
            return
        with self._reached():
            self._store.set("asked", str(self.call))
            self._vote(self.call, variant)
        self._agreed = variant

    def refused(self, variant: VariantText) -> None:
        """This rank runs nothing in a call, and says so; it waits for nobody. TR-502 on those that
        run a step; where none does, all go on."""
        if self._fault is not None:
            return
        self.call += 1
        with suppress(RuntimeError):  # nobody can be told: the error at hand is what is raised
            self._store.set("asked", str(self.call))
            self._give(self.call, variant).tell(variant)
        self._agreed = variant

    def end(self) -> None:
        """This rank has done its part of the call: an error from here on is one of the next."""
        self._within = False

    def started(self, what: str) -> Awaited:
        """Note a collective that begins now."""
        self._number += 1
        return Awaited(self.call, self._number, what, time.monotonic())

    def wait(self, work: "distributed.Work", awaited: Awaited) -> None:
        """Until a collective that the host waits for has ended. TR-503 if a rank has, TR-504 when
        the time of the group is over, TR-505 if one failed, TR-502 if one runs another step."""
        pause = _SHORTEST
        looks = _Looks(self, awaited)
        try:
            while not _ends_within(work, pause):
                pause = min(2 * pause, _LONGEST)
                looks.look()
        except RuntimeError as error:
            with self._reached():
                raise self._broken(self._reason(error, awaited), self.call) from error

    def raised(self, error: BaseException) -> None:
        """This rank leaves the call by an error of its own: the others need not wait for it."""
        if self._fault is not None or isinstance(error, GroupFailure):
            return
        call = self.call if self._within else self.call + 1
        text = f"rank {self.rank} failed in call {call}: {_in_words(error)}"
        fault = GroupFailure(text, code="TR-505", remedy=f"see its output; {_RESTART}")
        try:
            self._broken(fault, call)
        except RuntimeError:
            return  # nobody can be told: the error at hand is what is raised

    # What others say.

    def look(self, call: int, began: float) -> None:
        """``call`` has waited since ``began``. Raise the fault that another rank found, if it ends
        the wait; answer a rank that asks what this rank runs."""
        told = self._heard()
        if told is not None and told.ends(call, began):
            fault = self._adopted(told)
            with suppress(RuntimeError):  # the store is gone: the fault is known without it
                self._leave()
            raise fault
        if self._store.check(["asked"]):
            asked = int(self._store.get("asked"))
            votes = Votes(self._store, min(asked, self.call), self.ranks)
            # A rank that was refused asks in its next call before others have answered in this one.
            if self._voted < votes.call and (asked == votes.call or votes.is_open()):
                self._vote(votes.call, self._agreed)

    def look_longer(self, awaited: Awaited) -> None:
        """Once a second while waiting: publish what this rank waits for, and check that the next
        rank is alive. The rank before checks this one, so that each death is noticed."""
        self._store.set(f"at/{self.rank}", json.dumps([awaited.call, str(awaited)]))
        following = self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]
        ended = self._ended([following])
        if ended:
            raise self._broken(_death(ended, f"{awaited} cannot end"), self.call)

    def _heard(self) -> _Told | None:
        """The fault of the group. The store is asked until there is one: it may be gone when a
        later call raises it."""
        if self._told is None and self._store.check(["broken"]):
            self._told = _Told.parse(self._store.get("broken"))
        return self._told

    def _vote(self, call: int, variant: VariantText) -> None:
        """Say what this rank runs; TR-502 if not all said the same."""
        votes = self._give(call, variant)
        self._until(votes)
        if not votes.is_same():
            raise self._broken(votes.difference(variant), call)

    def _give(self, call: int, variant: VariantText) -> Votes:
        votes = Votes(self._store, call, self.ranks)
        previous = (self._voted, self._agreed.digest) if self._voted else None
        self._voted = call
        votes.give(self.rank, variant, previous)
        return votes

    def _until(self, votes: Votes) -> None:
        began = time.monotonic()
        pause = _SHORTEST
        looked = began
        while not votes.is_decided():
            self.look(votes.call, began)
            now = time.monotonic()
            if now - began > self._timeout:
                what = f"agreement on the step of call {votes.call}"
                late = self._too_late(what, votes.missing(), votes.call)
                raise self._broken(late, votes.call)
            if now - looked > _SEEN_WAITING:  # a rank that has ended will not vote
                looked = now
                ended = self._ended(votes.missing())
                if ended:
                    death = _death(ended, f"call {votes.call} could not begin")
                    raise self._broken(death, votes.call)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _go_on(self) -> None:
        if self._fault is not None:
            raise GroupFailure(
                f"an earlier call failed, and its group cannot go on: {self._fault.message}",
                code="TR-506",
                remedy=_RESTART,
            )

    # Faults.

    def _reason(self, error: RuntimeError, awaited: Awaited) -> GroupFailure:
        """Why a collective failed: what another rank has found out, or what is found here."""
        if time.monotonic() - awaited.began > 0.9 * self._timeout:
            late = [rank for rank in self.ranks if not self._waits_at(rank, awaited)]
            return self._too_late(str(awaited), late, awaited.call)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            told = self._heard()
            if told is not None:  # of whatever call: this one cannot end any more
                return self._adopted(told)
            ended = self._ended(self.ranks)
            if ended:
                return _death(ended, f"{awaited} could not end")
            time.sleep(0.05)
        first = str(error).splitlines()[0]
        return GroupFailure(
            f"the connection to another rank was lost in {awaited}, and no rank is known to have "
            f"ended: {first}",
            code="TR-503",
            remedy=f"see the output of all ranks; {_RESTART}",
        )

    def _waits_at(self, rank: int, awaited: Awaited) -> bool:
        return rank == self.rank or self._place_of(rank) == (awaited.call, str(awaited))

    def _place_of(self, rank: int) -> tuple[int, str] | None:
        if not self._store.check([f"at/{rank}"]):
            return None
        call, what = json.loads(self._store.get(f"at/{rank}"))
        return call, what

    def _too_late(self, what: str, late: list[int], call: int) -> GroupFailure:
        ended = self._ended(late)
        told = [ended.get(rank) or self._last_seen(rank, call) for rank in late]
        ranks = f"did not arrive: {'; '.join(told)}" if late else "all ranks arrived"
        return GroupFailure(
            f"{what} was not over in {self._timeout:g} s; {ranks}",
            code="TR-504",
            remedy="see what these ranks did; timeout= of init_process_group is the limit",
        )

    def _last_seen(self, rank: int, call: int) -> str:
        place = self._place_of(rank)
        if not self._store.check([f"address/{rank}"]):
            return f"rank {rank}, which has not begun a call"
        if place is None or place[0] < call:
            return f"rank {rank}, which is there and was not seen waiting in this call"
        return f"rank {rank}, which waits for {place[1]}"

    def _ended(self, ranks: "list[int] | tuple[int, ...]") -> dict[int, str]:
        """Those of ``ranks`` that have, in words."""
        ended: dict[int, str] = {}
        for rank in ranks:
            if rank == self.rank:
                continue
            if self._store.check([f"ended/{rank}"]):
                ended[rank] = f"rank {rank} ended with {self._store.get(f'ended/{rank}').decode()}"
            elif self._store.check([f"address/{rank}"]):
                address = ProcessAddress.parse(self._store.get(f"address/{rank}").decode())
                if address.look() is Liveness.ENDED:
                    ended[rank] = f"rank {rank} has ended ({address} is gone)"
        return ended

    def _adopted(self, told: _Told) -> GroupFailure:
        """The fault of the group, as an error of this rank."""
        self._fault = told.fault
        return self._fault

    def _broken(self, fault: GroupFailure, call: int) -> GroupFailure:
        """The first fault of the group: ``fault``, found in ``call``, unless another rank has
        found one before. A rank that finds one has begun ``call``, or votes in it, and has done its
        part of all calls before."""
        if self._fault is None:
            text = json.dumps([call, fault.code, fault.message, fault.where, fault.remedy])
            self._told = _Told.parse(self._store.compare_set("broken", "", text))
            self._adopted(self._told)
        assert self._fault is not None
        self._leave()
        return self._fault

    def _leave(self) -> None:
        """Say, once, that this rank knows of the fault; the one whose process holds the store is
        there until all do."""
        if not self._left:
            self._left = True
            self._store.add("heard", 1)
            if self._holds_store:
                self._stay()

    def _stay(self) -> None:
        """The store ends with this process: until the others have heard, or a while."""
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            if self._store.add("heard", 0) >= len(self.ranks) - len(self._ended(self.ranks)):
                return
            time.sleep(0.05)

    @contextmanager
    def _reached(self) -> Generator[None]:
        """An error of the store itself is that of the process that holds it."""
        try:
            yield
        except RuntimeError as error:
            raise self.without_store(error) from error

    def without_store(self, error: RuntimeError) -> GroupFailure:
        """TR-503: nothing can be heard of the other ranks. What was heard before explains it."""
        if self._told is not None:
            return self._adopted(self._told)
        self._fault = GroupFailure(
            "the store of the process group cannot be reached: the process that holds it, rank "
            f"0 or torchrun, has ended ({str(error).splitlines()[0]})",
            code="TR-503",
            remedy=f"see the output of rank 0; {_RESTART}",
        )
        return self._fault

    def note_end(self, error: BaseException) -> None:
        """The script of this rank ends with ``error``."""
        try:
            self._store.set(f"ended/{self.rank}", _in_words(error))
        except RuntimeError:
            return  # the store has ended before


@final
class _Looks:
    """What a rank looks at while it waits for a collective. A store that is gone is not yet a
    fault: the process that held it may have done its part of the last collective, and ended."""

    def __init__(self, peers: Peers, awaited: Awaited) -> None:
        self._peers = peers
        self._awaited = awaited
        self._began = self._longer = time.monotonic()
        self._gone: tuple[float, RuntimeError] | None = None

    def look(self) -> None:
        """Raise what ``Peers.wait`` does for other ranks' sake."""
        now = time.monotonic()
        if self._gone is None:
            try:
                # Not the call in which it was started, which is over: this one waits for it.
                self._peers.look(self._peers.call, self._began)
                if now - self._longer > _SEEN_WAITING:
                    self._peers.look_longer(self._awaited)
                    self._longer = now
            except RuntimeError as error:
                self._gone = now, error
        elif now - self._gone[0] > _GRACE:
            raise self._peers.without_store(self._gone[1])


def _ends_within(work: "distributed.Work", seconds: float) -> bool:
    """Whether it ends in this time. Raises its own error."""
    try:
        return work.wait(timedelta(seconds=max(seconds, _MILLISECOND)))
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()  # it ended meanwhile, or by an error


def _death(ended: dict[int, str], consequence: str) -> GroupFailure:
    told = "; ".join(ended.values())
    return GroupFailure(
        f"{told}: {consequence}", code="TR-503", remedy=f"see the output of that rank; {_RESTART}"
    )


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _note_end(known: "weakref.ref[Peers]") -> None:
    """At the end of the interpreter: the error that ended it."""
    peers = known()
    error = vars(sys).get("last_value")  # of one that nobody handled
    if peers is not None and isinstance(error, BaseException):
        peers.note_end(error)


_KNOWN: dict[str, tuple[Callable[[], object], Peers]] = {}


def peers_of(group: "distributed.ProcessGroup", device: torch.device) -> Peers:
    """Those in ``group``; a group that was made anew has new ones."""
    name = name_of_group(group)
    known = _KNOWN.get(name)
    if known is None or known[0]() is not group:
        known = weakref.ref(group), Peers(group, device)
        _KNOWN[name] = known
    return known[1]
