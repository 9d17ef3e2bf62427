"""The subject of a capture: a step, and one call of it."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import CodeType
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from treadle.capture.argument_containers import ServedCall
from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.input_sources import Dims
from treadle.capture.optimizers.own_steps import OwnSteps
from treadle.capture.optimizers.param_groups import ParamGroups
from treadle.capture.python_state.containers.container_changes import ChangedContainer
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.sources import Parameter, Source
from treadle.capture.stored.origin import StepObjects
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.capture.symbolic.held_functions import HeldFunction
from treadle.compat.pytree import TreeSpec
from treadle.graph.analysis.dynamic import Symbols
from treadle.graph.core.signature import Input


@final
@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """The common data of all runs of one trace.

    ``leaves`` and ``spec``: of the arguments. ``call``: where those of later calls are found.
    ``own_steps``: of optimizers without an update rule those whose own code is captured.
    ``update=False``: gradients only. Optimizers do not step, and what the last backward left in
    ``.grad`` stays there, whatever clips or clears it afterwards. ``plans``: there are no values.
    ``eight_bits``: keep optimizer state in 8 bits.
    ``path``: the answers to its first decisions on values of tensors. ``dims``: the shapes of those
    leaves that have sizes which later calls change; ``symbols``: what stands for these.
    """

    function: Callable[..., object]
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    param_groups: ParamGroups
    sources: Sequence[tuple[Input, Source]]
    leaves: list[object]
    spec: TreeSpec
    call: ServedCall
    device: torch.device
    own_steps: OwnSteps
    update: bool = True
    plans: bool = False
    group: RankGroup | None = None
    eight_bits: bool = False
    path: Answers | None = ()
    dims: Dims | None = None
    symbols: Symbols | None = None

    @property
    def objects(self) -> StepObjects:
        """What a later call has as well."""
        return StepObjects(self.function, self.models, self.optimizers, self.call, self.eight_bits)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are inputs, in the order of the sources."""
        return [source.parameter for _, source in self.sources if isinstance(source, Parameter)]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Substitutes:
    """What others stand in for in one run, as it may be another one at a later call.

    ``numbers``: places whose numbers change from call to call. ``in_numbers=False``: every number
    is taken as it is. ``containers``: those that a run before changed; ``None``: nothing stands in
    for any. ``originals``: of code that is rewritten for the run. ``given``: code that is
    given numbers where it needs them: the sizes of this call, and whole numbers of tensors along
    its path. ``draws``: places beside their modules in
    which functions stand that draw random numbers.
    """

    numbers: Sequence[Location] = ()
    in_numbers: bool = True
    containers: Sequence[ChangedContainer] | None = ()
    originals: Mapping[CodeType, CodeType] = field(default_factory=dict[CodeType, CodeType])
    given: AbstractSet[CodeType] = frozenset()
    draws: Sequence[HeldFunction] = ()
