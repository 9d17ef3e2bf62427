"""All inputs of a step that are known before it runs, with the source of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.algebra.strides import SizedLayout
from treadle.capture.argument_containers import ServedCall
from treadle.capture.distributed.communication import refuse_accumulator_hooks
from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.distributed.row_shards import Divisions
from treadle.capture.eager import in_graph
from treadle.capture.optimizers.eight_bits import SCALE, StateBlocks
from treadle.capture.optimizers.param_groups import ParamGroups, param_groups_of
from treadle.capture.optimizers.registry import Start, update_rule
from treadle.capture.python_state.call_arguments import parameter_names
from treadle.capture.python_state.flatten import FlatArguments, flatten, flatten_with_paths
from treadle.capture.refuse import device_of
from treadle.capture.sources import Batch, BufferSlot, Grad, Parameter, Scalar, Source, State
from treadle.capture.tensors.sparse_gradients import is_sparse
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.pytree import TreeSpec
from treadle.graph.core.signature import Input, Role

Dims = Mapping[int, SizedLayout]
"""The layouts of leaves of the arguments, by their numbers, with a ``Size`` for each size that
calls change."""

SourcedInput = tuple[Input, Source]
Names = Mapping[int, str]
"""The names of parameters, by their ids."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """All inputs of a call, before anything of the step runs. ``leaves`` and ``spec``: of its
    arguments; ``sources``: in the order of the graph's inputs."""

    leaves: list[object]
    spec: TreeSpec
    device: torch.device
    param_groups: ParamGroups
    sources: list[SourcedInput]

    @staticmethod
    def of(
        function: Callable[..., object],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        call: ServedCall,
        *,
        group: RankGroup | None = None,
        place: torch.device | None = None,
        eight_bits: bool = False,
    ) -> "StepInputs":
        """``call``: serves these arguments from now on; ``function`` names them. The rest as for
        ``capture``."""
        tree = args, kwargs
        leaves, spec = flatten(tree)
        call.serve(FlatArguments.of(leaves, tree))
        device = place or device_of(models, leaves)
        param_groups = param_groups_of(in_graph(optimizers))
        paths = [path for path, _ in flatten_with_paths(tree, parameter_names(function))[0]]
        arguments = list(zip(paths, leaves, strict=True))
        kept = StateForms(Divisions(group, device), eight_bits)
        sources = input_sources(models, param_groups, arguments, device, kept)
        return StepInputs(leaves, spec, device, param_groups, sources)

    def refuse_hooks(self) -> None:
        """``CaptureError`` for hooks on the accumulation of gradients."""
        refuse_accumulator_hooks(
            {e.name: each.parameter for e, each in self.sources if isinstance(each, Parameter)}
        )


def input_sources(
    models: Mapping[str, nn.Module],
    param_groups: ParamGroups,
    arguments: Sequence[tuple[str, object]],
    device: torch.device,
    kept: "StateForms",
) -> list[SourcedInput]:
    """The sources in the order of the graph's inputs. ``arguments``: their leaves, with paths
    (``x``, ``batch['y']``). Gradients come last, so that other inputs have the same names without
    them."""
    names = _names(models)
    return [
        *_parameters(models, names),
        *_buffers(models),
        *_of_optimizers(param_groups, names, device, kept),
        *_batch(arguments, names),
        *_gradients(models, names),
    ]


def _names(models: Mapping[str, nn.Module]) -> Names:
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{prefix}.{name}".lstrip("."))
    return names


def _parameters(models: Mapping[str, nn.Module], names: Names) -> Iterator[SourcedInput]:
    for parameter in _each_once(models):
        step_input = Input(Role.PARAMETER, names[id(parameter)], *_parts(parameter))
        yield step_input, Parameter(parameter)


def _each_once(models: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for model in models.values() for p in model.parameters()}.values())


def _buffers(models: Mapping[str, nn.Module]) -> Iterator[SourcedInput]:
    seen: set[int] = set()
    for prefix, model in models.items():
        for path, owner in model.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = f"{prefix}.{path}.{key}".strip(".").replace("..", ".")
                    yield Input(Role.BUFFER, name, *_parts(buffer)), BufferSlot(owner, key)


@final
@dataclass(frozen=True, slots=True)
class StateForms:
    """How a step keeps optimizer state: ``divisions`` of it among ranks, and whether in 8 bits."""

    divisions: Divisions
    eight_bits: bool

    def inputs(
        self, optimizer: Optimizer, parameter: nn.Parameter, key: str, start: Start
    ) -> Iterator[tuple[str, tuple[bool, bool], State]]:
        """For each input that stands for a state: the suffix of its name, whether it is in parts,
        and its source."""
        shards = self.divisions.of(parameter, update_rule(optimizer))
        if shards is not None:
            parts = True, not shards.is_even
            yield "", parts, State(optimizer, parameter, key, start, shards)
            return
        blocks = StateBlocks.of(parameter, start) if self.eight_bits else None
        source = State(optimizer, parameter, key, start, blocks=blocks)
        yield "", _parts(parameter), source
        if blocks is not None:
            yield SCALE, (False, False), replace(source, is_scales=True)


def _of_optimizers(
    param_groups: ParamGroups, names: Names, device: torch.device, kept: StateForms
) -> Iterator[SourcedInput]:
    """The sources of state and scalars."""
    for at, param_group in enumerate(param_groups):
        rule, group = update_rule(param_group.optimizer), param_group.group
        for parameter in param_group.parameters:
            for key, start in rule.states(parameter, group).items():
                inputs = kept.inputs(param_group.optimizer, parameter, key, start)
                for behind, parts, source in inputs:
                    label = f"{param_group.label}.{key}{behind}[{names[id(parameter)]}]"
                    yield Input(Role.STATE, label, *parts), source
        for key in param_group.scalar_names():
            label = f"{param_group.label}.{key}.{at}"
            yield Input(Role.SCALAR, label), Scalar(param_group, key, device)


def _batch(arguments: Sequence[tuple[str, object]], names: Names) -> Iterator[SourcedInput]:
    for at, (path, leaf) in enumerate(arguments):
        if isinstance(leaf, Tensor) and id(leaf) not in names:  # a parameter is one input
            yield Input(Role.BATCH, f"argument {path}", *_parts(leaf)), Batch(at)


def _gradients(models: Mapping[str, nn.Module], names: Names) -> Iterator[SourcedInput]:
    for model in models.values():
        for parameter in model.parameters():
            grad = parameter.grad
            if grad is not None and not is_sparse(grad):
                label = f"grad of {names[id(parameter)]}"
                step_input = Input(Role.GRADIENT, label, *_parts(grad))
                yield step_input, Grad(parameter, layout_of(grad))


def _parts(value: Tensor) -> tuple[bool, bool]:
    """Whether ranks hold parts of it, and whether these parts may have different sizes."""
    layout = layout_of(value)
    return layout is not None, layout is not None and not layout.is_even
