"""The other ranks of a process group: the check that they run the same step, and the reason why
they cannot continue.

When each check happens: a call that runs the same step as the previous call does not use the store.
A rank with another step starts a vote of all ranks before its first collective. A rank that waits
for longer than a few milliseconds, in a collective or in a vote, checks whether others vote or have
failed.

A fault ends all waits in its call or in a later one. The rank that found it has finished its part
of every earlier call, where the others may still be receiving: such a wait ends normally, or after
a while.
"""

import atexit
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import final

import torch
from torch import distributed

from treadle.compat.distributed.collectives import name_of_group
from treadle.compat.distributed.process_groups import timeout_of
from treadle.runtime.ranks.group_store import (
    GRACE,
    RESTART,
    Awaited,
    GroupFault,
    GroupStore,
    in_words,
)
from treadle.runtime.ranks.votes import VariantText, Votes
from treadle.util.errors import GroupFailure

_SHORTEST, _LONGEST = 1e-4, 0.25  # seconds between two looks while waiting
_MILLISECOND = 1e-3  # a shorter wait for a collective is one without limit
_SEEN_WAITING = 1.0  # seconds after which a rank says what it waits for
_NOTHING = VariantText((), ())


@final
class Peers:
    """What this rank knows of its group; ``device``: of the collectives."""

    def __init__(self, group: "distributed.ProcessGroup", device: torch.device) -> None:
        self.call = 0  # the last one that began
        self._within = False  # whether it goes on
        self._timeout = timeout_of(group, device)
        self._number = 0  # of collectives in this call
        self._agreed = _NOTHING
        self._voted = 0  # the last call in which this rank voted
        self.store = GroupStore(group)
        self.fault = GroupFault(self.store)
        with self.fault.of_store():
            self.store.tell_address()
        atexit.register(_note_end, weakref.ref(self))

    def begin(self, variant: VariantText) -> None:
        """Begin a call of a step that communicates. TR-502 on all ranks, before any of them starts
        a collective of the step, unless all run the same step."""
        self._go_on()
        self.call += 1
        self._within = True
        self._number = 0
        if variant.digest == self._agreed.digest:
            return
        with self.fault.of_store():
            self.store.ask(self.call)
            self._vote(self.call, variant)
        self._agreed = variant

    def refused(self, variant: VariantText) -> None:
        """Publish that this rank runs nothing in a call, and wait for nobody. TR-502 on the ranks
        that run a step; if none does, all continue."""
        if self.fault.raised is not None:
            return
        self.call += 1
        with suppress(RuntimeError):  # nobody can be told: the error at hand is what is raised
            self.store.ask(self.call)
            self._give(self.call, variant).tell(variant)
        self._agreed = variant

    def end(self) -> None:
        """End this rank's part of the call: later errors belong to the next call."""
        self._within = False

    def started(self, what: str) -> Awaited:
        """Note a collective that begins now."""
        self._number += 1
        return Awaited(self.call, self._number, what, time.monotonic())

    def wait(self, work: "distributed.Work", awaited: Awaited) -> None:
        """Wait until a collective has ended, on the host. TR-503 if a rank has ended, TR-504 after
        the timeout of the group, TR-505 if a rank failed, TR-502 if one runs another step."""
        pause = _SHORTEST
        looks = _Looks(self, awaited)
        try:
            while not _ends_within(work, pause):
                pause = min(2 * pause, _LONGEST)
                looks.look()
        except RuntimeError as error:
            with self.fault.of_store():
                raise self.fault.declare(self._reason(error, awaited), self.call) from error

    def raised(self, error: BaseException) -> None:
        """Publish that this rank leaves the call by an error of its own, so that the others need
        not wait for it."""
        if self.fault.raised is not None or isinstance(error, GroupFailure):
            return
        call = self.call if self._within else self.call + 1
        text = f"rank {self.store.rank} failed in call {call}: {in_words(error)}"
        fault = GroupFailure(text, code="TR-505", remedy=f"see its output; {RESTART}")
        try:
            self.fault.declare(fault, call)
        except RuntimeError:
            return  # nobody can be told: the error at hand is what is raised

    # What others say.

    def look(self, call: int, began: float) -> None:
        """``call`` has waited since ``began``. Raise the fault that another rank found, if it ends
        the wait; answer a rank that asks what this rank runs."""
        told = self.fault.heard()
        if told is not None and told.ends(call, began):
            fault = self.fault.adopted(told)
            with suppress(RuntimeError):  # the store is gone: the fault is known without it
                self.fault.leave()
            raise fault
        asked = self.store.asked()
        if asked is not None:
            votes = Votes(self.store.keys, min(asked, self.call), self.store.ranks)
            # A rank that was refused asks in its next call before others have answered in this one.
            if self._voted < votes.call and (asked == votes.call or votes.is_open()):
                self._vote(votes.call, self._agreed)

    def look_longer(self, awaited: Awaited) -> None:
        """Once a second while waiting: publish what this rank waits for, and check that the next
        rank is alive. The rank before checks this one, so that each death is noticed."""
        self.store.tell_waiting(awaited)
        ended = self.store.ended([self.store.following])
        if ended:
            raise self.fault.declare(_death(ended, f"{awaited} cannot end"), self.call)

    def _vote(self, call: int, variant: VariantText) -> None:
        """Publish what this rank runs; TR-502 if not all ranks run the same."""
        votes = self._give(call, variant)
        self._until(votes)
        if not votes.is_same():
            raise self.fault.declare(votes.difference(variant), call)

    def _give(self, call: int, variant: VariantText) -> Votes:
        votes = Votes(self.store.keys, call, self.store.ranks)
        previous = (self._voted, self._agreed.digest) if self._voted else None
        self._voted = call
        votes.give(self.store.rank, variant, previous)
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
                raise self.fault.declare(late, votes.call)
            if now - looked > _SEEN_WAITING:  # a rank that has ended will not vote
                looked = now
                ended = self.store.ended(votes.missing())
                if ended:
                    death = _death(ended, f"call {votes.call} could not begin")
                    raise self.fault.declare(death, votes.call)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _go_on(self) -> None:
        if self.fault.raised is not None:
            raise GroupFailure(
                "an earlier call failed, so its process group cannot continue: "
                f"{self.fault.raised.message}",
                code="TR-506",
                remedy=RESTART,
            )

    def _reason(self, error: RuntimeError, awaited: Awaited) -> GroupFailure:
        """Why a collective failed: the fault that another rank has found, or the one found here."""
        if time.monotonic() - awaited.began > 0.9 * self._timeout:
            late = [rank for rank in self.store.ranks if not self.store.waits_at(rank, awaited)]
            return self._too_late(str(awaited), late, awaited.call)
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            told = self.fault.heard()
            if told is not None:  # of whatever call: this one cannot end any more
                return self.fault.adopted(told)
            ended = self.store.ended(self.store.ranks)
            if ended:
                return _death(ended, f"{awaited} could not finish")
            time.sleep(0.05)
        first = str(error).splitlines()[0]
        return GroupFailure(
            f"the connection to another rank was lost in {awaited}, but no rank is known to have "
            f"ended: {first}",
            code="TR-503",
            remedy=f"see the output of all ranks; {RESTART}",
        )

    def _too_late(self, what: str, late: list[int], call: int) -> GroupFailure:
        ended = self.store.ended(late)
        told = [ended.get(rank) or self.store.last_seen(rank, call) for rank in late]
        ranks = f"did not arrive: {'; '.join(told)}" if late else "all ranks arrived"
        return GroupFailure(
            f"{what} did not finish within {self._timeout:g} s; {ranks}",
            code="TR-504",
            remedy="check what these ranks did; timeout= of init_process_group sets the limit",
        )


@final
class _Looks:
    """The checks of a rank while it waits for a collective. A store that is gone is not yet a
    fault: the process that held it may have done its part of the last collective and ended."""

    def __init__(self, peers: Peers, awaited: Awaited) -> None:
        self._peers = peers
        self._awaited = awaited
        self._began = self._longer = time.monotonic()
        self._gone: tuple[float, RuntimeError] | None = None

    def look(self) -> None:
        """Raise the errors of ``Peers.wait`` that come from other ranks."""
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
        elif now - self._gone[0] > GRACE:
            raise self._peers.fault.without_store(self._gone[1])


def _ends_within(work: "distributed.Work", seconds: float) -> bool:
    """Whether the collective ends within this time. Raises the collective's own error."""
    try:
        return work.wait(timedelta(seconds=max(seconds, _MILLISECOND)))
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()  # it ended meanwhile, or by an error


def _death(ended: dict[int, str], consequence: str) -> GroupFailure:
    told = "; ".join(ended.values())
    return GroupFailure(
        f"{told}: {consequence}", code="TR-503", remedy=f"see the output of that rank; {RESTART}"
    )


def _note_end(known: "weakref.ref[Peers]") -> None:
    """Publish, when the interpreter exits, the error that ended the script."""
    peers = known()
    error = vars(sys).get("last_value")  # of one that nobody handled
    if peers is not None and isinstance(error, BaseException):
        with suppress(RuntimeError):  # the store has ended before
            peers.store.tell_end(error)


_KNOWN: dict[str, tuple[Callable[[], object], Peers]] = {}


def peers_of(group: "distributed.ProcessGroup", device: torch.device) -> Peers:
    """The peers of ``group``; a group that was created again has new ones."""
    name = name_of_group(group)
    known = _KNOWN.get(name)
    if known is None or known[0]() is not group:
        known = weakref.ref(group), Peers(group, device)
        _KNOWN[name] = known
    return known[1]
