"""Creating a variant: the step is captured along the path that a call takes, and compiled."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch

from treadle.capture.argument_containers import ServedCall
from treadle.capture.captured import Captured
from treadle.capture.explain_errors import branches, needs_numbers
from treadle.capture.python_state.reads.object_graph import Location, argument_place
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.compiler.compiled import Compiled
from treadle.options import Options
from treadle.report.stages import Clock
from treadle.runtime.execute.arena import Arena
from treadle.runtime.store.cache import Cache
from treadle.session.agreement import common_text, groups_of
from treadle.session.bind import read_inputs
from treadle.session.breaks import Break, show_regions, warn_of_breaks
from treadle.session.carried import flush_all
from treadle.session.starts import Starts
from treadle.session.user_step import UserStep
from treadle.session.variants.guards import GuardKey
from treadle.session.variants.history import History
from treadle.session.variants.narrowing import compiled_in_part
from treadle.session.variants.new_call import NewCall
from treadle.session.variants.variants import Variants
from treadle.util.collector import without_collector
from treadle.util.errors import LoweringError, TreadleError
from treadle.util.expected import LeftToEager

if TYPE_CHECKING:
    from treadle.session.saved import Saved
    from treadle.session.variants.seen_sizes import SeenDims


_OF_EAGER = "TR-132"
"""The error of what eager refuses as well."""


@final
@dataclass(slots=True)
class VariantCompiler:
    """Makes the variants of ``step``. ``arena``: of all of them; ``call``: the arguments that are
    served."""

    step: UserStep
    options: Options
    cache: Cache
    saved: "Saved | None"
    history: History
    arena: Arena = field(default_factory=Arena)
    call: ServedCall = field(default_factory=ServedCall)
    _numbers: list[Location] = field(default_factory=list[Location])
    """Of Python's, that change from call to call."""
    _breaks: set[Break] = field(default_factory=set[Break])
    """Those that were reported."""
    _starts: Starts = field(init=False)

    def __post_init__(self) -> None:
        self._starts = Starts(self.step, self.options, self.cache, self.call, self.arena)

    def beside(self, step: UserStep) -> "VariantCompiler":
        """For ``step``, a part of this one: told about with it, in the same memory."""
        return VariantCompiler(step, self.options, self.cache, self.saved, self.history, self.arena)

    @without_collector()
    def stored_or_compiled(self, key: GuardKey, call: NewCall, known: Variants) -> Compiled:
        """The variant for ``call``, whose key is ``key``, as another process captured and compiled
        it, if one did; then nothing is traced. Otherwise it is compiled, and kept for others."""
        return self.stored(key, call, known) or self.compiled(key, call, known)

    @without_collector()
    def compiled(self, key: GuardKey, call: NewCall, known: Variants) -> Compiled:
        """The variant for ``call``, compiled, and kept for other processes."""
        compiled = self.compile(call, known)
        if not call.path:
            clock = Clock(seconds=compiled.seconds)
            with clock.stage("keep"):
                self._starts.keep(key, compiled)
        return compiled

    @without_collector()
    def stored(self, key: GuardKey, call: NewCall, known: Variants) -> Compiled | None:
        """The variant for ``call`` as another process captured and compiled it, if one did."""
        if call.path:
            return None
        with _without_inference_mode():
            compiled = self._starts.find(key, call, tuple(known))
        if compiled is not None:
            self.note_numbers(compiled.captured.dependencies.counters)
            self._tell(compiled)
        return compiled

    def stored_sizes(self, key: GuardKey, call: NewCall) -> "list[SeenDims]":
        """Dims that calls like this one had in other processes, which compiled it for them."""
        return [] if call.path else self._starts.sizes(key)

    def keep_sizes(self, key: GuardKey, dims: "SeenDims", compiled: Compiled) -> None:
        """The inverse: ``compiled`` is for these dims."""
        if compiled.start.keys:
            self._starts.keep_sizes(key, dims, compiled)

    @without_collector()
    def compile(self, call: NewCall, known: Variants) -> Compiled:
        """The variant for ``call``; ``known``: those that there are."""
        clock = Clock()
        with clock.stage("import"):  # late: a start needs no compiler, and does not trace
            from treadle.capture.step import capture
            from treadle.compiler.pipeline import compile_graph
            from treadle.report.watch import watcher_for
        flush_all()  # a compile may run the models on random tensors
        watcher = watcher_for(self.step.name, self.options)
        clock = clock.heard_by(watcher)
        try:
            with clock.stage("capture"), _without_inference_mode():
                captured = self._captured(capture, call)
            self.note_numbers(captured.dependencies.counters)
            compile_ = functools.partial(
                compile_graph,
                options=self.options,
                cache=self.cache,
                clock=clock,
                known=known,
                arena=self.arena,
            )
            compiled = compiled_in_part(captured, compile_)
        finally:
            watcher.closes()
        for program in compiled.programs:
            program.groups = groups_of(program.step)
            if program.groups:
                program.common = common_text(program.step, program.artifact)
        compiled.groups = groups_of(captured.step)
        self._tell(compiled)
        return compiled

    def _tell(self, compiled: Compiled) -> None:
        """What its user is to know. TR-302 with ``strict`` for what is not compiled."""
        why = self.saved.difference(compiled.facts) if self.saved else ""
        self.history.recompiles += [why] if why else []
        if self.options.strict:
            _refuse_fallbacks(compiled)
        self.history.compiled(compiled)
        warn_of_breaks(compiled, self._breaks)
        show_regions(compiled)

    def require_room(self, known: int) -> None:
        """``LeftToEager`` of a call that takes a new path where ``known`` variants are too many."""
        most = self.options.max_cached
        if known >= most:
            raise LeftToEager(
                f"it takes a new path, and there are max_cached={most} variants already"
            )

    def note_numbers(self, places: Iterable[str | Location]) -> None:
        """From now on these are inputs, where the graph allows it."""
        known = set(map(_identity, self._numbers))
        for label_or_place in places:
            is_label = isinstance(label_or_place, str)
            place = argument_place(label_or_place) if is_label else label_or_place
            if _identity(place) not in known:
                known.add(_identity(place))
                self._numbers.append(place)

    def other_path(self, captured: Captured) -> Answers | None:
        """Where the call that is served leaves the path of ``captured``."""
        if captured.dependencies.path.questions is None:
            return None
        try:
            return captured.dependencies.path.other(read_inputs(captured, self.call.leaves))
        except Exception:
            return None  # eager meets it as well
        finally:  # the call itself is still to come
            captured.inputs.pending.clear()
            captured.dependencies.host_draws.undo()

    def _captured(self, capture: Callable[..., Captured], call: NewCall) -> Captured:
        """The step along the path that this call takes, by ``capture``."""
        from treadle.capture.failures import raise_told  # late, and imported with ``capture``

        along = functools.partial(
            capture,
            self.step.function,
            models=self.step.models,
            optimizers=self.step.optimizers,
            args=call.args,
            kwargs=call.kwargs,
            dims=call.dims,
            update=call.update,
            call=self.call,
            numbers=tuple(self._numbers),
            group=self.step.group,
            eight_bits=self.step.eight_bits,
        )
        with _left_to_eager(call.path):
            captured = along(path=call.path)
        asked = [
            decision for decision in captured.dependencies.path.decisions if decision.is_branch
        ]
        if self.options.strict and asked:
            raise (needs_numbers if asked[0].is_number else branches)(asked[0].where)
        while (path := self.other_path(captured)) is not None:
            with _left_to_eager(path):
                captured = along(path=path)
        if captured.failed is not None:
            with _left_to_eager(captured.dependencies.path.answers):
                raise_told(captured.failed)
        return captured


@contextmanager
def _left_to_eager(path: Answers) -> Iterator[None]:
    """An error of the user's own along a path is eager's to raise: what the step prints before it
    may be values of the call."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if not path or (isinstance(error, TreadleError) and error.code != _OF_EAGER):
            raise
        raise LeftToEager(f"it takes a path that raised {type(error).__name__}") from error


def _identity(place: Location) -> tuple[object, ...]:
    """Of arguments the label says all: they have a place only during a call."""
    if not place.rooted:
        return (place.label,)
    return place.owner, place.at, place.name


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """What is traced in inference mode has no gradients to trace; without gradients it is the same
    graph."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def strict_error(words: str, code: str, where: str = "") -> LoweringError:
    """TR-302 for an optimizer that would step eagerly."""
    return LoweringError(
        f"strict=True: an optimizer would step eagerly: {words}",
        code="TR-302",
        where=where,
        remedy=f"leave strict off; {code} describes the alternatives",
    )


def _refuse_fallbacks(compiled: Compiled) -> None:
    for eager in compiled.captured.optimizers.eager:
        raise strict_error(eager.reason.words, eager.reason.code)
    reasons = compiled.artifact.fallbacks
    if reasons:
        lines = "; ".join(f"{step.op}: {step.reason}" for step in reasons[:5])
        raise LoweringError(
            f"strict=True: {len(reasons)} operations fall back to PyTorch's kernels: {lines}",
            code="TR-302",
            where=reasons[0].origin,
            remedy="leave strict off, or register a lowering for the operation",
        )
