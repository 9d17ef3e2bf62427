"""Library calls: PyTorch's kernels, with results in treadle's buffers."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from treadle.algebra.extents import same, surely_less
from treadle.algebra.strides import is_dense
from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.graph.analysis.data_dependent import DataDependentOp
from treadle.graph.analysis.dynamic import layout_of, offset_of
from treadle.graph.core.arguments import Argument
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import effects_of, is_in_order
from treadle.graph.core.rng import ZeroOneDraw, zero_one_draw
from treadle.loop.expr import Array
from treadle.loop.program import Call, CallArgument, TensorRef
from treadle.lower.context import LoweringContext
from treadle.lower.library import OUT_VARIANTS
from treadle.lower.registry import Args, Kwargs, Lowered, LoweredArgument, Value
from treadle.lower.workspace import workspace_of
from treadle.runtime.execute.functional import written_by
from treadle.runtime.kernels.rng import OPERATOR, STATE_BYTES, can_draw
from treadle.util.nested import Nested, Plain, map_leaves
from treadle.util.reasons import ReasonCode

aten = torch.ops.aten
_DROPPED = frozenset({"layout", "pin_memory", "non_blocking"})


def qualified(op: OpOverload) -> str:
    """``aten.mm.default``."""
    return str(op)


def call(
    context: LoweringContext, op: OpOverload, args: Args, kwargs: Kwargs, reason: str
) -> Lowered:
    """``op`` as a library call; its tensor results are buffers of ours."""
    if op is aten.as_strided_scatter.default:
        args = _with_own_storage(context, args)
    in_order = is_in_order(context.node)
    drawn = _own_draw(context)
    if drawn is not None:
        args, kwargs = (_no_numbers(context), drawn.p), {}
    elif in_order:
        args = tuple(map(partial(_as_eager, context), args, context.node.args))
        kwargs = {
            key: _as_eager(context, value, context.node.kwargs[key])
            for key, value in kwargs.items()
        }
    plain_args = _with_margins(context, tuple(_plain(context, arg) for arg in args))
    plain_kwargs = {
        key: _plain(context, value) for key, value in kwargs.items() if key not in _DROPPED
    }
    single = isinstance(context.val, torch.Tensor)
    used = _used_results(context)
    contexts = (
        [context] if single else [context.element_context(i) for i in range(len(context.val))]
    )
    results: list[Value | int | None] = []
    out = OUT_VARIANTS.get(op, "") if drawn is None else OPERATOR
    updates = _updates(contexts, op, args)
    for position, element_context in enumerate(contexts):
        results.append(_result(element_context, bool(out)) if single or position in used else None)
    if out and not context.layout and not is_dense(context.shape, context.strides):
        out = ""
    names = tuple(r.buffer if isinstance(r, TensorRef) else None for r in results)
    context.builder.steps.append(
        Call(
            qualified(op),
            plain_args,
            plain_kwargs,
            names,
            context.origin,
            out,
            reason,
            STATE_BYTES
            if out == OPERATOR
            else workspace_of(op, plain_args, context.builder.target),
            effects=effects_of(context.node),
            updates=updates,
        )
    )
    return results[0] if single else tuple(results)


def _updates(
    contexts: Sequence[LoweringContext], op: OpOverload, args: Args
) -> tuple[int | str, ...]:
    """The arguments that an operator of the user's writes to, if all of them are dense."""
    written = written_by(op)
    results = contexts[len(contexts) - len(written) :]
    if not all(is_dense(result.shape, result.strides) for result in results):
        return ()
    names = [argument.name for argument in schema_of(op).arguments][: len(args)]
    return tuple([names.index(name) if name in names else name for name in written])


def data_dependent_op(
    context: LoweringContext, target: DataDependentOp, args: Args, kwargs: Kwargs
) -> Lowered:
    """A call whose operands or results have sizes that are known when it runs."""
    plain_args = tuple(_plain(context, arg) for arg in args)
    plain = {key: _plain(context, value) for key, value in kwargs.items() if key not in _DROPPED}
    several = isinstance(context.val, tuple | list)
    used = _used_results(context) if several else {0}
    results: list[Lowered] = []
    for at, value in enumerate(context.val if several else (context.val,)):
        name = f"{context.name}_{at}" if several else context.name
        results.append(
            _data_dependent_result(context, name, value, target.unsized[at]) if at in used else None
        )
    names = tuple(r.buffer if isinstance(r, TensorRef) else None for r in results)
    outputs = () if context.val is None else names
    reason = ReasonCode.SIZES_FROM_VALUES.because("a size depends on values")
    context.builder.steps.append(
        Call(
            target.op_name,
            plain_args,
            plain,
            outputs,
            context.origin,
            reason=reason,
            effects=effects_of(context.node),
        )
    )
    return tuple(results) if several else results[0]


def _data_dependent_result(
    context: LoweringContext, name: str, value: object, unsized: bool
) -> Lowered:
    if isinstance(value, torch.Tensor):
        shape, strides, device = value.shape, value.stride(), context.builder.device_of(value)
        return context.builder.buffer(
            name, value.dtype, shape, strides, device=device, unsized=unsized
        )
    assert value is None or isinstance(value, int | float), context.node
    return context.builder.buffer(name, torch.int64, (), unsized=True) if unsized else value


def _with_own_storage(context: LoweringContext, args: Args) -> Args:
    """The arguments of a call whose offset counts from the start of the storage of ``x``: that of a
    copy made by PyTorch, since buffers here share one storage."""
    x, source, size, stride, *rest = args
    offset = rest[0] if rest else None
    assert isinstance(x, TensorRef | Array), context.node
    assert offset is None or isinstance(offset, int), context.node
    base = value_of(context.node.all_input_nodes[0])
    shape, strides = layout_of(base)
    if not is_dense(shape, strides):
        raise context.fault(
            "it counts in a storage that has gaps",
            remedy="use slices or views instead of as_strided, or write out of place",
        )
    copy = context.builder.buffer(f"{context.name}_base", x.dtype, shape, strides)
    call = Call("aten.clone.default", (_plain(context, x),), {}, (copy.buffer,), context.origin)
    context.builder.steps.append(call)
    moved = 0 if offset is None else offset - offset_of(base)
    return copy, source, size, stride, moved


def _own_draw(context: LoweringContext) -> ZeroOneDraw | None:
    """The draw, if an operator of treadle's own gives PyTorch's numbers for it, as on CPUs."""
    draw = zero_one_draw(context.node)
    if draw is None or draw.generator is not None or not is_dense(draw.size, draw.stride):
        return None
    ours = context.builder.target.draws and not context.builder.library
    return draw if ours and can_draw(context.dtype) else None


def _as_eager(context: LoweringContext, value: LoweredArgument, like: Argument) -> LoweredArgument:
    """An argument of something that draws, with eager's strides: where its numbers go, and some of
    the numbers, depend on them. ``like``: the argument in the graph."""
    if isinstance(like, tuple | list):
        assert isinstance(value, tuple | list), context.node
        return tuple(map(partial(_as_eager, context), value, like))
    if not isinstance(like, fx.Node) or not isinstance(value, Array | TensorRef):
        return value
    shape, strides = layout_of(value_of(like))
    if isinstance(value, TensorRef):
        triples = zip(shape, value.strides, strides, strict=True)
        if all(same(mine, eager) for size, mine, eager in triples if not surely_less(size, 2)):
            return value
    return context.builder.laid_out(f"{context.name}_operand", value, strides, context.origin)


def _no_numbers(context: LoweringContext) -> TensorRef:
    """An operand of which a draw takes the shape alone: a tensor without bytes of its own."""
    one = context.builder.constant(f"{context.name}_like", torch.zeros((), dtype=context.dtype))
    return replace(one, shape=context.shape, strides=(0,) * len(context.shape))


def check(context: LoweringContext, op: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """An operation without results, called for its effect: it may raise."""
    plain = tuple(_plain(context, arg) for arg in args)
    named = {key: _plain(context, value) for key, value in kwargs.items()}
    steps = context.builder.steps
    steps.append(
        Call(qualified(op), plain, named, (), context.origin, effects=effects_of(context.node))
    )


def _with_margins(
    context: LoweringContext, args: tuple[CallArgument, ...]
) -> tuple[CallArgument, ...]:
    """The factors of a product with the zeros around them, where it is to be a larger one."""
    shapes = context.builder.layouts.factors.get(context.node)
    if shapes is None:
        return args
    return tuple(
        replace(arg, shape=shape) if isinstance(arg, TensorRef) else arg
        for arg, shape in zip(args, shapes, strict=True)
    )


def _result(context: LoweringContext, ours: bool) -> Value | int | None:
    """The buffer of one result; numbers among the results are known from the trace."""
    if not isinstance(context.val, torch.Tensor):
        return context.val
    strides, place = context.strides, context.builder.device_of(context.val)
    layout = context.layout if ours else None
    return context.builder.buffer(
        context.name, context.dtype, context.shape, strides, device=place, layout=layout
    )


def _used_results(context: LoweringContext) -> set[int]:
    """Which of many results anyone reads."""
    places = [user.args[1] for user in context.node.users if user.target is operator.getitem]
    return {place for place in places if isinstance(place, int)}


def _plain(context: LoweringContext, argument: Nested[Value | Plain]) -> CallArgument:
    """An argument as a call may hold it: formulas get a buffer, devices are named."""

    def plain(leaf: Value | Plain) -> TensorRef | Plain:
        if isinstance(leaf, Array):
            return context.stored(leaf)
        return str(leaf) if isinstance(leaf, torch.device) else leaf

    return map_leaves(plain, argument)
