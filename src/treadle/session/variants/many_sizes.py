"""One compile for many sizes: of declared dims, or of dims that calls change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from treadle.capture.eager import CallsClosure
from treadle.capture.input_sources import Dims
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.compiler.compiled import Compiled
from treadle.session.variants.compiling import VariantCompiler
from treadle.session.variants.guards import GuardKey, Ignored
from treadle.session.variants.new_call import NewCall
from treadle.session.variants.seen_sizes import AlikeCalls, with_sizes_of
from treadle.session.variants.shapes import Dynamic, Found, find
from treadle.session.variants.specialization import Specializations, fixed_numbers
from treadle.session.variants.variants import Variants
from treadle.targets.record import DeviceTarget
from treadle.targets.registry import device_of_kinds, target_for
from treadle.util.errors import GroupFailure, LoweringError, TreadleError
from treadle.util.expected import NotExpected

_SETTLED = 16
"""Calls in a row after which another size is taken for the end of an epoch: it is compiled by
itself, which takes a third of the time, and the next other size makes the dims dynamic."""


@final
@dataclass(slots=True, eq=False)
class _Seen:
    """Calls of several sizes, and what was made for all of them."""

    calls: AlikeCalls
    is_dynamic: bool = False
    special: Specializations | None = None

    @property
    def serves_all(self) -> bool:
        """Whether something was made for all of them."""
        return self.is_dynamic and self.special is not None and not self.special.has_failed

    def undo(self) -> Callable[[], None]:
        """What forgets the calls that are seen from now on."""
        forget_calls, dynamic, special = self.calls.undo(), self.is_dynamic, self.special
        forget_ranges = None if special is None else special.undo()

        def forget() -> None:
            forget_calls()
            self.is_dynamic, self.special = dynamic, special
            if forget_ranges is not None:
                forget_ranges()

        return forget


@final
class ManySizes:
    """What serves calls of many sizes of one step."""

    def __init__(self, compiler: VariantCompiler, declared: Dynamic | None) -> None:
        self._compiler = compiler
        self._declared = declared
        self._special: Specializations | None = None
        self._seen: list[_Seen] = []
        self._undo: list[Callable[[], None]] = []  # of the call that is served

    def begin(self) -> None:
        """A call begins."""
        self._undo.clear()

    def failed(self) -> None:
        """The call has raised an error. Its sizes may be none that the step takes, and say nothing
        of which may come."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    @property
    def are_declared(self) -> bool:
        """Whether the user says which dims change."""
        return self._declared is not None

    def why_alone(self) -> str:
        """Why the last call's sizes are compiled by themselves, where others are not."""
        specials = (self._special, *(seen.special for seen in self._seen))
        return next((special.alone for special in specials if special and special.alone), "")

    def forget(self) -> None:
        """What was made is for parameters that are no more."""
        self._special, self._seen = None, []

    def note(self, key: GuardKey, compiled: Compiled) -> None:
        """A variant for sizes of its own was made for such a call."""
        if self._may_find_sizes(compiled) and not any(seen.calls.is_of(key) for seen in self._seen):
            captured = compiled.captured
            whole = key.of(captured.dependencies.reads, Ignored.of(captured))
            self._saw(_Seen(AlikeCalls(whole)))

    def variant(
        self, key: GuardKey, call: NewCall, known: Variants, in_a_row: int
    ) -> Compiled | None:
        """The variant for the sizes of a call from a compile for many; ``None`` where the call is
        compiled by itself. ``in_a_row``: calls that one variant has served until now."""
        if self._declared is not None:
            return self._of_declared(self._declared, key, call, known)
        seen = next((seen for seen in self._seen if seen.calls.is_of(key)), None)
        if seen is None:
            return self._of_new_kind(key, call, known)
        return self._of_seen(seen, key, call, known, in_a_row)

    def with_sizes_of(self, key: GuardKey, other: GuardKey) -> GuardKey:
        """``other``, that of a variant, with the sizes of a call, where calls like it may have any:
        then these are not why it does not serve the call."""
        served = any(seen.serves_all and seen.calls.is_like(other) for seen in self._seen)
        return with_sizes_of(key, other) if served else other

    def _of_new_kind(self, key: GuardKey, call: NewCall, known: Variants) -> Compiled | None:
        """Where other calls with such arguments have had several sizes, these have as well: those
        after ``eval()``, or of another update."""
        kin = (seen for seen in self._seen if seen.serves_all and seen.calls.is_like(key))
        spec = next((seen.calls.spec for seen in kin), None)
        if spec is None:
            return None
        seen = _Seen(AlikeCalls(key), is_dynamic=True)
        seen.calls.adopt(spec)
        self._saw(seen)
        compiled = self._of_seen(seen, key, call, known, 0)
        if compiled is not None:
            captured = compiled.captured
            seen.calls.key = key.of(captured.dependencies.reads, Ignored.of(captured))
        return compiled

    def _of_declared(
        self, declared: Dynamic, key: GuardKey, call: NewCall, known: Variants
    ) -> Compiled | None:
        sizes = find(declared, self._compiler.step.function, call.args, call.kwargs)
        if not self._target().any_size:
            return None
        history = self._compiler.history.recompiles
        self._special = self._special or Specializations(declared, history)

        def made(general: GuardKey, dims: Dims) -> Compiled:
            sized = replace(call, dims=dims, sizes=sizes.sizes)
            return self._compiler.stored_or_compiled(general, sized, known)

        return self._variant(self._special, key, sizes, made, call.path)

    def _of_seen(
        self, seen: _Seen, key: GuardKey, call: NewCall, known: Variants, in_a_row: int
    ) -> Compiled | None:
        self._undo.append(seen.undo())
        sizes = seen.calls.see(key)
        is_settled = not seen.is_dynamic and in_a_row >= _SETTLED
        seen.is_dynamic = bool(sizes.sizes)
        is_refused = seen.special is not None and seen.special.has_failed
        if is_settled or is_refused or not seen.is_dynamic:
            return None
        if seen.special is None:
            stored = self._compiler.stored(key, call, known)
            if stored is not None:
                why = self.why_not(key, call, known)
                self._compiler.history.recompiled(why, len(self._compiler.history.recompiles))
                return stored
            stored = self._stored(seen, key, call, known)
            if stored is not None:
                self._tell(seen, self.why_not(key, call, known))
                return stored
        spec = seen.calls.spec
        if seen.special is None or seen.special.spec.arguments != spec.arguments:  # other names
            seen.special = Specializations(spec, [])
        seen.special.spec = spec
        why = list[str]()
        made = self._maker(replace(call, sizes=sizes.sizes), known)

        def compiled_for(general: GuardKey, dims: Dims) -> Compiled:
            """What takes long where many variants are known is asked only before a compile."""
            why[:] = why or self.why_not(key, call, known)
            self._compiler.note_numbers(known.changed_numbers(key))
            return made(general, dims)

        compiled = self._variant(seen.special, key, sizes, compiled_for, call.path)
        if compiled is not None and seen.special.notes:
            self._compiler.keep_sizes(key, spec, compiled)
        self._tell(seen, why if compiled is not None else [])
        return compiled

    def why_not(self, key: GuardKey, call: NewCall, known: Variants) -> list[str]:
        """Why no variant serves a call, in words."""
        if call.path:
            return [call.parts]
        return known.why_not(key, self._compiler.step.models, self.with_sizes_of)

    def stored(self, key: GuardKey, call: NewCall, known: Variants) -> Compiled | None:
        """The variant for a call like no other before it, from what another process compiled for
        many sizes; then nothing is traced."""
        options = self._compiler.options
        if self._declared is not None or not options.dynamic or not self._target().any_size:
            return None
        if any(seen.calls.is_of(key) for seen in self._seen):
            return None
        seen = _Seen(AlikeCalls(key), is_dynamic=True)
        compiled = self._stored(seen, key, call, known)
        if compiled is not None and seen.special is not None:
            captured = compiled.captured
            seen.calls.key = key.of(captured.dependencies.reads, Ignored.of(captured))
            seen.special.notes.clear()  # a first call is no recompile
            self._saw(seen)
        return compiled

    def _saw(self, seen: _Seen) -> None:
        """Calls of a new kind."""
        known = self._seen  # not ``self``, which would hold itself
        known.append(seen)
        self._undo.append(lambda: known.remove(seen) if seen in known else None)

    def _stored(
        self, seen: _Seen, key: GuardKey, call: NewCall, known: Variants
    ) -> Compiled | None:
        """Likewise; then ``seen`` has the dims that calls had there."""
        for spec in self._compiler.stored_sizes(key, call):
            sizes = spec.found(key)
            if sizes is None:
                continue
            sized = replace(call, sizes=sizes.sizes)
            special = Specializations(spec, [])
            compiled = self._variant(special, key, sizes, self._finder(sized, known))
            if compiled is not None:
                seen.special = special
                seen.calls.adopt(spec)
                self._compiler.keep_sizes(key, spec, compiled)
                return compiled
        return None

    def _variant(
        self,
        special: Specializations,
        key: GuardKey,
        sizes: Found,
        make: Callable[[GuardKey, Dims], Compiled | None],
        path: Answers = (),
    ) -> Compiled | None:
        numbers = fixed_numbers(self._compiler.step.tensors())
        is_planned = self._compiler.options.budget is not None

        def made(general: GuardKey, dims: Dims) -> Compiled | None:
            if path:
                self._compiler.require_room(len(special.paths()))
            return make(general, dims)

        return special.variant(key, sizes, numbers, made, path, is_planned=is_planned)

    def _finder(
        self, call: NewCall, known: Variants
    ) -> Callable[[GuardKey, Dims], Compiled | None]:
        """Takes what another process compiled for many sizes."""

        def found(general: GuardKey, dims: Dims) -> Compiled | None:
            return self._compiler.stored(general, replace(call, dims=dims), known)

        return found

    def _maker(self, call: NewCall, known: Variants) -> Callable[[GuardKey, Dims], Compiled]:
        """Compiles for many sizes. ``LoweringError`` for whatever keeps that from being done: the
        sizes of the call are compiled by themselves, which meets what is wrong with the step."""

        def made(general: GuardKey, dims: Dims) -> Compiled:
            sized = replace(call, dims=dims)
            try:
                compiled = self._compiler.stored_or_compiled(general, sized, known)
            except (NotExpected, CallsClosure, GroupFailure):
                raise
            except Exception as error:
                is_ours = isinstance(error, TreadleError)
                said = error.message if is_ours else f"{type(error).__name__}: {error}"
                raise LoweringError(said, code="TR-305") from error
            if not self._may_find_sizes(compiled):
                raise LoweringError("what the step computes depends on values", code="TR-305")
            return compiled

        return made

    def _tell(self, seen: _Seen, why: list[str]) -> None:
        """What was compiled, and how its sizes are declared."""
        special = seen.special
        if special is None or not special.notes:
            return
        history = self._compiler.history
        told = "; ".join((*why, *special.notes))
        special.notes.clear()
        if why:
            ranges = "".join(f", {name}={sizes}" for name, sizes in special.spec.ranges.items())
            declared = {argument: dict(dims) for argument, dims in special.spec.arguments.items()}
            told += f", as treadle.dynamic({declared}{ranges}) declares"
        if why:
            history.recompiled([told], len(history.recompiles))
        else:  # the call goes on to compile its own sizes: then it is said, unless that fails
            history.recompiles.append(told)
        self._undo.append(lambda: history.forget(told))

    def _may_find_sizes(self, compiled: Compiled) -> bool:
        """Whether calls may decide which dims of this one's arguments change: nothing else does,
        such as other ranks or updates of another call."""
        options, step = self._compiler.options, self._compiler.step
        depends, target = compiled.captured.dependencies, self._target()
        decides = depends.host_draws.decides()
        alone = step.group is None and not compiled.groups and not options.carries
        return (
            options.dynamic and self._declared is None and alone and not decides and target.any_size
        )

    def _target(self) -> DeviceTarget:
        kinds = frozenset(tensor.device.type for tensor in self._compiler.step.tensors())
        return target_for(device_of_kinds(kinds), self._compiler.options.target)
