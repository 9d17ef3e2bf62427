"""Graph to loop IR: every node becomes a view, a formula, one or a few steps, or a library call.

::

    lower:  StepGraph  ->  Program

Nothing is fused here. Every computed node gets a buffer with eager's strides (but see
``padding.py``); views and constants get none.
"""

import torch
from torch import fx

from treadle.algebra.strides import contiguous_strides, is_dense
from treadle.graph.analysis.dynamic import layout_of, symbols_of_graph
from treadle.graph.core.node_info import info, known_value, value_of
from treadle.graph.core.signature import StepGraph
from treadle.loop.expr import Array
from treadle.loop.program import IMPORT, BufferKind, Call, Compute, Origin, Program, TensorRef
from treadle.lower.context import Builder, Layouts, LoweringContext
from treadle.lower.node import Environment, error_at, lower_constant, lower_node, origin_of
from treadle.lower.operators import (
    activations,
    batch_norm,
    creation,
    foreach,
    hyperbolic,
    indexing,
    losses,
    norms,
    pointwise,
    pooling,
    powers,
    recurrent,
    reductions,
    resize,
    scatter,
    softmax,
    views,
)
from treadle.lower.padding import layouts_for
from treadle.lower.registry import Value
from treadle.lower.reuse import LoweredNodes
from treadle.lower.unaligned_products import pad_unaligned_products
from treadle.lower.write_back import drop_dead_steps, place_write_backs, write_in_place
from treadle.targets.record import DeviceTarget
from treadle.targets.registry import target_for
from treadle.util.errors import internal_errors

FAMILIES = (
    *(creation, views, indexing, scatter, pointwise, hyperbolic, powers, activations),
    foreach,
    *(reductions, softmax, losses, norms, batch_norm, resize, pooling, recurrent),
)
"""The files whose import fills the registry."""


def lower(
    step: StepGraph,
    *,
    device: str = "cpu",
    target: DeviceTarget | None = None,
    library: bool = False,
    pad: bool = True,
    known: LoweredNodes | None = None,
) -> Program:
    """The step as formulas and library calls, in the order of the graph, for ``target`` or what
    ``device`` is by itself.

    Write-backs stand as early as they may. Results never share storage with an input.
    ``library``: views and library calls only, for machines that cannot compile. ``pad``: let
    products of odd sizes be larger ones with zeros. ``known``: of other graphs of this step.
    """
    lower_one = lower_node if known is None else known.lower
    target = target or target_for(device)
    layouts = layouts_for(step, target) if pad and not library else Layouts()
    symbols = symbols_of_graph(step.graph)
    builder = Builder(device, _is_placed(step, device), layouts, library, target, symbols)
    env: Environment = {}
    inputs = tuple(_bind_input(builder, node, env) for node in step.placeholders)
    returned = {node for node, output in step.outputs() if node and output.writes is None}
    for node in step.graph.nodes:
        if node.op == "get_attr":
            env[node] = lower_constant(builder, step.graph.owning_module, node)
        elif node.op == "call_function":
            with internal_errors("lowering", info(node).where, node.target):
                env[node] = lower_one(builder, node, env)
                if node in returned and _reads_nothing(builder, env[node]):
                    env[node] = _returned(builder, node, env[node])
        elif node.op not in ("placeholder", "output"):
            raise error_at(node, f"{node.op} is not part of a functional ATen graph")
    results, writes = _outputs(builder, step, env)
    writes = write_in_place(builder, writes, results)
    place_write_backs(builder, writes, {} if known is None else known.copies)
    drop_dead_steps(builder, inputs, results)
    if pad:
        pad_unaligned_products(builder)
    steps = tuple(builder.steps)
    return Program(builder.buffers, steps, inputs, results, builder.constants, device)


def _is_placed(step: StepGraph, device: str) -> bool:
    """Whether the step was traced on ``device``: then other devices in it are meant."""
    vals = [known_value(node) for node in step.placeholders]
    kind = torch.device(device).type
    return any(isinstance(val, torch.Tensor) and val.device.type == kind for val in vals)


def _bind_input(builder: Builder, node: fx.Node, env: Environment) -> str:
    val = known_value(node)
    if not isinstance(val, torch.Tensor):
        raise error_at(node, "an input of the step is not a tensor")
    place = builder.device_of(val)
    shape, strides = layout_of(val)
    ref = builder.buffer(node.name, val.dtype, shape, strides, BufferKind.INPUT, place)
    env[node] = ref
    return ref.buffer


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
            results.append(_placed(builder, node, _returned(builder, node, env[node])))
            continue
        results.append(None)
        if node is not placeholders[output.writes]:
            target, value = env[placeholders[output.writes]], env[node]
            assert isinstance(target, TensorRef), output
            assert isinstance(value, TensorRef | Array), output
            writes[target.buffer] = (value, origin_of(node))
    return tuple(results), writes


def _placed(builder: Builder, node: fx.Node, ref: TensorRef) -> TensorRef:
    """``ref`` on the device where eager's result is: what is on the host is computed here too."""
    place = builder.device_of(value_of(node))
    buffer = builder.buffers[ref.buffer]
    if buffer.device == place:
        return ref
    copy = builder.buffer(f"{node.name}_there", ref.dtype, ref.shape, device=place)
    kwargs = {"device": place, "memory_format": torch.contiguous_format}
    builder.steps.append(Call(IMPORT, (ref,), kwargs, (copy.buffer,), origin_of(node)))
    return copy


def _reads_nothing(builder: Builder, value: object) -> bool:
    """Whether a value is known without a step. As a result it is made where its node stands, so
    that a forward has it when it is over (``session/joint``), and not as the last of all."""
    if isinstance(value, TensorRef):
        return builder.buffers[value.buffer].kind is BufferKind.CONSTANT
    return isinstance(value, Array)


def _returned(builder: Builder, node: fx.Node, value: object) -> TensorRef:
    """A result in storage of its own: not an input's, a constant's or a formula."""
    val = known_value(node)
    if not isinstance(value, TensorRef | Array) or not isinstance(val, torch.Tensor):
        raise error_at(node, "a result of the step is not a tensor")
    is_own = (
        isinstance(value, TensorRef) and builder.buffers[value.buffer].kind is BufferKind.TEMPORARY
    )
    if is_own and isinstance(value, TensorRef):
        return value
    context = LoweringContext(builder, node, origin_of(node), val, f"{node.name}_result")
    if isinstance(value, TensorRef):
        value = builder.local(value, context.origin)
    if not builder.has_formulas(value.dtype):
        if isinstance(value, Array):
            return context.stored(value)
        dense = is_dense(context.shape, context.strides)
        kept = context.strides if dense else contiguous_strides(context.shape)
        return builder.relaid(context.name, value, kept, context.origin)
    copy = context.output()
    builder.steps.append(Compute(copy, pointwise.to_copy(context, value), context.origin))
    return copy
