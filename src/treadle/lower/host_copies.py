"""Copies between the device and the host: library calls into treadle's buffers on both, each with
a call that waits for it.

::

    h = to_host(x)        h = to_host.out(x)
    w = arrived(h, x)     w = arrived.out(h, x)        where h is
    s = from_host(w)      s = from_host.out(w)
    y = arrived(s, w)     y = arrived.out(s, w)        where s is
"""

from treadle.algebra.strides import is_dense
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.operators import effects_of
from treadle.graph.custom_ops.host_copies import ARRIVED, HOST_COPIES, TO_HOST
from treadle.loop.expr import Array
from treadle.loop.program import Call, TensorRef
from treadle.lower.context import LoweringContext
from treadle.lower.registry import Args, Lowered, Value
from treadle.targets.cpu import CPU

_OUT = {each.op: f"treadle.{each.op.overloadpacket.__name__}.out" for each in HOST_COPIES}


def is_host_copy(op: OpOverload) -> bool:
    """Whether this file lowers ``op``."""
    return op in _OUT


def lowered(context: LoweringContext, op: OpOverload, args: Args) -> Lowered:
    """A start, or a wait; ``args``: where they are, on the device or on the host."""
    builder = context.builder
    if op is ARRIVED.op:
        started, source = args
        assert isinstance(started, TensorRef), context.node
        assert isinstance(source, TensorRef), context.node
        return _emit(context, op, (started, source), builder.buffers[started.buffer].device)
    value = args[0]
    assert isinstance(value, Array | TensorRef), context.node
    source = _dense(context, value)
    return _emit(context, op, (source,), CPU.device if op is TO_HOST.op else builder.device)


def _dense(context: LoweringContext, value: Value) -> TensorRef:
    """All of a value in memory without gaps, which is copied as one piece."""
    ref = context.stored(value)
    if is_dense(ref.shape, ref.strides):
        return ref
    return context.builder.copied(f"{context.name}_dense", ref, context.origin)


def _emit(
    context: LoweringContext, op: OpOverload, args: tuple[TensorRef, ...], device: str
) -> TensorRef:
    like = args[0]
    result = context.builder.buffer(
        context.name, like.dtype, like.shape, like.strides, device=device
    )
    effects = effects_of(context.node)
    context.builder.steps.append(
        Call(str(op), args, {}, (result.buffer,), context.origin, _OUT[op], effects=effects)
    )
    return result
