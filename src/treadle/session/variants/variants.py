"""The compiled variants of a step, by what each of them depends on."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import nn

from treadle.capture.argument_containers import ServedCall
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.compiler.compiled import Compiled
from treadle.guards.watching import WatchedTensors, Watches
from treadle.session.variants.guards import (
    Called,
    GuardKey,
    Ignored,
    Keys,
    differing_arguments,
    differing_numbers,
    explain_difference,
    names_of,
)

_JOIN_AFTER = 16
"""Calls in a row after which the inputs are looked at together with all else. To prepare that takes
as long as it saves in a hundred calls, and is for nothing where inputs are others at every call."""
_LESS_OFTEN = 4
"""By how much that number grows whenever it was for nothing."""
_SHARED = 32  # variants of patterns kept per variant of its own: 1.5 MB each with 12 layers


@final
@dataclass(slots=True, eq=False)
class _Again:
    """What served the last call, and everything that has to be as it was for the next one.
    ``is_same``, ``is_bare``, ``vouched``: what a call that is served by it is told. ``calls``: that
    it has served."""

    compiled: Compiled
    called: Called
    watches: Watches
    is_same: bool
    is_bare: bool
    vouched: tuple[object, ...] = ()
    calls: int = 0

    def join_inputs(self) -> None:
        """From now on its inputs are looked at together with everything else, as far as they are
        watched."""
        if self.compiled.carrying is not None:
            return  # another program takes them
        holders = self.compiled.captured.inputs.values.holders
        watched = self.compiled.executable.watched
        if holders is not None:
            self.watches.add(holders)
            self.vouched += (holders,)
        if isinstance(watched, WatchedTensors):
            watched.join(self.watches)
            self.vouched += (watched,)
        self.watches.settle()


_Kind = tuple[ReadsGuard | None, Ignored]
"""What variants read outside, and what they do not depend on: those of one pattern share it."""


class Variants:
    """At most ``limit`` variants with code of their own; the least recently used one goes first.

    A call's key does not say what a step reads outside, which is only known of captured ones: a
    variant serves a call if that is as it was.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[GuardKey, Compiled] = OrderedDict()
        self._kinds: OrderedDict[_Kind, int] = OrderedDict()
        """How many variants are of each kind, the one that was used last at the end."""
        self._parted = False  # whether the last search gave a variant up
        self._recent: tuple[GuardKey, Compiled] | None = None  # the newest one
        self._again: _Again | None = None  # likewise, once more
        self._join_after = _JOIN_AFTER

    def __iter__(self) -> Iterator[Compiled]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def runs(self, compiled: Compiled) -> bool:
        """Whether one of them runs the program of ``compiled``."""
        return any(variant.executable is compiled.executable for variant in self)

    def again(self, called: Called, call: ServedCall) -> Compiled | None:
        """The variant of the last call, if nothing at all differs; that is looked at in one pass,
        and says nothing of what differs. ``call`` is told."""
        last = self._again
        if last is not None and last.called == called and last.watches.is_same():
            call.is_same, call.is_bare, call.vouched = last.is_same, last.is_bare, last.vouched
            last.calls += 1
            if last.calls == self._join_after:
                last.join_inputs()
            return last.compiled
        if last is not None and last.vouched:
            self._join_after *= _LESS_OFTEN
        self._again = None  # what it knows may be other objects' soon
        return None

    def note(self, compiled: Compiled, called: Called, keys: Keys) -> None:
        """``compiled``, which ``get`` has given, serves such calls while all is as it was then."""
        watches = Watches()
        if keys.join(watches) and compiled.captured.join(watches):
            stays = not compiled.runs_users_code
            bare = stays and keys.are_without_gradients(compiled.captured.gradients.cleared)
            self._again = _Again(compiled, called, watches.settle(), stays, bare)

    def get(self, key: GuardKey, path: Answers = ()) -> Compiled | None:
        """The variant for a call; it counts as used. ``path``: the answers that the call is known
        to give; without, the path that was taken last."""
        self._parted = False
        if path:  # what serves another call like the last one first would leave its path as well
            self._again = None
        recent = self._recent
        if recent is not None and recent[0] == key and not path:
            compiled = recent[1]
            if compiled.captured.dependencies.hold() and compiled.captured.optimizers.agrees():
                return compiled
        variant = self._search(key, path)
        self._recent = None if variant is None else (key, variant)
        return variant

    def _search(self, key: GuardKey, path: Answers) -> Compiled | None:
        for kind in reversed(self._kinds):
            whole = key.of(*kind)
            variant = self._known.get(whole)
            if variant is None or not variant.captured.dependencies.hold():
                continue
            if variant.captured.dependencies.path.answers[: len(path)] != path:
                continue
            if variant.captured.optimizers.agrees():
                self._known.move_to_end(whole)
                self._kinds.move_to_end(kind)
                return variant
            self._parted = True
            self._release(whole)
            return None
        return None

    def add(self, key: GuardKey, compiled: Compiled) -> None:
        """``key``: that of the call which ``compiled`` was made for."""
        captured = compiled.captured
        self._recent = self._again = None
        kind = captured.dependencies.reads, Ignored.of(captured)
        whole = key.of(*kind)
        self._kinds[kind] = self._kinds.get(kind, 0) + (whole not in self._known)
        self._kinds.move_to_end(kind)
        self._known[whole] = compiled
        self._evict()

    def _forget(self, key: GuardKey) -> Compiled:
        kind = key.outside, key.ignored
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
        return self._known.pop(key)

    def _release(self, key: GuardKey) -> None:
        self._forget(key).release()

    def changed_numbers(self, key: GuardKey) -> list[str | Location]:
        """Numbers that kept a variant from serving a call: of an argument its label, of others
        where they are."""
        numbers: list[str | Location] = []
        for known_key in self._known:
            if known_key.structure != key.structure:
                continue  # its places among the arguments are not there
            numbers += [] if known_key.outside is None else known_key.outside.other_numbers()
            numbers += [f"argument {at}" for at in differing_numbers(known_key, key)]
        return numbers

    def why_not(
        self,
        key: GuardKey,
        models: Mapping[str, nn.Module],
        sized: Callable[[GuardKey, GuardKey], GuardKey],
    ) -> list[str]:
        """Why there was none for a call, in words; nothing where there is none at all. ``sized``:
        the key of a variant, the second, as one that serves the sizes of a call."""
        if self._parted:
            return ["the step counts of an optimizer's parameters differ now"]
        keys = list(reversed(self._known))
        alike = [other for other in keys if key.as_seen_by(other) == other]
        names = names_of(models)
        if alike:  # all but what they read outside: the one that comes nearest
            read = [self._known[other].captured.dependencies for other in alike]
            changes = [dependencies.changed() for dependencies in read]
            near = min(range(len(read)), key=lambda at: read[at].distance())
            return changes[near][:1] if all(changes) else []
        served = {other: sized(key, other) for other in keys}
        other_sizes = [k for k, other in served.items() if key.as_seen_by(other) == other]
        candidates = other_sizes or served.values()
        nearest = sorted(candidates, key=lambda other: _distance(other, key))[:1]
        return [explain_difference(other, key, names) for other in nearest]

    def forget_replaced(self, key: GuardKey) -> bool:
        """Variants for parameters that the model no longer has go; whether there were any."""
        stale = [old for old in self._known if old.identity != key.identity]
        self._recent, self._again = (None, None) if stale else (self._recent, self._again)
        for old in stale:
            self._release(old)
        return bool(stale)

    def drop(self, compiled: Compiled) -> None:
        """This one goes, since it no longer fits what its key stands for."""
        self._recent = self._again = None
        for key in [key for key, variant in self._known.items() if variant is compiled]:
            self._release(key)

    def _evict(self) -> None:
        """Those of a pattern are small, and those that run the program of a newer one: they share
        its code and its arena."""
        newest = {id(variant.executable): key for key, variant in self._known.items()}
        own = [
            key
            for key, variant in self._known.items()
            if variant.pattern is None and newest[id(variant.executable)] is key
        ]
        shared = [key for key in self._known if key not in own]
        for key in own[: max(0, len(own) - self._limit)]:
            self._release(key)
        for key in shared[: max(0, len(shared) - _SHARED * self._limit)]:
            self._forget(key)


def _distance(other: GuardKey, key: GuardKey) -> tuple[bool, int]:
    """How far the key of a variant is from that of a call: one of a call with as many arguments is
    nearer than any other."""
    return other.structure != key.structure, differing_arguments(other, key)
