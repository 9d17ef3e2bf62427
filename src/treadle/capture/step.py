"""A training step to one functional graph, by running it once on fake tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from treadle.capture.build_graph import Captured, build_graph
from treadle.capture.device_override import autocast_on, check_values, described
from treadle.capture.distributed.communication import refuse_accumulator_hooks
from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.distributed.reduction_contracts import (
    check_contracts,
    contract_of_wrapper,
    sharded_contracts,
)
from treadle.capture.distributed.row_shards import Divisions
from treadle.capture.distributed.shared_buffers import send_written_buffers
from treadle.capture.distributed.unsynced_gradients import refuse_unsynced_gradients
from treadle.capture.dynamic import Dims, take_samples, with_symbols
from treadle.capture.eager import CallsClosure, in_graph
from treadle.capture.failures import raise_told
from treadle.capture.integrations.grad_scaler import ScalerBegins
from treadle.capture.integrations.recurrent import weights_in_place
from treadle.capture.optimizers.own_steps import OwnSteps
from treadle.capture.optimizers.registry import update_rule
from treadle.capture.python_state.containers.container_changes import (
    ChangedContainer,
    ContainersChanged,
)
from treadle.capture.python_state.flatten import FlatArguments, flatten
from treadle.capture.python_state.object_graph import Location
from treadle.capture.refuse import check_models, device_of
from treadle.capture.run import Run, ServedCall
from treadle.capture.sources import (
    Batch,
    BufferSlot,
    Grad,
    Parameter,
    ParamGroups,
    RunTimeArray,
    Scalar,
    Source,
    State,
    param_groups_of,
)
from treadle.capture.symbolic.arrays.arrays import overlaps
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.capture.symbolic.changing_numbers import Counted
from treadle.capture.symbolic.computations import Key
from treadle.capture.symbolic.deferred import AsksNumber
from treadle.capture.symbolic.number_calls import NumberCalls
from treadle.capture.tensors.sparse_gradients import is_sparse
from treadle.compat.distributed.fully_sharded import plans_of
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.fake import alone
from treadle.compat.operators.rng_operators import TRACED_AS
from treadle.compat.operators.schemas import ALL_TRUE
from treadle.compat.tracing import TRACING, trace
from treadle.compat.views import SPLITS
from treadle.graph.core.signature import Input, Role
from treadle.graph.custom_ops.grouped import GROUPED
from treadle.util.collector import without_collector
from treadle.util.data_stack import with_room
from treadle.util.errors import CaptureError

_INSTEAD = {**TRACED_AS, **SPLITS, **GROUPED, **ALL_TRUE}
"""What to trace in the place of operators that a graph cannot hold."""

_MOST_RUNS = 64
"""Of one trace; each learns something of the step that the next one needs."""


@with_room
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
    path: Answers = (),
) -> Captured:
    """Run ``function`` once on fake tensors; nothing of the user's changes.

    ``place``: capture as if everything were there, reading no values; the model may have none.
    ``dims``: the shapes of those leaves of the arguments that have sizes which later calls change.
    ``update=False``: gradients are accumulated, and optimizers do not step. ``call``: where the
    arguments of the calls to come are found; ``numbers``: places of Python's whose numbers change
    from call to call, and are to be inputs where the graph allows it. ``group``: over whose ranks
    the gradients of a plain model are averaged. ``path``: the answers to the first questions of
    the step about values of tensors of which both ways go on; others are guessed. What fails after
    a guess is not raised: it is ``failed`` of a step that is captured up to there.

    Optimizers without a form step by their own code, which is captured; where it cannot be, after
    the graph.

    Raises ``CaptureError`` with a code, the user's line and a remedy for what cannot become a
    graph; an exception of the user's own passes through unchanged.
    """
    check_models(models, optimizers)
    tried: list[Run] = []
    along = functools.partial(
        _captured,
        tried,
        function,
        models,
        optimizers,
        args,
        kwargs,
        place,
        dims,
        update,
        call,
        numbers,
    )
    own_steps, first = OwnSteps.of(optimizers), None
    while True:
        try:
            return along(group, path, own_steps)
        except CallsClosure:
            raise
        except Exception as error:
            first, failed = first or error, own_steps.failed
            if not own_steps.taken:  # what is outside of the graph may be why
                error = error if own_steps.has_failed else first
                if not isinstance(error, CaptureError) and place is None and tried:  # the user's
                    tried[-1].outputs.tell_known()
                raise error from None
            others = own_steps.taken if failed is None else frozenset({failed})
            own_steps = own_steps.without(others, _words_of(error))


def _words_of(error: Exception) -> str:
    if isinstance(error, CaptureError):
        return f"{error.message} ({error.code})"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _captured(
    tried: list[Run],
    function: Callable[..., object],
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    place: torch.device | None,
    dims: Dims | None,
    update: bool,
    call: ServedCall | None,
    numbers: Sequence[Location],
    group: RankGroup | None,
    path: Answers,
    own_steps: OwnSteps,
) -> Captured:
    """With those of the optimizers whose own steps are taken in the graph."""
    leaves, spec = flatten((args, kwargs))
    device = place or device_of(models, leaves)
    param_groups = param_groups_of(in_graph(optimizers))
    divisions = Divisions(group, device)
    sources = _sources(models, optimizers, param_groups, args, kwargs, device, divisions)
    inputs = _values(sources, leaves, place)
    symbolic = None
    if dims:
        inputs, symbolic = with_symbols([source for _, source in sources], inputs, dims)
    refuse_accumulator_hooks(
        {entry.name: each.parameter for entry, each in sources if isinstance(each, Parameter)}
    )
    plans = place is not None
    call = call or ServedCall()
    call.serve(FlatArguments.of(leaves, (args, kwargs)))
    make = functools.partial(
        Run,
        function,
        models,
        optimizers,
        param_groups,
        sources,
        leaves,
        spec,
        update=update,
        plans=plans,
        call=call,
        group=group,
        path=path if group is None and symbolic is None else None,
        own_steps=own_steps,
    )
    casts = nullcontext() if place is None else autocast_on(place)
    symbols = symbolic is not None
    calls = NumberCalls(function)
    inside = without_collector()
    with TRACING, torch.random.fork_rng(devices=[]), casts, inside:
        try:
            run, module = _traced(
                make, inputs, numbers, calls, tried, stand_in=not plans, symbolic=symbols
            )
            captured = _finished(module, run, call, device, symbols)
        except Exception as error:
            raise_told(error)
    if captured.failed is not None:
        return captured
    _refuse_shared(captured, leaves)
    _check_plans(captured, run, models)
    if group is not None:
        refuse_unsynced_gradients(captured.step, group)
        send_written_buffers(captured.step, group)
    if symbolic is not None:
        take_samples(captured, symbolic)
    return captured


def _values(
    sources: Sequence[tuple[Input, Source]], leaves: list[object], place: torch.device | None
) -> list[Tensor]:
    """What the run is given, in the order of the sources; at a ``place`` only descriptions."""
    if place is not None:
        return described([source for _, source in sources], leaves, place)
    pending: dict[tuple[int, str], Tensor] = {}
    read = [source.read(leaves, pending) for _, source in sources]
    owned = [not isinstance(source, Batch) for _, source in sources]
    inputs = [alone(x) if own else x for x, own in zip(read, owned, strict=True)]
    check_values(inputs)
    return inputs


def _traced(
    make: Callable[..., Run],
    inputs: list[Tensor],
    numbers: Sequence[Location],
    calls: NumberCalls,
    tried: list[Run],
    *,
    stand_in: bool,
    symbolic: bool,
) -> tuple[Run, fx.GraphModule]:
    """A run and its trace. One that changes containers runs again with others in their places, one
    that counts with numbers that stand in where it counts. One in which numbers or containers are
    stood in for may fail where they themselves do not: then it runs again, as if none could change.
    Code that asks for a real number where one stands in, or one is known after the launch, runs
    again with ``calls`` that can take those; one that writes to an array whose numbers it looked at
    before, with the array itself. ``tried`` gets each run."""
    containers: Sequence[ChangedContainer] | None = ()
    counters: list[Location] = []
    refusal: Counted | None = None
    whole: set[Key] = set()
    for _ in range(_MOST_RUNS):
        run = make(numbers=(*numbers, *counters), stand_in=stand_in, containers=containers)
        run.trace.uses.whole |= whole
        tried.append(run)
        try:
            with weights_in_place(), calls.rewritten():
                module = trace(run.traced, inputs, _INSTEAD, symbolic=symbolic)
            late = run.trace.uses.written_late()
            whole |= late
            if not late and not calls.cover(run.asked(), run.met(), run.trace.uses.places):
                if not run.asks_types():
                    return run, module
                if refusal is not None and not stand_in:
                    raise refusal
                numbers, stand_in, containers = (), False, None
        except ScalerBegins as first:
            first.begin()
        except ContainersChanged as changed:
            containers = changed.found
        except Counted as error:
            new = error.places_beside(counters)
            if not calls.cover(run.asked(), run.met(), run.trace.uses.places) and not new:
                raise
            refusal = refusal or error
            counters += new
        except AsksNumber as error:
            if not calls.cover([error.codes], run.met(), run.trace.uses.places):
                if not containers:
                    raise
                containers = None
        except Exception as error:
            if calls.cover(run.asked(error), run.met(), run.trace.uses.places):
                pass
            elif containers:
                containers = None
            elif not stand_in and refusal is not None:
                raise refusal from error
            elif run.trace.uses.is_used:
                numbers, stand_in = (), False
            else:
                raise
        for each in run.param_groups:
            each.taken.clear()
    raise CaptureError(
        f"each of {_MOST_RUNS} runs of the step met something that the runs before had not",
        code="TR-199",
        remedy="this is a bug in treadle: report it, with the step",
    )


def _finished(
    module: fx.GraphModule, run: Run, call: ServedCall, device: torch.device, symbolic: bool
) -> Captured:
    reads = run.read()
    run.placed(reads)
    return build_graph(module, run, reads, call, device, symbolic=symbolic)


def _check_plans(captured: Captured, run: Run, models: Mapping[str, nn.Module]) -> None:
    """TR-517, TR-518 if the graph does not have the collectives that wrappers demand."""
    demands = {id(p): contract_of_wrapper(group.name) for p, group in run.wrapped()}
    demands |= dict(sharded_contracts(plans_of(models.values())))
    sources, step = captured.sources, captured.step
    places = {
        at: demands[id(each.parameter)]
        for at, each in enumerate(sources)
        if isinstance(each, Parameter) and id(each.parameter) in demands
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
    written = [each.writes for each in captured.step.signature.outputs if each.writes is not None]
    arrays = [each.array for each in captured.sources if isinstance(each, RunTimeArray)]
    kept = [captured.sources[at] for at in written]
    if not any(isinstance(each, RunTimeArray) for each in kept):
        return
    if overlaps(leaves) or overlaps([each.value for each in arrays]):
        raise CaptureError(
            "the step writes to an array of NumPy's, whose memory another input shares",
            code="TR-112",
            remedy="write to a copy: torch.tensor(array)",
        )


def _sources(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    param_groups: ParamGroups,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    device: torch.device,
    divisions: Divisions,
) -> list[tuple[Input, Source]]:
    found: list[tuple[Input, Source]] = []
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            if id(parameter) not in names:
                names[id(parameter)] = full = f"{prefix}.{name}".lstrip(".")
                given = Input(Role.PARAMETER, full, *_parts(parameter))
                found.append((given, Parameter(parameter)))
    seen: set[int] = set()
    for prefix, model in models.items():
        for path, owner in model.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    full = f"{prefix}.{path}.{key}".strip(".").replace("..", ".")
                    given = Input(Role.BUFFER, full, *_parts(buffer))
                    found.append((given, BufferSlot(owner, key)))
    for at, param_group in enumerate(param_groups):
        form, group = update_rule(param_group.optimizer), param_group.group
        for parameter in param_group.parameters:
            for key, start in form.states(parameter, group).items():
                label = f"{param_group.label}.{key}[{names[id(parameter)]}]"
                shards = divisions.of(parameter, form)
                source = State(param_group.optimizer, parameter, key, start, shards)
                parts = _parts(parameter) if shards is None else (True, not shards.is_even)
                found.append((Input(Role.STATE, label, *parts), source))
        for key in param_group.scalar_names():
            label = f"{param_group.label}.{key}.{at}"
            found.append((Input(Role.SCALAR, label), Scalar(param_group, key, device)))
    leaves, _ = flatten((args, kwargs))
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and id(leaf) not in names:  # a parameter is one input
            found.append((Input(Role.BATCH, f"batch {at}", *_parts(leaf)), Batch(at)))
    for model in models.values():  # last: the names of other inputs are those without them
        for parameter in model.parameters():
            if parameter.grad is not None and not is_sparse(parameter.grad):
                label = f"grad of {names[id(parameter)]}"
                source = Grad(parameter, layout_of(parameter.grad))
                given = Input(Role.GRADIENT, label, *_parts(parameter.grad))
                found.append((given, source))
    return found


def _parts(value: Tensor) -> tuple[bool, bool]:
    """Whether ranks hold parts of it, and whether those may be of several sizes."""
    layout = layout_of(value)
    return layout is not None, layout is not None and not layout.is_even


__all__ = ["Captured", "capture"]
