"""Which variant serves a call: one that is known, one of many sizes, or one compiled for it."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from treadle.capture.argument_containers import ServedCall
from treadle.capture.captured import Captured
from treadle.capture.dynamic import Dims
from treadle.capture.eager import CallsClosure
from treadle.capture.explain_errors import branches
from treadle.capture.failures import raise_told
from treadle.capture.python_state.call_arguments import CallArguments, parameter_names
from treadle.capture.python_state.object_graph import Location, argument_place
from treadle.capture.step import capture
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.compiler.compiled import Compiled
from treadle.compiler.pipeline import compile_graph
from treadle.options import Options
from treadle.report.stages import Clock
from treadle.report.watch import watcher_for
from treadle.runtime.execute.arena import Arena
from treadle.runtime.store.cache import Cache
from treadle.session.agreement import common_text, groups_of, tell_refusal
from treadle.session.bind import read_inputs
from treadle.session.breaks import Break, show_regions, warn_of_breaks
from treadle.session.carried import Carrier, flush_all
from treadle.session.saved import Saved
from treadle.session.starts import Starts
from treadle.session.user_step import UserStep
from treadle.session.variants.guards import Called, GuardKey, Keys
from treadle.session.variants.shapes import Dynamic, find
from treadle.session.variants.specialization import Specializations, fixed_numbers
from treadle.session.variants.variants import Variants, warn_of_recaptures, warn_of_recompiles
from treadle.targets.registry import target_for
from treadle.util.errors import GroupFailure, LoweringError
from treadle.util.expected import NotExpected


class TooManyPaths(NotExpected):
    """A call takes a path for which there is no variant, and no room for another one."""


class Dispatcher:
    """The variants of one step. ``recompiles``: why there is more than one, in words;
    ``recaptures``: likewise, of those that run the program of another; ``last``: the one that
    served last; ``call``: the arguments that are served; ``carrier``: what its calls leave
    for later ones."""

    def __init__(
        self,
        step: UserStep,
        options: Options,
        shapes: Dynamic | None,
        cache: Cache,
        saved: Saved | None,
    ) -> None:
        self.recompiles: list[str] = []
        self.recaptures: list[str] = []
        self.last: Compiled | None = None
        self.call = ServedCall()
        self.carrier = Carrier(step.models, step.optimizers)
        self.variants = Variants(options.max_cached)
        self._arena = Arena()  # of all variants
        self._step = step
        self._options = options
        self._shapes = shapes
        self._cache = cache
        self._saved = saved
        self._starts = Starts(step, options, cache, self.call, self._arena)
        self._keys = Keys(step.models, step.optimizers, parameter_names(step.function))
        self._arguments = CallArguments(step.function)
        self._special: Specializations | None = None
        self._numbers: list[Location] = []  # of Python's, that change from call to call
        self._breaks: set[Break] = set()  # that were reported
        self._closure: CallsClosure | None = None  # why calls are no single graph by now
        self._path: Answers = ()  # that a call is known to take, at its beginning

    def beside(self, step: UserStep) -> "Dispatcher":
        """The variants of ``step``, a part of this one: told about with it."""
        part = Dispatcher(step, self._options, None, self._cache, self._saved)
        part.recompiles, part.recaptures = self.recompiles, self.recaptures
        part._arena = self._arena
        return part

    def forget_closure(self) -> None:
        """A call that was to call a closure has called none: the next one is captured again."""
        self._closure = None

    def variant(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, update: bool = True
    ) -> Compiled:
        """For this call; ``update``: whether optimizers step. Raises what compiling raises."""
        self._step.start()
        args, kwargs = self._arguments.of(args, kwargs)
        called, inputs = self._keys.called(args, kwargs, update=update)
        self.call.serve(inputs)
        try:
            compiled = None if self._path else self.variants.again(called)
            if compiled is None:
                compiled = self._looked_up(called, args, kwargs, update)
        except (NotExpected, CallsClosure, GroupFailure):
            raise
        except Exception as error:
            tell_refusal(self._step.models, self._step.group, self.last, error)
            raise
        finally:
            self._path = ()
        self.last = compiled
        return compiled

    def takes_other_path(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Whether a call, of which nothing has happened, decides otherwise than the variant that
        was to serve it: the next look for one knows."""
        if self.last is None or self.last.captured.dependencies.path.questions is None:
            return False
        named = dict(kwargs)
        self._step.take_update(named)
        _, inputs = self._keys.called(*self._arguments.of(args, named))
        self.call.serve(inputs)
        path = self._other_path(self.last.captured)
        self._path = path or ()
        return path is not None

    def _other_path(self, captured: Captured) -> Answers | None:
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

    def again(
        self, compiled: Compiled, misfit: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Compiled:
        """A new variant in the place of one that does not fit what its key stands for; ``misfit``
        says why."""
        self.variants.drop(compiled)
        self._special = None
        known = len(self.recompiles)
        reused = self.variant(args, kwargs, update=self._step.take_update(kwargs))
        self.recompiles[known:] = [misfit]
        return reused

    def _looked_up(
        self, called: Called, args: tuple[object, ...], kwargs: dict[str, object], update: bool
    ) -> Compiled:
        key = self._keys.key(called)
        compiled = self.variants.get(key, self._path)
        if compiled is None:
            if self._closure is not None:
                raise self._closure.with_traceback(None)
            try:
                compiled = self._made(key, args, kwargs, update)
            except CallsClosure as error:
                self._refuse(error)
                self._closure = error
                raise
            self.variants.add(key, compiled)
        else:
            self.variants.note(compiled, called, self._keys)
        return compiled

    def _refuse(self, error: CallsClosure) -> None:
        """Where the closure alone must not, or cannot, be what is compiled."""
        if self._options.strict:
            raise _strict(error.message, error.code, error.where)
        if self._step.group is not None:
            raise error.refused()

    def _made(
        self, key: GuardKey, args: tuple[object, ...], kwargs: dict[str, object], update: bool
    ) -> Compiled:
        known = len(self.recompiles)
        if self.variants.forget_replaced(key):
            self.recompiles.append("parameters were replaced by other objects")
            self._special = None
        compiled = self._specialized(key, args, kwargs, update)
        if compiled is not None:
            return compiled
        reasons = self._why_not(key)
        self._note_numbers(self.variants.changed_numbers(key))
        compiled = self._started(key, args, kwargs)
        if compiled is None:
            compiled = self._compile(args, kwargs, update=update)
            if self._shapes is None and not self._path and not self._numbers:
                self._starts.keep(key, compiled)
        if self.variants.runs(compiled):
            self._note_recapture(reasons)
        else:
            self.recompiles += reasons
            warn_of_recompiles(self.recompiles, known)
        return compiled

    def _started(
        self, key: GuardKey, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Compiled | None:
        """The variant as another process captured and compiled it; nothing is traced."""
        if self._shapes is not None or self._path or self._numbers:
            return None
        with _without_inference_mode():
            compiled = self._starts.find(key, args, kwargs, tuple(self.variants))
        if compiled is not None:
            self._tell(compiled)
        return compiled

    def _note_recapture(self, reasons: list[str]) -> None:
        """What changed made no difference to what runs."""
        known = len(self.recaptures)
        self.recaptures += reasons
        warn_of_recaptures(self.recaptures, known)

    def _why_not(self, key: GuardKey) -> list[str]:
        """Why no variant serves a call, in words; ``TooManyPaths`` where another one has no
        room."""
        drawn = self.last is not None and self.last.captured.dependencies.host_draws.decides()
        if len(self.variants) >= self._options.max_cached and (self._path or drawn):
            raise TooManyPaths(
                f"it takes a path of its own, beside max_cached={self._options.max_cached} "
                "variants that are kept"
            )
        if not self._path or self.last is None:
            return self.variants.why_not(key, self._step.models)
        return [self.last.captured.dependencies.path.decisions[len(self._path) - 1].words]

    def _note_numbers(self, numbers: Iterable[str | Location]) -> None:
        """From now on these are inputs, where the graph allows it."""
        known = set(map(_identity, self._numbers))
        for number in numbers:
            place = argument_place(number) if isinstance(number, str) else number
            if _identity(place) not in known:
                known.add(_identity(place))
                self._numbers.append(place)

    def _specialized(
        self, key: GuardKey, args: tuple[object, ...], kwargs: dict[str, object], update: bool
    ) -> Compiled | None:
        """The variant for this call's sizes, if dynamic shapes were declared and it may be one."""
        if self._shapes is None:
            return None
        shape = find(self._shapes, self._step.function, args, kwargs)
        models = self._step.models.values()
        tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
        if not all(target_for(tensor.device).any_size for tensor in tensors):
            return None  # generated code for GPUs has its sizes in it
        special = self._special or Specializations(self._shapes, self.recompiles)
        self._special = special
        return special.variant(
            key,
            shape,
            fixed_numbers(tensors),
            lambda dims: self._compile(args, kwargs, dims, update=update),
        )

    def _compile(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        dims: Dims | None = None,
        *,
        update: bool = True,
    ) -> Compiled:
        flush_all()  # a compile may run the models on made-up tensors
        watcher = watcher_for(self._step.name, self._options)
        clock = Clock(watcher)
        try:
            with clock.stage("capture"), _without_inference_mode():
                captured = self._captured(args, kwargs, dims, update)
            self._note_numbers(captured.dependencies.counters)
            compiled = compile_graph(
                captured,
                self._options,
                cache=self._cache,
                clock=clock,
                known=self.variants,
                arena=self._arena,
            )
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
        why = self._saved.difference(compiled.facts) if self._saved else ""
        self.recompiles += [why] if why else []
        if self._options.strict:
            _refuse_fallbacks(compiled)
        warn_of_breaks(compiled, self._breaks)
        show_regions(compiled)

    def _captured(
        self, args: tuple[object, ...], kwargs: dict[str, object], dims: Dims | None, update: bool
    ) -> Captured:
        """The step along the path that this call takes."""
        along = functools.partial(
            capture,
            self._step.function,
            models=self._step.models,
            optimizers=self._step.optimizers,
            args=args,
            kwargs=kwargs,
            dims=dims,
            update=update,
            call=self.call,
            numbers=tuple(self._numbers),
            group=self._step.group,
        )
        captured = along(path=self._path)
        asked = [
            decision for decision in captured.dependencies.path.decisions if decision.is_branch
        ]
        if self._options.strict and asked:
            raise branches(asked[0].where)
        while (path := self._other_path(captured)) is not None:
            captured = along(path=path)
        if captured.failed is not None:
            raise_told(captured.failed)
        return captured


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


def _strict(words: str, code: str, where: str = "") -> LoweringError:
    return LoweringError(
        f"strict: an optimizer would step eagerly: {words}",
        code="TR-302",
        where=where,
        remedy=f"leave strict off; {code} says what to do",
    )


def _refuse_fallbacks(compiled: Compiled) -> None:
    for optimizer in compiled.captured.optimizers.eager:
        raise _strict(optimizer.reason.words, optimizer.reason.code)
    reasons = compiled.artifact.fallbacks
    if reasons:
        lines = "; ".join(f"{step.op}: {step.reason}" for step in reasons[:5])
        raise LoweringError(
            f"strict: {len(reasons)} operations fall back to PyTorch's kernels: {lines}",
            code="TR-302",
            where=reasons[0].origin,
            remedy="leave strict off, or register a lowering for the operation",
        )
