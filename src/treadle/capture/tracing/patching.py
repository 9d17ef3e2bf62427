"""Puts traced tensors in the place of the user's, in everything that the step can reach."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.integrations.fully_sharded import fully_sharded
from treadle.capture.integrations.recurrent import RecurrentLayers
from treadle.capture.optimizers.hyper_parameters import standing_in
from treadle.capture.optimizers.registry import has_update_rule
from treadle.capture.symbolic.numbers import Uses
from treadle.capture.tracing.optimizer_states import OptimizerStates
from treadle.capture.tracing.optimizer_steps import OptimizerSteps
from treadle.capture.tracing.patches import put, put_attribute, traced_only
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.tensor_patcher import TensorPatcher
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.compat.distributed.sharded_tensors import sharded_entries
from treadle.compat.fake import FakeTensor
from treadle.compat.hooks import OURS, global_step_hooks, stands_for_step, stepped_note_kept
from treadle.compat.tracing import flat_weights
from treadle.compat.transforms import tensor_entries
from treadle.util.errors import CaptureError


@contextmanager
def patched(
    request: TraceRequest,
    table: Mapping[int, Tensor],
    steps: OptimizerSteps,
    states: OptimizerStates,
    recorder: TraceRecorder,
    layers: RecurrentLayers,
    uses: Uses | None,
) -> Iterator[None]:
    """Modules and ``param_groups`` hold the tensors of ``table`` (by the id of the user's);
    optimizers step by ``steps`` and have ``states``; recurrent layers are traced as ``layers`` say.
    Hyper-parameters are numbers that stand in, unless ``uses`` is ``None``."""
    optimizers = request.optimizers.values()
    with ExitStack() as undo:
        _patch_modules(undo, request.models.values(), table)
        _patch_groups(undo, optimizers, table, uses)
        for optimizer in optimizers:
            undo.enter_context(stepped_note_kept(optimizer))
            stepper = steps.stepper(optimizer)
            put(undo, vars(optimizer), "step", stands_for_step(optimizer, stepper))
        _patch_states(undo, optimizers, states)
        refuse = functools.partial(_refuse_strangers, frozenset(map(id, optimizers)))
        put(undo, global_step_hooks(), OURS, traced_only(refuse, _nothing))
        gathering = fully_sharded(request.models, recorder.gathers)
        recorder.regions.hears = undo.enter_context(gathering)
        recorder.mode = functools.partial(TensorPatcher, table, recorder, layers)
        mode = TensorPatcher(table, recorder, layers)
        recorder.inside = mode.inside
        _patch_entries(undo, mode)
        with mode:
            yield


def _patch_modules(
    undo: ExitStack, models: Iterable[nn.Module], table: Mapping[int, Tensor]
) -> None:
    for module in {id(m): m for model in models for m in model.modules()}.values():
        for held in (module._parameters, module._buffers):
            for key, tensor in list(held.items()):
                if tensor is not None and id(tensor) in table:
                    put(undo, held, key, table[id(tensor)])
        if isinstance(module, nn.RNNBase):
            for key, weights in flat_weights(module, table).items():
                put(undo, vars(module), key, weights)


def _patch_groups(
    undo: ExitStack,
    optimizers: Iterable[Optimizer],
    table: Mapping[int, Tensor],
    uses: Uses | None,
) -> None:
    owners = {
        id(group): (optimizer, at)
        for optimizer in reversed([*optimizers])  # optimizers may share groups: then the first one
        for at, group in enumerate(optimizer.param_groups)
    }
    for owner, at in owners.values():
        group = owner.param_groups[at]
        for key, value in list(group.items()):
            if key != "params" and uses is not None:
                put(undo, group, key, standing_in(value, owner, at, key, uses))
        put(undo, group, "params", [table[id(p)] for p in group["params"]])


def _patch_states(
    undo: ExitStack, optimizers: Iterable[Optimizer], states: OptimizerStates
) -> None:
    """Optimizers that share their state share its stand-in, first of one with an update rule."""
    patched_states: dict[int, object] = {}
    for other in sorted(optimizers, key=lambda optimizer: not has_update_rule(optimizer)):
        real = id(other.state)
        if real not in patched_states:
            patched_states[real] = states.traced(other)
        if patched_states[real] is not None:
            put(undo, vars(other), "state", patched_states[real])


def _patch_entries(undo: ExitStack, mode: TensorPatcher) -> None:
    """Replace functions and methods that take tensors and bypass modes."""
    for owner, name in (*tensor_entries(), *sharded_entries()):
        original: Callable[..., object] = vars(owner)[name]
        put_attribute(undo, owner, name, traced_only(mode.entering(original), original))
    put_attribute(undo, Tensor, "__bool__", mode.answering(Tensor.__bool__))
    put_attribute(undo, FakeTensor, "tolist", Tensor.tolist)  # its own asks for each number alone
    put_attribute(undo, Tensor, "__copy__", mode.copying())
    put_attribute(undo, Tensor, "as_subclass", mode.in_class(Tensor.as_subclass))


def _refuse_strangers(known: frozenset[int], optimizer: Optimizer, *_: object) -> None:
    """A hook before any step: TR-134 for that of an optimizer that the step was not given."""
    if id(optimizer) in known:
        return  # its own code calls that of its base
    kind = type(optimizer).__name__
    raise CaptureError(
        f"the step calls step() of an optimizer that treadle.compile did not receive ({kind})",
        code="TR-134",
        where=here(),
        remedy=(
            "pass it: treadle.compile(step, model=..., optimizer=...), several as a list or a dict"
        ),
    )


def _nothing(*_: object, **__: object) -> None:
    """A hook that does nothing."""
