"""The region options of a step: PyTorch's kernels for some operations, another compiler for
others."""

import fnmatch
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from treadle.algebra.strides import is_dense
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.data_dependent import DataDependentOp, fresh
from treadle.graph.core.node_info import (
    belong,
    copy_notes,
    info,
    known_value,
    set_value,
    value_of,
    with_info,
)
from treadle.graph.core.operators import effects_of, operation_name
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import tensors_in
from treadle.graph.regions.region_compilers import (
    CompiledRegion,
    compiled_region,
    define,
    region_compiler,
)
from treadle.graph.regions.regions import EAGER, NATIVE, Region, regions_of
from treadle.graph.rewrite.order import restore_order
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.graph.text.canonical import canonical
from treadle.options import RegionRule
from treadle.util.reasons import ReasonCode


def rule_of(node: fx.Node, rules: tuple[RegionRule, ...]) -> RegionRule | None:
    """The first rule that matches the node."""
    if node.op != "call_function" or isinstance(node.target, DataDependentOp):
        return None
    names = {operation_name(node.target), str(node.target)}
    for rule in rules:
        module = fnmatch.fnmatchcase(info(node).module, rule.module)
        if module and any(fnmatch.fnmatchcase(name, rule.operations) for name in names):
            return rule
    return None


@dataclass(frozen=True)
class RunEagerly(GraphPass):
    """Mark the operations that a rule leaves to PyTorch's kernels.

    before:  y = gelu(x)                      RegionRule("eager", operations="gelu*")
    after:   y = gelu(x)  # eager 'TR-315: ...'
    """

    contract = Contract()

    rules: tuple[RegionRule, ...]

    def run(self, step: StepGraph) -> int:
        changes = 0
        for node in step.graph.nodes:
            rule = rule_of(node, self.rules)
            if rule is None or rule.compiler != EAGER or info(node).eager:
                continue
            changes += 1
            why = (
                f"a rule of the options selects PyTorch's kernel for {operation_name(node.target)}"
            )
            with_info(node, eager=ReasonCode.CHOSEN.because(why))
        return changes


@dataclass(frozen=True)
class ContractRegions(GraphPass):
    """Give regions to the compilers that rules name: each becomes one call.

    before:  a = exp(x); b = neg(a); c = sum(b)       RegionRule("inductor", operations="*")
    after:   r = treadle_regions.inductor_1f0a([x]); c = r[0]

    Left out, and done as before, are operations that draw, check or write, that give or take
    something else than tensors, or whose results have gaps between their elements. A region of
    fewer than ``smallest`` operations that compute stays what it is.
    """

    contract = Contract()

    rules: tuple[RegionRule, ...]
    smallest: int = 1

    def run(self, step: StepGraph) -> int:
        rules = {node: rule for node in step.graph.nodes if (rule := self._rule(node))}
        names = {node: rule.compiler for node, rule in rules.items()}
        regions = [
            region
            for region in regions_of(step.graph, {}, names)
            if region.compiler not in (NATIVE, EAGER) and region.operations >= max(self.smallest, 1)
        ]
        for region in regions:
            contract(
                step, region, ahead=any(rules[node].ahead for node in region.nodes if node in rules)
            )
        if regions:
            restore_order(step.graph)
        return len(regions)

    def _rule(self, node: fx.Node) -> RegionRule | None:
        rule = rule_of(node, self.rules)
        if rule is None or rule.compiler in (NATIVE, EAGER) or not _fits(node):
            return None
        return rule


def _fits(node: fx.Node) -> bool:
    """Whether another compiler may take the node: it computes tensors from tensors, and no more."""
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        return False
    if effects_of(node):
        return False
    operands = [
        value for operand in node.all_input_nodes for value in _values(known_value(operand))
    ]
    results = list(_values(known_value(node)))
    return (
        bool(operands)
        and all(isinstance(value, Tensor) for value in (*operands, *results))
        and all(is_dense(tensor.shape, tensor.stride()) for tensor in tensors_in(value_of(node)))
    )


def _values(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple | list) else [value]


def contract(step: StepGraph, region: Region, *, ahead: bool) -> None:
    """One call of an operator that computes ``region`` in its place. What is known of a value is
    known of the item that stands for it."""
    outputs = region.outputs
    if not outputs:
        return
    alone = region.step()
    name = f"{region.compiler}_{canonical(alone).digest[:24]}"
    values = [fresh(value_of(node)) for node in outputs]
    module = fx.GraphModule(nn.Module(), alone.graph)
    compiled = CompiledRegion(module, region_compiler(region.compiler))
    op = define(name, compiled, partial(_like, values))
    if ahead:
        compiled_region(name).compile([value_of(node) for node in region.inputs])
    with step.graph.inserting_after(region.nodes[-1]):
        call = step.graph.call_function(op, (list(region.inputs),))
    set_value(call, values)
    belong(call, region.nodes[0])
    why = f"a region of {region.operations} operations is compiled by {region.compiler}"
    with_info(call, eager=ReasonCode.CHOSEN.because(f"{why}, by a rule of the options"))
    own = frozenset(region.nodes)
    for at, node in enumerate(outputs):
        with step.graph.inserting_after(call):
            item = step.graph.call_function(operator.getitem, (call, at))
        copy_notes(item, node)
        set_value(item, values[at])
        node.replace_all_uses_with(item, delete_user_cb=partial(_is_outside, own))
    for node in reversed(region.nodes):
        step.graph.erase_node(node)


def _is_outside(own: frozenset[fx.Node], user: fx.Node) -> bool:
    return user not in own


def _like(values: list[Any]) -> list[Tensor]:
    """New tensors of these types, in the mode that is on."""
    return [
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        for tensor in values
    ]


__all__ = ["ContractRegions", "RunEagerly", "contract", "rule_of"]
