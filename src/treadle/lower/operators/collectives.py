"""Collectives: library calls into treadle's buffers, each with a call that waits for it.

::

    s = all_reduce(g, "sum", "0")      s = all_reduce.out(g, "sum", "0")
    w = wait_tensor(s)                 w = wait.out(s, [g])        where s is, if only ``w`` reads s

The input of a collective is also an argument of its wait: until then its bytes are in use.
"""

from treadle.algebra.strides import contiguous_strides
from treadle.compat.distributed.collectives import AVAILABLE, collective_op
from treadle.compat.operators.operator_facts import may_accumulate
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.collectives import collective_of, is_wait
from treadle.graph.core.operators import effects_of
from treadle.loop.expr import Array
from treadle.loop.program import Call, CallArgument, TensorRef
from treadle.lower.context import LoweringContext
from treadle.lower.registry import Args, Lowered, LoweredArgument, Value
from treadle.util.nested import Plain, map_leaves

_OUT = "treadle_c10d.{}.out"  # see ``runtime/ranks/collectives.py``


def is_communication(op: OpOverload) -> bool:
    """Whether this file lowers ``op``."""
    return AVAILABLE and op.namespace == collective_op("wait_tensor").namespace


def lowered(context: LoweringContext, op: OpOverload, args: Args) -> Lowered:
    """A start, or a wait."""
    if is_wait(context.node):
        return _wait(context, op, args)
    return _start(context, op, args)


def _start(context: LoweringContext, op: OpOverload, args: Args) -> Lowered:
    started = collective_of(context.node)
    if started is None:
        raise context.fault(
            f"{op} is not a collective that can run inside a compiled step",
            remedy="move communication between ranks out of the step",
        )
    plain = tuple([_contiguous(context, arg) for arg in args])
    if started.coalesced:
        names = _results(context)
        _emit(context, op, plain, tuple([ref.buffer for ref in names]), "")
        return tuple(names)
    result = context.builder.buffer(
        context.name, context.dtype, context.shape, contiguous_strides(context.shape)
    )
    _emit(context, op, plain, (result.buffer,), _OUT.format(started.kind))
    return result


def _results(context: LoweringContext) -> list[TensorRef]:
    count = range(len(context.val))
    contexts = [context.element_context(at) for at in count]
    return [
        context.builder.buffer(
            context.name, context.dtype, context.shape, contiguous_strides(context.shape)
        )
        for context in contexts
    ]


def _wait(context: LoweringContext, op: OpOverload, args: Args) -> Lowered:
    started = args[0]
    assert isinstance(started, TensorRef), context.node
    steps = context.builder.steps
    start = next(
        step
        for step in reversed(steps)
        if isinstance(step, Call) and started.buffer in step.outputs
    )
    result = context.builder.buffer(context.name, context.dtype, started.shape, started.strides)
    inputs = () if _in_place(start) else start.refs
    _emit(context, op, (started, inputs), (result.buffer,), _OUT.format("wait"))
    return result


def _in_place(start: Call) -> bool:
    """Whether what is sent is where the result will be, and its own bytes are free."""
    return may_accumulate(start.out)


def _contiguous(context: LoweringContext, argument: LoweredArgument) -> CallArgument:
    """An argument as the backends take it: dense and in order."""

    def leaf(value: Value | Plain) -> TensorRef | Plain:
        if not isinstance(value, Array | TensorRef):
            return value
        strides = contiguous_strides(value.shape)
        if isinstance(value, TensorRef) and value.strides == strides:
            return value
        return context.builder.laid_out(f"{context.name}_input", value, strides, context.origin)

    return map_leaves(leaf, argument)


def _emit(
    context: LoweringContext,
    op: OpOverload,
    args: tuple[CallArgument, ...],
    outputs: tuple[str, ...],
    out: str,
) -> None:
    effects = effects_of(context.node)
    context.builder.steps.append(
        Call(str(op), args, {}, outputs, context.origin, out, effects=effects)
    )
