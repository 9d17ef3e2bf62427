"""The user's live tensors in, results and state out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.captured import Captured
from treadle.capture.eager import run_eagerly
from treadle.capture.integrations.grad_scaler import SkippedUpdate
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.optimizers.registry import update_rule
from treadle.capture.python_state.containers.outputs import OutputCall
from treadle.capture.python_state.flatten import flatten, unflatten
from treadle.capture.sources import Held, RunTimeNumber, State
from treadle.capture.tensors.result_slots import fill, slots_in
from treadle.capture.tensors.tensor_effects import TensorLocation
from treadle.compat.hooks import after_backward
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import Role, StepGraph
from treadle.util.expected import NotExpected

_LEAVES = attrgetter("leaves")
_PLACE = attrgetter("place")


def read_inputs(captured: Captured, leaves: list[object]) -> list[Tensor]:
    """The tensors of this call, in the signature's order; the user's own, not copies. ``leaves``:
    those of its arguments. ``NotExpected`` where a number is none that the graph can be given."""
    inputs = captured.inputs
    inputs.call.arguments.leaves = leaves
    try:
        captured.dependencies.host_draws.draw()
        scalars = inputs.scalars.read(found=inputs.call.is_same)
        return inputs.values.read(leaves, inputs.pending, scalars, inputs.call.vouched)
    except NotExpected:
        forget_call(captured)
        raise


def first_misfit(step: StepGraph, inputs: Sequence[Tensor]) -> str:
    """In words the first gradient or state that is not of the type that the graph has for it;
    nothing if all are."""
    entries = zip(step.signature.inputs, step.placeholders, inputs, strict=True)
    for entry, node, tensor in entries:
        if entry.role not in (Role.STATE, Role.GRADIENT):
            continue
        was = value_of(node)
        for word, before, now in (
            ("dtype", was.dtype, tensor.dtype),
            ("shape", list(was.shape), list(tensor.shape)),
            ("strides", was.stride(), tensor.stride()),
            ("device", was.device.type, tensor.device.type),
        ):
            if before != now:
                return f"{entry.name}: {word} {before} became {now}"
    return ""


def named_state(captured: Captured, args: tuple[object, ...]) -> dict[str, Tensor]:
    """Copies of what a step reads and leaves, by the user's names: parameters, buffers, state,
    the batch, and what is in places outside it."""
    leaves, _ = flatten((args, {}))
    entries = zip(captured.step.signature.inputs, captured.inputs.sources, strict=True)
    state = {
        entry.name: source.read(leaves, captured.inputs.pending)
        for entry, source in entries
        if not isinstance(source, Held | RunTimeNumber)
    }
    for change in captured.result.left:
        tensors = [leaf for leaf in flatten(change.place.get())[0] if isinstance(leaf, Tensor)]
        state |= {f"{change.place.label} {at}": tensor for at, tensor in enumerate(tensors)}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def clear_fresh(captured: Captured) -> None:
    """Clear the gradients that the step clears before it adds to them, before the step runs.
    Gradients that it clears after a condition that may raise stay."""
    kept = set(map(id, captured.gradients.kept))
    for parameter in captured.gradients.fresh:
        if id(parameter) not in kept:
            parameter.grad = None


@contextmanager
def without_updates(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> Iterator[None]:
    """Optimizers do not step, and what the last backward leaves in ``.grad`` stays there, also of
    parameters that it does not reach; without a backward all is as the user's code leaves it."""
    parameters = [p for model in models.values() for p in model.parameters()]
    kept: dict[nn.Parameter, Tensor] = {}
    pending: list[bool] = []  # whether a backward runs whose end is waited for

    def wait_for_end(_: Tensor) -> None:
        if not pending:
            pending.append(True)
            after_backward(keep)

    def keep() -> None:
        pending.clear()
        kept.update((p, p.grad.clone()) for p in parameters if p.grad is not None)

    with ExitStack() as undo:
        for parameter in parameters:
            if parameter.requires_grad:
                undo.callback(parameter.register_post_accumulate_grad_hook(wait_for_end).remove)
        for optimizer in optimizers.values():
            undo.callback(put_back, vars(optimizer), "step", vars(optimizer).get("step"))
            vars(optimizer)["step"] = _only_closure
        yield
    for parameter in parameters if kept else ():
        parameter.grad = kept.get(parameter)


def put_back(held: dict[str, object], name: str, value: object) -> None:
    """What was held under ``name``: nothing, if ``value`` is ``None``."""
    if value is None:
        del held[name]
    else:
        held[name] = value


def _only_closure(closure: Callable[[], object] | None = None) -> object:
    """In the place of ``optimizer.step``."""
    return None if closure is None else closure()


def step_eagerly(captured: Captured, results: Sequence[Tensor | None]) -> None:
    """Optimizers that are not in the graph step now, with the gradients that it made."""
    slots = (captured.result.leaves, *(change.leaves for change in captured.result.left))
    first = sum(slots_in(slot) for slot in slots)
    first += len(captured.result.numbers.places) + slots_in(captured.gradients.slots)
    count = sum(slots_in(optimizer.slots) for optimizer in captured.optimizers.eager)
    grads = [result for result in results[first : first + count] if result is not None]
    run_eagerly(captured.optimizers.eager, grads)


def apply_outputs(captured: Captured, results: Sequence[Tensor | None]) -> object:
    """After a step that succeeded: the result, what it leaves outside, gradients, new state and
    counters. Raises what Python's arithmetic with numbers of the step raises, when all else is
    done."""
    slots = [captured.result.leaves, *map(_LEAVES, captured.result.left)]
    tensors = iter(results)
    parts = [list(islice(tensors, slots_in(slot))) for slot in slots]
    if captured.result.numbers.places:
        captured.result.numbers.read(tensors)
    errors: list[Exception] = []
    known: list[object] = []
    filled = [_filled(*row, known, errors) for row in zip(slots, parts, strict=True)]
    pairs = [*zip(captured.result.left, filled[1:], strict=True)]
    for left, values in pairs:
        if values is not None and isinstance(left.place, TensorLocation):
            left.put(values)  # while the tensor stands where the step found it
    for left, values in pairs:
        if values is not None and not isinstance(
            left.place, OutputCall | StateLocation | TensorLocation
        ):
            left.put(values)
    grads = fill(captured.gradients.slots, tensors)
    for parameter, grad in zip(captured.gradients.left, grads, strict=True):
        parameter.grad = grad
    for parameter in () if captured.inputs.call.is_bare else captured.gradients.cleared:
        parameter.grad = None
    for parameter, flag in captured.gradients.toggled:
        parameter.requires_grad_(flag)
    if captured.inputs.pending:
        _adopt_state(captured)
    for left, values in pairs:
        if values is not None and isinstance(left.place, StateLocation):
            left.put(values)  # behind what the update itself keeps
    _count_steps(captured)
    captured.inputs.call.forget()
    for left, values in pairs:
        if isinstance(left.place, OutputCall):
            if values is None:
                break
            left.put(values)
    if errors:
        raise errors[0]
    return unflatten(filled[0] or [], captured.result.tree)


def _filled(
    leaves: tuple[object, ...],
    tensors: Sequence[Tensor | None],
    known: list[object],
    errors: list[Exception],
) -> list[object] | None:
    """The leaves of this call, which ``known`` gets; ``None`` if Python's arithmetic with its
    numbers fails, as it would in the step (``1 / loss.item()``). The rest of the step is done
    then."""
    start = len(known)
    try:
        return fill(leaves, iter(tensors), known)
    except Exception as error:
        errors.append(error)
        remaining = iter(tensors)
        known[start:] = [
            fill((leaf,), remaining, [])[0] if slots_in((leaf,)) else None for leaf in leaves
        ]
        return None


def forget_call(captured: Captured) -> None:
    """A call was captured or begun, and nothing of it happened."""
    captured.inputs.pending.clear()
    captured.dependencies.host_draws.undo()
    captured.inputs.call.forget()


def _adopt_state(captured: Captured) -> None:
    """State that was created for this step becomes the optimizer's, with eager's keys."""
    skipped = {id(optimizer) for optimizer in _skipped(captured)}
    for source in captured.inputs.sources:
        if isinstance(source, State) and id(source.optimizer) not in skipped:
            value = captured.inputs.pending.get(source.place)
            if value is not None:
                state = source.optimizer.state[source.parameter]
                for name, start in update_rule(source.optimizer).counters.items():
                    counter = torch.tensor(start) if isinstance(start, float) else start
                    state.setdefault(name, counter)
                state[source.key] = value
    captured.inputs.pending.clear()


def _count_steps(captured: Captured) -> None:
    skipped = set(map(id, _skipped(captured) if captured.result.left else ()))
    found = captured.inputs.call.is_same
    for at in captured.optimizers.stepped:
        if id(captured.optimizers.param_groups[at].optimizer) not in skipped:
            captured.optimizers.param_groups[at].advance(found=found)


def _skipped(captured: Captured) -> list[Optimizer]:
    """Optimizers that a scaler kept from stepping in this call."""
    places = map(_PLACE, captured.result.left)
    skips = [place for place in places if isinstance(place, SkippedUpdate)]
    return [place.optimizer for place in skips if place.is_skipped]
