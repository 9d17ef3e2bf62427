"""The user's step: a function, and the models and optimizers that it trains."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.python_state.call_arguments import parameter_names
from treadle.compat.distributed.fully_sharded import GatheredModules
from treadle.session.agreement import agree_on_start
from treadle.session.bind import without_updates
from treadle.session.data_parallel import averaging, refuse_other_parts, start_together, whole_state


def arguments_of(batch: object) -> tuple[object, ...]:
    """The arguments of a step that a batch stands for: a tuple or list of them, or the only one."""
    return tuple(cast(Iterable[object], batch)) if type(batch) in (tuple, list) else (batch,)


@dataclass(slots=True)
class UserStep:
    """``function`` with its models and optimizers by name. ``has_update``: whether it has a
    parameter ``update`` of its own; otherwise calls may be given one. ``group``: the ranks that a
    plain model is trained on. ``eight_bits``: it keeps optimizer state in 8 bits. ``gathered``:
    what gives the modules of ``fully_shard`` back the parts that the step trains."""

    function: Callable[..., object]
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    has_update: bool
    group: RankGroup | None = None
    eight_bits: bool = False
    gathered: GatheredModules = field(default_factory=lambda: GatheredModules([]))
    _started: bool = False

    @staticmethod
    def of(
        function: Callable[..., object],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        group: RankGroup | None = None,
        *,
        eight_bits: bool = False,
    ) -> "UserStep":
        """A function and what it trains."""
        has_update = "update" in parameter_names(function)
        if group is not None:
            refuse_other_parts(models, group)
        gathered = GatheredModules(models.values())
        return UserStep(function, models, optimizers, has_update, group, eight_bits, gathered)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of its models."""
        models = self.models.values()
        return [t for model in models for t in (*model.parameters(), *model.buffers())]

    def start(self) -> None:
        """Before a call: modules hold their parts; before the first one all ranks begin alike."""
        self.gathered.drop()
        if self.group is not None and not self._started:
            agree_on_start(self.models, self.group)
            start_together(self.models, self.group)
        self._started = True

    @property
    def name(self) -> str:
        """What to call it: the function's name, or its class's."""
        kind = self.function if isinstance(self.function, FunctionType) else type(self.function)
        return kind.__name__

    def take_update(self, kwargs: dict[str, object]) -> bool:
        """Whether optimizers step in a call with these ``kwargs``, which lose what is ours."""
        return True if self.has_update else bool(kwargs.pop("update", True))

    def run_eagerly(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The function as it is, for one call."""
        named = dict(kwargs)
        update = self.take_update(named)
        if not update:
            with without_updates(self.models, self.optimizers):
                return self.function(*args, **named)
        return self.eagerly(*args, **named)

    def eagerly(self, *args: object, **kwargs: object) -> object:
        """The function as it is, on all ranks of the group if there is one."""
        steps = bool(self.optimizers)
        group = self.group
        together = averaging(self.models, group, steps=steps) if group else nullcontext()
        with whole_state(self.optimizers), together:
            return self.function(*args, **kwargs)
