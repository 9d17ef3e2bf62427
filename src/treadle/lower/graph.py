"""Graph to loop IR: every node becomes a view, a formula, one or a few steps, or a library call.

::

    lower:  StepGraph  ->  Program

Nothing is fused here. Every computed node gets a buffer with eager's strides (but see
``padding.py``); views and constants get none.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from treadle.graph.signature import StepGraph
from treadle.loop.expr import Array, Const
from treadle.loop.program import BufferKind, Compute, Origin, Program, TensorRef
from treadle.lower import calls, creation, indexing, pointwise, reductions, softmax_norms, views
from treadle.lower.padding import layouts_for
from treadle.lower.registry import Decline, Value, rule_for
from treadle.lower.site import Builder, Layouts, Site
from treadle.lower.write_back import drop_dead_steps, place_write_backs
from treadle.util.errors import LoweringError

FAMILIES = (calls, creation, indexing, pointwise, reductions, softmax_norms, views)
"""The files whose import fills the registry."""

NO_COMPILER = "no kernels are generated here"
"""Why everything is a library call: no compiler was found, or ``codegen=False``."""

Environment = dict[fx.Node, Any]


def lower(step: StepGraph, *, device: str = "cpu", library: bool = False) -> Program:
    """The step as formulas and library calls, in the order of the graph.

    Write-backs stand as early as they may. Results never share storage with an input.
    ``library``: views and library calls only, for machines that cannot compile.
    """
    layouts = Layouts() if library else layouts_for(step, device)
    builder = Builder(device, _is_placed(step, device), layouts, library)
    env: Environment = {}
    inputs = tuple(_bind_input(builder, node, env) for node in step.placeholders)
    for node in step.graph.nodes:
        if node.op == "get_attr":
            env[node] = _constant(builder, step.graph, node)
        elif node.op == "call_function":
            env[node] = _lower_node(builder, node, env)
        elif node.op not in ("placeholder", "output"):
            raise _error(node, f"{node.op} is not part of a functional ATen graph")
    results, writes = _outputs(builder, step, env)
    place_write_backs(builder, writes)
    drop_dead_steps(builder, inputs, results)
    return Program(builder.buffers, tuple(builder.steps), inputs, results, builder.constants)


def _is_placed(step: StepGraph, device: str) -> bool:
    """Whether the step was traced on ``device``: then other devices in it are meant."""
    vals = [node.meta.get("val") for node in step.placeholders]
    return any(isinstance(val, torch.Tensor) and val.device.type == device for val in vals)


def _bind_input(builder: Builder, node: fx.Node, env: Environment) -> str:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise _error(node, "an input of the step is not a tensor")
    place = builder.device_of(val)
    ref = builder.buffer(node.name, val.dtype, val.shape, val.stride(), BufferKind.INPUT, place)
    env[node] = ref
    return ref.buffer


def _constant(builder: Builder, graph: fx.Graph, node: fx.Node) -> Value:
    """A tensor held by the graph: one number is a literal, more are a constant buffer."""
    data = operator.attrgetter(str(node.target))(graph.owning_module)
    if not isinstance(data, torch.Tensor):
        raise _error(node, "a constant of the graph is not a tensor")
    data = data.detach()
    if data.ndim == 0 and data.dtype.is_complex is False and not builder.library:
        return Array((), Const(data.item(), data.dtype))
    data = data.contiguous()
    ref = builder.buffer(node.name, data.dtype, data.shape, kind=BufferKind.CONSTANT)
    builder.constants[ref.buffer] = data
    return ref


def _lower_node(builder: Builder, node: fx.Node, env: Environment) -> Any:
    target = node.target
    if target is operator.getitem:
        source, position = node.args
        return env[source][position]  # type: ignore[index]
    if not isinstance(target, OpOverload):
        raise _error(node, f"{target} is not an ATen operation")
    val = node.meta.get("val")
    if val is None:
        raise _error(node, "the node has no fake value")
    site = Site(builder, node, origin_of(node), val, node.name)
    args = _resolved(site, node.args, env)
    kwargs = _resolved(site, node.kwargs, env)
    return _lowered(site, target, args, kwargs)


def _lowered(site: Site, op: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if not _is_tensors(site.val):
        raise site.fault("the result is not a tensor", "compute it outside the step")
    crosses = op is torch.ops.aten._to_copy.default and _leaves(site, args[0])
    only_views = site.builder.library
    rule = None if crosses or (only_views and op not in views.VIEWS) else rule_for(op)
    reason = NO_COMPILER if only_views else f"{op} has no lowering rule"
    if rule is not None:
        try:
            value = rule(site, *args, **kwargs)
            if not (only_views and _has_formulas(value)):
                return _results(site, value)
        except Decline as refusal:
            reason = f"{op}: {refusal}"
    chosen = crosses or op in calls.CHOSEN
    return calls.call(site, op, args, kwargs, "" if chosen else reason)


def _has_formulas(value: Any) -> bool:
    return any(isinstance(each, Array) for each in (value if isinstance(value, tuple) else [value]))


def _leaves(site: Site, source: Value) -> bool:
    """Whether a conversion ends on another device than the program's."""
    return isinstance(source, TensorRef) and site.builder.device_of(site.val) != site.builder.device


def _is_tensors(val: Any) -> bool:
    if isinstance(val, tuple | list):
        return any(isinstance(each, torch.Tensor) for each in val)
    return isinstance(val, torch.Tensor)


def _results(site: Site, value: Any) -> Any:
    """What the rule returned, each formula that reads a buffer stored in one of its own."""
    if isinstance(value, tuple):
        if all(isinstance(each, TensorRef) for each in value):
            return value
        return tuple(
            None if each is None else site.element_site(i).result(each)
            for i, each in enumerate(value)
        )
    return site.result(value)


def _resolved(site: Site, arg: Any, env: Environment) -> Any:
    """Arguments with nodes replaced by their values, on the device of the program."""
    if isinstance(arg, fx.Node):
        value = env[arg]
        return site.builder.local(value, site.origin) if isinstance(value, TensorRef) else value
    if isinstance(arg, tuple | list):
        return tuple(_resolved(site, item, env) for item in arg)
    if isinstance(arg, Mapping):
        return {key: _resolved(site, item, env) for key, item in arg.items()}
    return arg


def _outputs(
    builder: Builder, step: StepGraph, env: Environment
) -> tuple[tuple[TensorRef | None, ...], dict[str, tuple[Value, Origin]]]:
    """Results, and for each input that changes its new value."""
    placeholders = step.placeholders
    results: list[TensorRef | None] = []
    writes: dict[str, tuple[Value, Origin]] = {}
    for node, output in step.outputs():
        if node is None:
            results.append(None)
            continue
        if output.writes is None:
            results.append(_returned(builder, node, env[node]))
            continue
        results.append(None)
        if node is not placeholders[output.writes]:
            writes[env[placeholders[output.writes]].buffer] = (env[node], origin_of(node))
    return tuple(results), writes


def _returned(builder: Builder, node: fx.Node, value: Any) -> TensorRef:
    """A result in storage of its own: not an input's, a constant's or a formula."""
    val = node.meta.get("val")
    if not isinstance(value, TensorRef | Array) or not isinstance(val, torch.Tensor):
        raise _error(node, "a result of the step is not a tensor")
    is_own = (
        isinstance(value, TensorRef) and builder.buffers[value.buffer].kind is BufferKind.TEMPORARY
    )
    if is_own and isinstance(value, TensorRef):
        return value
    site = Site(builder, node, origin_of(node), val, f"{node.name}_result")
    if isinstance(value, TensorRef):
        value = builder.local(value, site.origin)
    if builder.library:
        ref = site.stored(value)
        return ref if isinstance(value, Array) else builder.copied(site.name, ref, site.origin)
    copy = site.output()
    builder.steps.append(Compute(copy, pointwise.to_copy(site, value), site.origin))
    return copy


def origin_of(node: fx.Node) -> Origin:
    """Who to name when this node is reported."""
    meta = node.meta
    return Origin(
        (node.name,), meta.get("where", ""), meta.get("module", ""), meta.get("phase", "")
    )


def _error(node: fx.Node, message: str) -> LoweringError:
    where = node.meta.get("where", "")
    return LoweringError(f"{node.name}: {message}", code="TR-301", where=where)
