"""One node: a rule, the rules of its decomposition, or a library call, in this order."""

import contextlib
import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from treadle.algebra.strides import strides_match
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.graph.analysis.data_dependent import DataDependentOp
from treadle.graph.core.node_info import info, known_value, value_of
from treadle.graph.core.operators import operation_name
from treadle.graph.core.types import tensors_in
from treadle.graph.custom_ops.float8 import TO_FLOAT8
from treadle.graph.regions.loop_bodies import WITH_BODIES
from treadle.loop.expr import DTYPES, FLOAT8, Array, Const
from treadle.loop.program import Call, Origin, TensorRef
from treadle.lower import calls, host_copies
from treadle.lower.context import Builder, LoweringContext
from treadle.lower.decompose import decomposition_of
from treadle.lower.library import is_chosen
from treadle.lower.operators import collectives, pointwise, views
from treadle.lower.operators.collectives import is_communication
from treadle.lower.registry import (
    Args,
    Kwargs,
    Lowered,
    LoweredArgument,
    Unsupported,
    Value,
    rule_for,
)
from treadle.util.errors import LoweringError
from treadle.util.nested import leaves, map_leaves
from treadle.util.reasons import ReasonCode

aten = torch.ops.aten

Environment = dict[fx.Node, Lowered]
_FLOAT8_OPERATIONS = frozenset({
    aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.contiguous.default,
    aten.copy.default, TO_FLOAT8.op,
})  # fmt: skip
"""What a formula may do with numbers that nothing computes with."""


def lower_node(
    builder: Builder, node: fx.Node, env: Environment, inside: LoweringContext | None = None
) -> Lowered:
    """The value of ``node``; ``inside``: the operation that it is a part of."""
    target = node.target
    if target is operator.getitem:
        return _item(node, env)
    if isinstance(target, DataDependentOp):
        context = LoweringContext(builder, node, origin_of(node), value_of(node), node.name)
        args, kwargs = _resolved(context, node, env)
        return calls.data_dependent_op(context, target, args, kwargs)
    if not isinstance(target, OpOverload):
        raise error_at(node, f"{target} is not an ATen operation")
    val = known_value(node)
    if val is None and schema_of(target).returns:
        what = f"the result of {target} has no fake value: it is not a tensor"
        raise error_at(node, what, "return tensors from it, or call it outside the step")
    if inside is None:
        context = LoweringContext(builder, node, origin_of(node), val, node.name)
    else:
        context = LoweringContext(builder, node, inside.origin, val, f"{inside.name}_{node.name}")
    if host_copies.is_host_copy(target):
        args = tuple(map_leaves(partial(_there, env), value) for value in node.args)
        return host_copies.lowered(context, target, args)
    if _is_on_the_host(context, env):
        return _on_the_host(context, target, env)
    args, kwargs = _resolved(context, node, env)
    return _lowered(context, target, args, kwargs, env)


def _item(node: fx.Node, env: Environment) -> Lowered:
    """One result of an operation with several."""
    source, position = node.args
    assert isinstance(source, fx.Node), node
    assert isinstance(position, int), node
    results = env[source]
    assert isinstance(results, tuple), node
    return results[position]


def lower_constant(builder: Builder, module: torch.nn.Module | None, node: fx.Node) -> Value:
    """A tensor held by the graph: one number is a literal, more are a constant buffer."""
    data = operator.attrgetter(str(node.target))(module)
    if not isinstance(data, torch.Tensor):
        raise error_at(node, "a constant of the graph is not a tensor")
    data = data.detach()
    if data.ndim == 0 and builder.has_formulas(data.dtype):
        return Array((), Const(data.item(), data.dtype))
    return builder.constant(node.name, data)


def _lowered(
    context: LoweringContext, op: OpOverload, args: Args, kwargs: Kwargs, env: Environment
) -> Lowered:
    if context.val is None:
        return calls.check(context, op, args, kwargs)
    if not _is_tensors(context.val):
        raise context.fault("the result is not a tensor", "compute it outside the step")
    crosses = op is torch.ops.aten._to_copy.default and _leaves(context, args[0])
    if op is torch.ops.aten._to_copy.default and not crosses:
        moved = _moved(context, args[0])
        if moved is not None:
            return moved
    if is_communication(op):
        return collectives.lowered(context, op, args)
    barred = _barred(context, args, kwargs)
    has_rule = not barred or op in views.VIEWS | views.BY_STRIDES
    rule = rule_for(op) if has_rule and not crosses else None
    reason = barred or _without_rule(op)
    if rule is not None:
        try:
            value = rule(context, *args, **kwargs)
            if not (barred and _has_formulas(value)):
                return _results(context, value)
        except Unsupported as refusal:
            reason = barred or ReasonCode.REFUSED.because(f"{op}: {refusal}")
    chosen = crosses or is_chosen(op)
    if op in WITH_BODIES:
        return calls.call(context, op, args, kwargs, _barred_loop(context))
    if not chosen and not barred:
        parts = _decomposed(context, env)
        if parts is not None:
            return parts
    return calls.call(context, op, args, kwargs, "" if chosen else reason)


def _barred(context: LoweringContext, args: Args, kwargs: Kwargs) -> str:
    """Why no formula may be made of a node, even if it has a rule; empty if one may. Views are
    views all the same."""
    if context.builder.library:
        return ReasonCode.NO_CODEGEN.because("no kernels are generated here")
    if info(context.node).eager:
        return info(context.node).eager
    strange = _without_formulas(context.node.target, context.val, args, kwargs)
    return ReasonCode.DTYPE.because(f"{strange} numbers") if strange else ""


def _barred_loop(context: LoweringContext) -> str:
    """Why the functions of a loop run as PyTorch's kernels; empty if they become programs. What has
    no formulas in them is a call there."""
    if context.builder.library:
        return ReasonCode.NO_CODEGEN.because("no kernels are generated here")
    if info(context.node).eager:
        return info(context.node).eager
    values = [context.val, *(known_value(operand) for operand in context.node.all_input_nodes)]
    places = {context.builder.device_of(tensor) for value in values for tensor in tensors_in(value)}
    if places - {context.builder.device}:
        return ReasonCode.REFUSED.because("a loop with tensors on the host and on the device")
    return ""


def _without_rule(op: OpOverload) -> str:
    """Why an operation of this name has no formula."""
    if facts_of(op).native:
        return ReasonCode.NO_RULE.because(f"{op} has no lowering rule")
    return ReasonCode.CUSTOM_OPERATION.because(
        f"{op} is a custom operation, and treadle cannot see inside it"
    )


def _without_formulas(op: object, *values: object) -> str:
    """The first dtype among tensors and their operands that formulas of ``op`` do not have; or
    none."""
    known = DTYPES if op in _FLOAT8_OPERATIONS else DTYPES - FLOAT8.keys()
    for value in leaves(values):
        match value:
            case torch.Tensor() | TensorRef() | Array() if value.dtype not in known:
                return _name_of(value.dtype)
            case complex():
                return "complex"
            case _:
                pass
    return ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _decomposed(context: LoweringContext, env: Environment) -> Lowered:
    """The value from the parts of the operation; ``None`` if a part would be a fallback."""
    module = decomposition_of(context.node)
    if module is None:
        return None
    before = context.builder.mark()
    inner: Environment = {}
    operands = iter(context.node.all_input_nodes)
    result: LoweredArgument = None
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                inner[node] = _operand(context, next(operands), env)
            case "get_attr":
                inner[node] = lower_constant(context.builder, module, node)
            case "call_function":
                inner[node] = lower_node(context.builder, node, inner, context)
            case _:
                result = map_leaves(partial(_leaf, context, inner), node.args[0])
    if any(isinstance(step, Call) and step.reason for step in context.builder.since(before)):
        context.builder.reset(before)
        return None
    if isinstance(context.val, torch.Tensor):
        return _laid_out(context, result)
    assert isinstance(result, tuple), context.node
    return tuple(
        _laid_out(context.element_context(i), value) if isinstance(val, torch.Tensor) else val
        for i, (value, val) in enumerate(zip(result, context.val, strict=True))
    )


def _laid_out(context: LoweringContext, value: LoweredArgument) -> Value | None:
    """The result of a decomposition with eager's strides, where it is stored at all."""
    if not isinstance(value, TensorRef):
        assert value is None or isinstance(value, Array), context.node
        return value
    if strides_match(value.shape, value.strides, context.strides):
        return value
    return context.result(pointwise.clone(context, value))


def _has_formulas(value: object) -> bool:
    return any(isinstance(part, Array) for part in (value if isinstance(value, tuple) else [value]))


def _leaves(context: LoweringContext, source: LoweredArgument) -> bool:
    """Whether a conversion ends on another device than the program's."""
    return (
        isinstance(source, TensorRef)
        and context.builder.device_of(context.val) != context.builder.device
    )


def _is_tensors(val: object) -> bool:
    if isinstance(val, tuple | list):
        return any(isinstance(value, torch.Tensor) for value in val)
    return isinstance(val, torch.Tensor)


def _results(context: LoweringContext, value: Lowered) -> Lowered:
    """What the rule returned, each formula that reads a buffer stored in one of its own."""
    if isinstance(value, tuple):
        if all(isinstance(part, TensorRef) for part in value):
            return value
        return tuple(
            context.element_context(i).result(part) if isinstance(part, TensorRef | Array) else None
            for i, part in enumerate(value)
        )
    assert isinstance(value, TensorRef | Array), context.node
    return context.result(value)


def _resolved(context: LoweringContext, node: fx.Node, env: Environment) -> tuple[Args, Kwargs]:
    """The arguments of ``node`` with its operands' values, on the device of the program."""
    leaf = partial(_leaf, context, env)
    args = tuple([map_leaves(leaf, value) for value in node.args])
    return args, {name: map_leaves(leaf, value) for name, value in node.kwargs.items()}


def _leaf(context: LoweringContext, env: Environment, leaf: Any) -> Any:
    return _operand(context, leaf, env) if isinstance(leaf, fx.Node) else leaf


def _operand(context: LoweringContext, node: fx.Node, env: Environment) -> Lowered:
    """What ``node`` became, on the device of the program."""
    found = env[node]
    if not isinstance(found, TensorRef):
        return found
    return context.builder.local(found, context.origin, may_wait=not _goes_ahead(node))


def _is_on_the_host(context: LoweringContext, env: Environment) -> bool:
    """Whether a step on a GPU computes this on the host, from what is there: PyTorch's kernels do
    it there, as they do in eager."""
    if not isinstance(context.val, torch.Tensor) or not context.node.all_input_nodes:
        return False
    if context.builder.device_of(context.val) == context.builder.device:
        return False
    operands = [env.get(operand) for operand in context.node.all_input_nodes]
    places = [
        context.builder.buffers[operand.buffer].device if isinstance(operand, TensorRef) else ""
        for operand in operands
    ]
    return all(device and device != context.builder.device for device in places)


def _on_the_host(context: LoweringContext, op: OpOverload, env: Environment) -> Lowered:
    """A view of what is on the host, or PyTorch's kernel there."""
    leaf = partial(_there, env)
    args = tuple([map_leaves(leaf, value) for value in context.node.args])
    kwargs = {name: map_leaves(leaf, value) for name, value in context.node.kwargs.items()}
    rule = rule_for(op) if op in views.VIEWS else None
    if rule is not None:
        with contextlib.suppress(Unsupported):
            value = rule(context, *args, **kwargs)
            if isinstance(value, TensorRef):
                return value
    return calls.call(context, op, args, kwargs, "")


def _there(env: Environment, leaf: Any) -> Any:
    return env[leaf] if isinstance(leaf, fx.Node) else leaf


def _goes_ahead(source: fx.Node) -> bool:
    """Whether every reader is ``source.to(device, non_blocking=True)``."""
    return all(
        user.target is torch.ops.aten._to_copy.default and user.kwargs.get("non_blocking", False)
        for user in source.users
    )


def _moved(context: LoweringContext, source: LoweredArgument) -> TensorRef | None:
    """``source``, if it is all that ``tensor.to(device)`` gives: it was brought here already."""
    if not isinstance(source, TensorRef) or source.buffer not in context.builder.moved.values():
        return None
    layout = source.dtype, source.shape, source.strides
    return source if layout == (context.dtype, context.shape, context.strides) else None


def origin_of(node: fx.Node) -> Origin:
    """The source line and the name under which reports show the node."""
    known = info(node)
    operation = operation_name(node.target)
    return Origin((node.name,), known.where, known.module, known.phase, known.chunk, operation)


def error_at(node: fx.Node, message: str, remedy: str = "") -> LoweringError:
    """TR-301 for this node, with the user's line."""
    where = info(node).where
    return LoweringError(f"{node.name}: {message}", code="TR-301", where=where, remedy=remedy)
