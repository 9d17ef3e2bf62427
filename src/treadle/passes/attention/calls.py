"""The library calls that replace a matched attention."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import fx
from torch.fx.node import Argument

from treadle.algebra.extents import same_sizes
from treadle.graph.core.operators import may_drop, operand_of
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.passes.attention.additive import Additive, filled
from treadle.passes.attention.backward import Backward
from treadle.passes.attention.forward import Forward
from treadle.passes.attention.kernels import FusedCall, FusedKernel
from treadle.passes.attention.moves import Arrange, ElementOrder, arranged, is_move
from treadle.passes.attention.rows import MaskedRows
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

_View: TypeAlias = tuple[Callable[..., torch.Tensor], tuple[Argument, ...]]


@final
@dataclass(frozen=True, slots=True)
class FoundAttention:
    """An attention that becomes a call, with its gradient if the step has it."""

    forward: Forward
    backward: Backward | None
    rows: MaskedRows
    kernel: FusedKernel
    mask_dtype: torch.dtype


def replace(attention: FoundAttention, masks: Additive) -> None:
    """Let the library's calls be read instead of what was found, which goes."""
    forward, backward = attention.forward, attention.backward
    call, dead = _forward_call(attention, masks)
    result = call.result
    if dead is not None and not attention.rows.mixes:
        result = filled(ReplacementBuilder(forward.result), dead, math.nan, result)
    _put(forward.result, result, transposed=False)
    gone = [forward.result]
    if backward is not None:
        gradients = _gradients(attention, backward, call, dead)
        wanted = (backward.d_query, backward.d_key, backward.d_value)
        for old, new, turned in zip(wanted, gradients, (False, True, False), strict=True):
            if old is not None:
                _put(old, new, transposed=turned)
                gone.append(old)
    for old in gone:
        _erase_dead(old)


def _forward_call(attention: FoundAttention, masks: Additive) -> tuple[FusedCall, fx.Node | None]:
    """The call, and which rows are masked whole, if there may be any."""
    forward = attention.forward
    scores, (_, rows, columns, width), heads = forward.scores, forward.sizes, forward.heads
    make = ReplacementBuilder(forward.result)
    operands = (
        arranged(make, scores.query, Arrange((*heads, rows, width), transposed=False)),
        arranged(make, scores.key, Arrange((*heads, columns, width), transposed=True)),
        arranged(make, forward.value, Arrange((*heads, columns, width), transposed=False)),
    )
    added = masks.of(make, forward, attention.rows, attention.mask_dtype)
    mask, dead = (None, None) if added is None else (added.mask, added.dead)
    if attention.rows.mixes and dead is not None:
        operands = (filled(make, dead, 0.0, operands[0]), *operands[1:])
    return attention.kernel.call(make, operands, mask, scores.scale), dead


def _gradients(
    attention: FoundAttention, backward: Backward, call: FusedCall, dead: fx.Node | None
) -> list[fx.Node]:
    """The gradients of query, key and value, of four dims."""
    both = (backward.d_value, backward.d_weights)
    readers = {node for node in both if node is not None}
    make = ReplacementBuilder(next(node for node in call.result.graph.nodes if node in readers))
    gradient = arranged(
        make, backward.d_result, Arrange(type_of(call.result).shape, transposed=False)
    )
    if dead is None:
        return attention.kernel.gradients(make, gradient, call)
    if attention.rows.mixes:
        return _with_mixtures(make, attention, gradient, call, dead)
    return _with_nans(make, attention, gradient, call, dead)


def _with_nans(
    make: ReplacementBuilder,
    attention: FoundAttention,
    gradient: fx.Node,
    call: FusedCall,
    dead: fx.Node,
) -> list[fx.Node]:
    """Nothing goes back through a dead row of the call, which has it as one without a mask; the NaN
    that eager has there is put in after."""
    gradient = filled(make, dead, 0.0, gradient)
    query, key, value = attention.kernel.gradients(make, gradient, call)
    anywhere = make.call(aten.any.dim, dead, -2, True)
    value = filled(make, anywhere, math.nan, value)
    if not attention.rows.zeroed:
        query = filled(make, dead, math.nan, query)
        key = filled(make, anywhere, math.nan, key)
    return [query, key, value]


def _with_mixtures(
    make: ReplacementBuilder,
    attention: FoundAttention,
    gradient: fx.Node,
    call: FusedCall,
    dead: fx.Node,
) -> list[fx.Node]:
    """A dead row has equal probabilities: so it has in the call, whose query there is zero.

    All but the gradient of the key is right then, and what that lacks is, over dead rows ``t``,

        d_key[s] += scale / S * (value[s] - mean(value)) @ sum{t} d_result[t]^T query[t]
    """
    query, key, value = attention.kernel.gradients(make, gradient, call)
    if attention.rows.zeroed:
        return [filled(make, dead, 0.0, query), key, value]
    forward = attention.forward
    _, rows, columns, width = forward.sizes
    shape = [forward.sizes[0], rows, width]
    alive = make.call(aten.logical_not.default, dead)
    of_dead = make.dense(filled(make, alive, 0.0, gradient))
    turned = make.call(aten.transpose.int, make.call(aten.view.default, of_dead, shape), 1, 2)
    outer = make.call(aten.bmm.default, turned, forward.scores.query)
    mean = make.call(aten.mean.dim, forward.value, [1], True)
    apart = make.call(aten.sub.Tensor, forward.value, mean)
    share = make.call(aten.mul.Tensor, apart, forward.scores.scale / columns)
    lacking = make.call(aten.bmm.default, share, outer)
    lacking = make.call(aten.view.default, lacking, list(type_of(key).shape))
    return [query, make.call(aten.add.Tensor, key, lacking), value]


def _put(old: fx.Node, new: fx.Node, *, transposed: bool) -> None:
    """Let ``new``, of four dims, be read instead of ``old``, of three: in the same order of memory,
    for what follows was captured for that."""
    make = ReplacementBuilder(old)
    turned = make.call(aten.transpose.int, new, 2, 3) if transposed else new
    _spare_copies(old, turned)
    dense = make.dense(turned)
    value = make.call(aten.view.default, dense, list(type_of(old).shape))
    old.replace_all_uses_with(value)


def _spare_copies(old: fx.Node, new: fx.Node) -> None:
    """Copies that are in row-major order whatever they are of are made from ``new`` itself, whose
    order may be theirs.

    before:  a = view(old, [2, 4, 13, 8]); b = transpose(a, 1, 2); c = clone(b)
    after:   b = transpose(new, 1, 2); c = clone(b)
    """
    for copy, views in list(_copies_of(old, new)):
        make, value = ReplacementBuilder(copy), new
        for target, args in views:
            value = make.call(target, value, *args)
        copy.replace_input_with(operand_of(copy), value)


def _copies_of(old: fx.Node, new: fx.Node) -> Iterator[tuple[fx.Node, list[_View]]]:
    """Row-major copies of ``old`` and its views, each with the views of ``new`` that it is of.

    Two layouts are followed: where elements of ``old`` are, and where those of ``new`` would be.
    """
    kind = type_of(new)
    there = torch.empty_strided(kind.shape, kind.strides, device="meta")
    shape = list(type_of(old).shape)
    begin: _View = (aten.view.default, (shape,))
    begun: list[_View] = [begin]
    worklist = [(old, ElementOrder.plain(shape), _viewed(there, begin), begun)]
    while worklist:
        node, layout, place, views = worklist.pop()
        for reader in [user for user in node.users if is_move(user)]:
            if _is_dense_copy(reader):
                if place is not None:
                    yield reader, views
                continue
            following = attempt(layout.moved, reader)
            if isinstance(following, NoMatch):
                continue
            step: _View = (_view_target(reader), tuple(reader.args[1:]))
            if following.is_plain and same_sizes(following.shape, kind.shape):
                worklist.append((reader, following, there, []))
            else:
                beyond = None if place is None else _viewed(place, step)
                worklist.append((reader, following, beyond, [*views, step]))


def _view_target(node: fx.Node) -> Callable[..., torch.Tensor]:
    assert callable(node.target), node
    return aten.view.default if node.target is aten._unsafe_view.default else node.target


def _viewed(layout: torch.Tensor, view: _View) -> torch.Tensor | None:
    target, args = view
    try:
        return target(layout, *args)
    except RuntimeError:
        return None


def _is_dense_copy(node: fx.Node) -> bool:
    if node.target is not aten.clone.default:
        return False
    return node.kwargs.get("memory_format") is torch.contiguous_format


def _erase_dead(root: fx.Node) -> None:
    """Erase ``root`` and the operands that only it kept."""
    worklist: list[fx.Node] = [root]
    while worklist:
        node = worklist.pop()
        gone = node.users or not may_drop(node)
        if gone or node.op != "call_function":
            continue
        operands = node.all_input_nodes
        node.graph.erase_node(node)
        worklist += operands
