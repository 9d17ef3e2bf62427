"""The types of a step's inputs as capture finds them before it runs anything.

::

    (-1, "Input(...) (torch.float32, (8, 2), ...)")     a parameter, an argument, ...
    (3, "Input(...) ...")                               the gradient that the fourth parameter has
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from treadle.algebra.extents import Size
from treadle.capture.input_sources import Dims, SourcedInput, StepInputs
from treadle.capture.python_state.reads.object_graph import tensor_fact
from treadle.capture.refuse import check_models
from treadle.capture.sources import Batch, Grad, Scalar, Source, State
from treadle.capture.stored.names import value_text
from treadle.capture.stored.origin import StepObjects

InputText = tuple[int, str]
"""The number of the parameter whose gradient it is, or -1; and what it is."""


def input_texts_of(
    step: StepObjects,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    dims: Dims | None = None,
) -> list[InputText]:
    """One for each input of a step that is captured for these arguments; ``dims``: of sizes that
    later calls change. Raises what ``capture`` raises before it runs anything. State that is not
    there yet has the type that it starts with: it is the same step."""
    check_models(step.models, step.optimizers)
    inputs = StepInputs.of(
        step.function,
        step.models,
        step.optimizers,
        args,
        kwargs,
        step.call,
        eight_bits=step.eight_bits,
    )
    inputs.refuse_hooks()
    return input_texts(step, inputs.sources, inputs.leaves, dims)


def input_texts(
    step: StepObjects, sources: Iterable[SourcedInput], leaves: list[object], dims: Dims | None
) -> list[InputText]:
    """One for each. ``leaves``: of the arguments."""
    numbers = {id(parameter): at for at, parameter in enumerate(step.parameters)}
    return [
        (
            numbers[id(source.parameter)] if isinstance(source, Grad) else -1,
            f"{entry!r} {_type_text(source, leaves, dims or {})}",
        )
        for entry, source in sources
    ]


def differing_inputs(
    before: Iterable[InputText], now: Iterable[InputText], ignored: Collection[int]
) -> tuple[list[str], list[str]] | None:
    """The texts, if they are others. ``ignored``: parameters whose gradients do not matter."""
    known, found = ([text for at, text in each if at not in ignored] for each in (before, now))
    return None if known == found else (known, found)


def _type_text(source: Source, leaves: list[object], dims: Dims) -> str:
    match source:
        case Batch() if source.at in dims:
            value = source.read(leaves, {})
            dtype, *_, wants_gradient = tensor_fact(value)
            shape, forms, _ = dims[source.at]
            sizes = tuple(map(_size_fact, shape))
            return value_text((dtype, sizes, forms, value.device, wants_gradient))
        case Scalar():
            return str(source.device)
        case State():
            return _fact_text(source.typed(), source.parameter.device)
        case _:
            value = source.read(leaves, {})
            return _fact_text(value, value.device)


def _size_fact(size: int) -> object:
    """Without the sample, which is any of those that the dim may have."""
    if not isinstance(size, Size):
        return size
    return tuple((dim.name, dim.low, dim.high) for dim in sorted(size.formula.dims))


def _fact_text(value: Tensor, device: torch.device) -> str:
    dtype, shape, strides, place, wants_gradient = tensor_fact(value)
    is_plain = isinstance(place, torch.device)
    return value_text((dtype, shape, strides, device if is_plain else place, wants_gradient))
