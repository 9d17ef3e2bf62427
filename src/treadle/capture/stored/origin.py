"""The origins of what a run read, so that another process can read the same again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.argument_containers import ServedCall
from treadle.capture.python_state.reads.read_names import ReadNames
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.python_state.reads.roots import ReadRoots
from treadle.capture.tensors.tensor_effects import read_attributes


@final
@dataclass(frozen=True, slots=True)
class StepObjects:
    """A step's function, what it trains, and the call that is served. ``eight_bits``: whether it
    keeps optimizer state in 8 bits."""

    function: Callable[..., object]
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    call: ServedCall
    eight_bits: bool = False

    @property
    def parameters(self) -> list[Tensor]:
        """Each once."""
        owned = (p for model in self.models.values() for p in model.parameters())
        return list({id(parameter): parameter for parameter in owned}.values())


@final
@dataclass(slots=True)
class ReadsOrigin:
    """``objects``: the arguments that are neither tensors nor plain values, by number and label;
    ``tensors``: ways to those whose attributes may have been asked for, which may go through the
    objects that were read; ``codes``: what of users' and installed code ran. ``own``: whether
    something was read that only this run can compare."""

    roots: ReadRoots
    names: ReadNames
    objects: tuple[tuple[int, str], ...]
    tensors: Callable[[], Sequence[Callable[[], object]]]
    codes: tuple[CodeType, ...] = ()
    own: bool = False

    def add_to(self, walk: ReadsWalk, step: StepObjects) -> None:
        """All that another process reads as well."""
        self.roots.add_to(walk, step.function, step.models, step.optimizers)
        step.call.read_objects(walk, self.objects)
        read_attributes(self.tensors(), walk, self._is_named_in_code)

    def _is_named_in_code(self, name: str) -> bool:
        return self.names.mentioned is None or name in self.roots.theirs
