"""The types of a step's inputs as capture finds them before it runs anything."""

from collections.abc import Iterable

import torch
from torch import Tensor

from treadle.capture.input_sources import SourcedInput, StepInputs
from treadle.capture.python_state.reads.object_graph import tensor_fact
from treadle.capture.refuse import check_models
from treadle.capture.sources import Scalar, Source, State
from treadle.capture.stored.names import value_text
from treadle.capture.stored.origin import StepObjects


def input_texts_of(
    step: StepObjects, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[str]:
    """One for each input of a step that is captured for these arguments. Raises what ``capture``
    raises before it runs anything. State that is not there yet has the type that it starts with:
    it is the same step."""
    check_models(step.models, step.optimizers)
    inputs = StepInputs.of(step.models, step.optimizers, args, kwargs, step.call)
    inputs.refuse_hooks()
    return input_texts(inputs.sources, inputs.leaves)


def input_texts(sources: Iterable[SourcedInput], leaves: list[object]) -> list[str]:
    """One for each. ``leaves``: of the arguments."""
    return [f"{entry!r} {_type_text(source, leaves)}" for entry, source in sources]


def _type_text(source: Source, leaves: list[object]) -> str:
    match source:
        case Scalar():
            return str(source.device)
        case State():
            value = source.now()
            return _fact_text(source.like() if value is None else value, source.parameter.device)
        case _:
            value = source.read(leaves, {})
            return _fact_text(value, value.device)


def _fact_text(value: Tensor, device: torch.device) -> str:
    dtype, shape, strides, place, wants_gradient = tensor_fact(value)
    is_plain = isinstance(place, torch.device)
    return value_text((dtype, shape, strides, device if is_plain else place, wants_gradient))
