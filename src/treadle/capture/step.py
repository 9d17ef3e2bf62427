"""A training step to one functional graph, by running it once on fake tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.argument_containers import ServedCall
from treadle.capture.build_graph import build_graph
from treadle.capture.captured import Captured
from treadle.capture.device_override import autocast_on, check_values, described
from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.distributed.reduction_contracts import (
    check_contracts,
    contract_of_wrapper,
    sharded_contracts,
)
from treadle.capture.distributed.shared_buffers import send_written_buffers
from treadle.capture.distributed.unsynced_gradients import refuse_unsynced_gradients
from treadle.capture.dynamic import take_samples, with_symbols
from treadle.capture.eager import CallsClosure
from treadle.capture.explain_errors import ExitsProgram, users_frames
from treadle.capture.failures import raise_told
from treadle.capture.input_sources import Dims, StepInputs
from treadle.capture.optimizers.own_steps import OwnSteps
from treadle.capture.python_state.code.set_again import SetAgain
from treadle.capture.python_state.reads.numbers_set_again import numbers_set_again
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.refuse import check_models, refuse_within_trace
from treadle.capture.repeated_runs import RepeatedRuns
from treadle.capture.run_reads import reads_of
from treadle.capture.sources import Batch, Parameter, Pending, RunTimeArray, Source, State
from treadle.capture.symbolic.arrays.arrays import overlaps
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.run import Run
from treadle.compat.distributed.fully_sharded import plans_of
from treadle.compat.fake import alone
from treadle.compat.tracing import TRACING, load_tracer
from treadle.graph.analysis.dynamic import Symbols
from treadle.graph.core.signature import Input
from treadle.util.collector import without_collector
from treadle.util.errors import CaptureError
from treadle.util.frames.data_stack import with_room


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Capture:
    """What ``capture`` is given, which says what each field is."""

    function: Callable[..., object]
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    place: torch.device | None
    dims: Dims | None
    update: bool
    call: ServedCall
    numbers: Sequence[Location]
    group: RankGroup | None
    eight_bits: bool
    path: Answers

    def request(self, own_steps: OwnSteps) -> TraceRequest:
        """What is traced. ``own_steps``: of optimizers whose own code is taken in the graph."""
        inputs = StepInputs.of(
            self.function,
            self.models,
            self.optimizers,
            self.args,
            self.kwargs,
            self.call,
            group=self.group,
            place=self.place,
            eight_bits=self.eight_bits,
        )
        inputs.refuse_hooks()
        return TraceRequest(
            self.function,
            self.models,
            self.optimizers,
            inputs.param_groups,
            inputs.sources,
            inputs.leaves,
            inputs.spec,
            self.call,
            inputs.device,
            own_steps,
            update=self.update,
            plans=self.place is not None,
            group=self.group,
            eight_bits=self.eight_bits,
            path=self.path if self.group is None else None,
            dims=self.dims,
        )


@with_room
@without_collector()
def capture(
    function: Callable[..., object],
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    place: torch.device | None = None,
    dims: Dims | None = None,
    update: bool = True,
    call: ServedCall | None = None,
    numbers: Sequence[Location] = (),
    group: RankGroup | None = None,
    eight_bits: bool = False,
    path: Answers = (),
) -> Captured:
    """Run ``function`` once on fake tensors; nothing of the user's changes.

    ``place``: capture as if everything were there, reading no values; the model may have none.
    ``dims``: the shapes of those leaves of the arguments that have sizes which later calls change.
    ``update=False``: gradients are accumulated, and optimizers do not step. ``call``: where the
    arguments of the calls to come are found; ``numbers``: places of Python's whose numbers change
    from call to call, and are to be inputs where the graph allows it. ``group``: over whose ranks
    the gradients of a plain model are averaged. ``eight_bits``: keep optimizer state in 8 bits
    where ``StateBlocks`` allows it. ``path``: the answers to the first questions of the step about
    values of tensors of which both ways go on; others are guessed. What fails after a guess is not
    raised: it is ``failed`` of a step that is captured up to there.

    Optimizers without an update rule step by their own code, which is captured; where it cannot
    be, after the graph.

    Raises ``CaptureError`` with a code, the user's line and a remedy for what cannot become a
    graph; an exception of the user's own passes through unchanged, ``SystemExit`` as well.
    """
    refuse_within_trace(function)
    check_models(models, optimizers)
    load_tracer()
    call = call or ServedCall()
    key = function, models, optimizers, args, kwargs, place, dims, update, call, numbers
    step = _Capture(*key, group, eight_bits, path)
    tried: list[Run] = []
    own_steps, first = OwnSteps.of(optimizers), None
    while True:
        try:
            return _captured(step, own_steps, tried)
        except CallsClosure:
            raise
        except Exception as error:
            first, failed = first or error, own_steps.failed
            if not own_steps.taken:  # what is outside the graph may be why
                error = error if own_steps.has_failed else first
                if not isinstance(error, CaptureError) and place is None and tried and not path:
                    tried[-1].outputs.tell_known()  # the user's own error: no call says it again
                raise (error.exits if isinstance(error, ExitsProgram) else error) from None
            others = own_steps.taken if failed is None else frozenset({failed})
            own_steps = own_steps.without(others, _words_of(error))


def _words_of(error: Exception) -> str:
    if isinstance(error, CaptureError):
        return f"{error.message} ({error.code})"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _captured(step: _Capture, own_steps: OwnSteps, tried: list[Run]) -> Captured:
    """With those of the optimizers whose own steps are taken in the graph. ``tried`` gets each
    run."""
    request = step.request(own_steps)
    sources = request.sources
    inputs, symbols = _values(sources, request.leaves, step.place), None
    if step.dims:
        inputs, symbols = with_symbols([source for _, source in sources], inputs, step.dims)
        request = replace(request, symbols=symbols)
    run, captured = _traced(step, request, inputs, symbols, tried)
    if captured.failed is not None:
        return captured
    _refuse_shared(captured, request.leaves)
    _check_plans(captured, run, step.models)
    if step.group is not None:
        refuse_unsynced_gradients(captured.step, step.group)
        send_written_buffers(captured.step, step.group)
    if symbols is not None:
        captured.sized = run.numbers.settle_sizes()
        assert step.dims is not None, "symbols are of dims"
        take_samples(captured, symbols, step.dims)
    return captured


def _values(
    sources: Sequence[tuple[Input, Source]], leaves: list[object], place: torch.device | None
) -> list[Tensor]:
    """What the run is given, in the order of the sources; at a ``place`` only descriptions."""
    if place is not None:
        return described([source for _, source in sources], leaves, place)
    pending: Pending = {}
    read = [source.read(leaves, pending) for _, source in sources]
    owned = [not isinstance(source, Batch) for _, source in sources]
    inputs = [alone(x) if own else x for x, own in zip(read, owned, strict=True)]
    check_values(inputs, [source for _, source in sources])
    return inputs


def _traced(
    step: _Capture,
    request: TraceRequest,
    inputs: list[Tensor],
    symbols: Symbols | None,
    tried: list[Run],
) -> tuple[Run, Captured]:
    """The run that is kept, and what it captured."""
    casts = nullcontext() if step.place is None else autocast_on(step.place)
    with TRACING, torch.random.fork_rng(devices=[]), casts:
        runs = RepeatedRuns(request, step.numbers, tried, in_numbers=not request.plans)
        try:
            run, module = runs.last(inputs, symbolic=symbols is not None)
            reads = reads_of(run)
            again = SetAgain.around(users_frames(), reads.origin.codes)
            if runs.expects(numbers_set_again(reads.guard.graph, again)):
                run, module = runs.last(inputs, symbolic=symbols is not None)
                reads = reads_of(run)
            return run, build_graph(module, run, reads, symbolic=symbols is not None)
        except Exception as error:
            raise_told(runs.located(error))


def _check_plans(captured: Captured, run: Run, models: Mapping[str, nn.Module]) -> None:
    """TR-517, TR-518 if the graph does not have the collectives that wrappers demand."""
    demands = {id(p): contract_of_wrapper(group.name) for p, group in run.wrapped()}
    demands |= dict(sharded_contracts(plans_of(models.values())))
    sources, step = captured.inputs.sources, captured.step
    places = {
        at: demands[id(source.parameter)]
        for at, source in enumerate(sources)
        if isinstance(source, Parameter) and id(source.parameter) in demands
    }
    written: dict[int, list[int]] = {at: [] for at in places}
    for at in places:
        parameter, name = _parameter_of(sources[at]), step.signature.inputs[at].name
        for place, output in enumerate(step.signature.outputs):
            of_it = output.writes is not None and _parameter_of(sources[output.writes]) is parameter
            if of_it or output.name == f"grad of {name}":
                written[at].append(place)
    check_contracts(step, places, written)


def _parameter_of(source: Source) -> nn.Parameter | None:
    return source.parameter if isinstance(source, Parameter | State) else None


def _refuse_shared(captured: Captured, leaves: list[object]) -> None:
    """TR-112 for writing to an array of NumPy's whose memory something else here shares."""
    written = [
        output.writes for output in captured.step.signature.outputs if output.writes is not None
    ]
    arrays = [
        source.array for source in captured.inputs.sources if isinstance(source, RunTimeArray)
    ]
    kept = [captured.inputs.sources[at] for at in written]
    if not any(isinstance(source, RunTimeArray) for source in kept):
        return
    if overlaps(leaves) or overlaps([array.value for array in arrays]):
        raise CaptureError(
            "the step writes to a NumPy array whose memory another input shares",
            code="TR-112",
            remedy="write to a copy: torch.tensor(array)",
        )
