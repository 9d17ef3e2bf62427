"""Where a compiled step starts to differ from eager: region by region, then node by node.

::

    for each region:  its graph, compiled alone, against PyTorch's kernels, on the same inputs
    in the first that is off:  from a result that is off to an operand that is off, until none is

Each region receives the results of PyTorch's kernels for everything before it, so errors do not
propagate. A region that is compiled alone may be fused in another way than in the whole step; an
error that depends on the fusion of two regions is not found here, and then no region is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from treadle.compiler.compiled import Compiled
from treadle.compiler.pipeline import compile_step
from treadle.compiler.regions import found_regions
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import known_value
from treadle.graph.regions.regions import Region
from treadle.options import Regions
from treadle.runtime.store.cache import Cache
from treadle.session.compare import Tolerance, is_close


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first region whose results are off, by its number, and the first such node in it."""

    region: int
    node: fx.Node


@dataclass(frozen=True, slots=True)
class Bisection:
    """What it takes to compile a region alone, and when two values are the same."""

    compiled: Compiled
    cache: Cache
    within: Tolerance

    def first(self, inputs: Sequence[Tensor]) -> Culprit | None:
        """The culprit for these inputs of the step; ``None`` if every region alone is right."""
        captured = self.compiled.captured
        if captured.generators:
            return None  # of the user's: a region alone would draw other numbers
        values: dict[fx.Node, Any] = dict(zip(captured.step.placeholders, inputs, strict=True))
        _add_constants(captured.step.graph, values)
        for region in found_regions(captured.step, captured.device, self.compiled.options):
            state = torch.get_rng_state()
            results = run_step(
                region.step(region.nodes), [values[input_] for input_ in region.inputs]
            )
            values |= dict(zip(region.nodes, results, strict=True))
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            off = self._off(region, _tensors(region.outputs), values)
            if off is not None:
                return Culprit(region.number, self._earliest(region, off, values))
            torch.set_rng_state(after)
        return None

    def _earliest(self, region: Region, node: fx.Node, values: dict[fx.Node, object]) -> fx.Node:
        """From a node that is off to one whose operands are not."""
        while True:
            own = [operand for operand in _operands(node) if operand in region.nodes]
            off = self._off(region, _tensors(own), values)
            if off is None:
                return node
            node = off

    def _off(
        self, region: Region, nodes: Sequence[fx.Node], values: dict[fx.Node, Any]
    ) -> fx.Node | None:
        """The first of these whose value is off if the region is compiled to give them."""
        inputs = [_laid_out(values[input_], known_value(input_)) for input_ in region.inputs]
        arguments = [input_ for input_ in inputs if input_ is not None]
        if not nodes or len(arguments) < len(inputs):
            return None
        options = replace(self.compiled.options, memory=None, regions=_unshown(self.compiled))
        built = compile_step(
            region.step(nodes), self.compiled.captured.device, options, cache=self.cache
        )
        results = built.executable.run(arguments)
        for node, value in zip(nodes, results, strict=True):
            if value is not None and not is_close(value, values[node], self.within):
                return node
        return None


def _unshown(compiled: Compiled) -> Regions:
    return replace(compiled.options.regions, show=None, accepts=None, smallest=0)


def _add_constants(graph: fx.Graph, values: dict[fx.Node, object]) -> None:
    for node in graph.find_nodes(op="get_attr"):
        constant: object = graph.owning_module
        for part in str(node.target).split("."):
            constant = getattr(constant, part)
        values[node] = constant


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a node; for an item, those of the call that it is an item of."""
    nodes: list[fx.Node] = []
    for operand in node.all_input_nodes:
        nodes += [operand] if isinstance(known_value(operand), Tensor) else operand.all_input_nodes
    return nodes


def _tensors(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in dict.fromkeys(nodes) if isinstance(known_value(node), Tensor)]


def _laid_out(value: object, expected: object) -> Tensor | None:
    """A value in the layout that the graph knows; ``None`` where calls decided other sizes, or
    where it is not a tensor."""
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        return None
    if tuple(expected.shape) != tuple(value.shape) or expected.dtype is not value.dtype:
        return None
    if value.stride() == expected.stride():
        return value
    if 0 in expected.stride():
        return None
    copied = torch.empty_strided(
        expected.shape, expected.stride(), dtype=value.dtype, device=value.device
    )
    return copied.copy_(value)
