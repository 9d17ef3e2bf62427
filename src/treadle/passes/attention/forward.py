"""From a softmax to the attention around it: back to the product of the scores, forward to that
with the values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import fx

from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, is_random, operand_of
from treadle.graph.core.types import is_tensor, type_of
from treadle.passes.attention.moves import ElementOrder, is_cast, is_move, require_rows
from treadle.passes.attention.rows import ScoreMask, number
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

_MULTIPLIED = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_DIVIDED = frozenset({aten.div.Tensor, aten.div.Scalar})
SCALES = _MULTIPLIED | _DIVIDED
_FILLED = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """``softmax``'s operand as ``scale * query @ key + masks``.

    ``product``: the node that multiplies; ``inside``: all between it and the softmax, both left
    out, the last first.
    """

    product: fx.Node
    query: fx.Node
    key: fx.Node
    scale: float
    masks: tuple[ScoreMask, ...]
    inside: tuple[fx.Node, ...]


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass of one attention.

    ::

        scores = query @ key     [N, T, D] @ [N, D, S]
        result = softmax(scale * scores + masks) @ value     [N, T, S] @ [N, S, D]

    ``weights``: from the softmax's result to what is multiplied, both included.
    """

    softmax: fx.Node
    scores: Scores
    weights: tuple[fx.Node, ...]
    value: fx.Node
    result: fx.Node

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """``N, T, S, D``."""
        n, t, d = type_of(self.scores.query).shape
        return n, t, type_of(self.value).shape[1], d

    @property
    def heads(self) -> tuple[int, int]:
        """``N`` as batch and heads, as softmax or masks have them; one batch if they do not say."""
        shapes = [type_of(self.softmax).shape, *(mask.shape for mask in self.scores.masks)]
        for shape in shapes:
            if len(shape) == 4:
                return shape[0], shape[1]
        return 1, self.sizes[0]


def forward_of(softmax: fx.Node) -> Forward:
    """The attention around ``softmax``; ``NoMatch`` says why there is none."""
    args = arguments(softmax)
    kind = type_of(softmax)
    last = args["dim"] in (-1, kind.ndim - 1)
    require(last and kind.ndim >= 3, NoMatch, "not a softmax of matrices over their last dim")
    fixed = all(type(size) is int for size in kind.shape)
    require(fixed, NoMatch, "dynamic sizes")
    scores = _scores(args["self"], _Walk(softmax))
    weights = _weights(softmax)
    result = _product_of(weights[-1])
    forward = Forward(softmax, scores, weights, arguments(result)["mat2"], result)
    _check_lone(forward)
    _check_types(forward)
    _check_layouts(forward)
    _check_regions(forward)
    return forward


# Back from the softmax to the product.


@final
@dataclass(frozen=True, slots=True)
class _Walk:
    """What was met between the softmax and where the walk is."""

    softmax: fx.Node
    scale: float = 1.0
    masks: tuple[ScoreMask, ...] = ()
    inside: tuple[fx.Node, ...] = field(default=())

    def past(self, node: fx.Node, **changes: object) -> "_Walk":
        return replace(self, inside=(*self.inside, node), **changes)

    def masked(self, node: fx.Node, mask: ScoreMask) -> "_Walk":
        require(self.scale == 1.0, NoMatch, f"{node} masks scores that are scaled after it")
        kind = type_of(mask.node)
        known = kind.dtype.is_floating_point if mask.add else kind.dtype is torch.bool
        require(known, NoMatch, f"{mask.node} is a mask of {kind.dtype}")
        return self.past(node, masks=(*self.masks, mask))


def _scores(at: object, walk: _Walk) -> Scores:
    """The scores that ``at`` is, given what is done to it after."""
    words = f"{at} is neither a product of two matrices, nor a mask or a scale on the way to one"
    require(is_tensor(at), NoMatch, words)
    assert isinstance(at, fx.Node)
    if is_move(at) or is_cast(at):
        return _scores(operand_of(at), walk.past(at))
    args = arguments(at) if at.op == "call_function" else {}
    match at.target:
        case aten.bmm.default:
            return _product(at, args["self"], args["mat2"], walk)
        case aten.baddbmm.default:
            return _added_product(at, args, walk)
        case aten.add.Tensor:
            return _masked_sum(at, args, walk)
        case aten.where.self:
            return _chosen(at, args, walk)
        case target if target in _FILLED:
            fill = _fill(at, args["value"])
            mask = ScoreMask(args["mask"], _shape(at), fill=fill)
            return _scores(_same_shape(at, args["self"]), walk.masked(at, mask))
        case target if target in SCALES:
            value, factor = factor_of(at)
            return _scores(_same_shape(at, value), walk.past(at, scale=walk.scale * factor))
        case _:
            raise NoMatch(words)


def _product(at: fx.Node, query: fx.Node, key: fx.Node, walk: _Walk) -> Scores:
    _check_scale(at, walk.scale)
    return Scores(at, query, key, walk.scale, walk.masks, walk.inside)


def _added_product(at: fx.Node, args: dict[str, Any], walk: _Walk) -> Scores:
    """``baddbmm(mask, query, key)``."""
    require(args["beta"] == args["alpha"] == 1, NoMatch, f"{at} scales what it adds")
    require(walk.scale == 1.0, NoMatch, f"{at} masks scores that are scaled after it")
    mask = ScoreMask(args["self"], _shape(at), add=True)
    masks = (*walk.masks, mask)
    return Scores(at, args["batch1"], args["batch2"], walk.scale, masks, walk.inside)


def _masked_sum(at: fx.Node, args: dict[str, Any], walk: _Walk) -> Scores:
    """A sum of scores and a mask, in either order."""
    require(args["alpha"] == 1, NoMatch, f"{at} scales what it adds")
    miss = NoMatch(f"{at} adds a number")
    for value, mask in ((args["self"], args["other"]), (args["other"], args["self"])):
        if not is_tensor(value) or not is_tensor(mask) or _shape(value) != _shape(at):
            continue
        scores = attempt(_scores_under, value, ScoreMask(mask, _shape(at), add=True), at, walk)
        if not isinstance(scores, NoMatch):
            return scores
        miss = scores
    raise miss


def _scores_under(value: object, mask: ScoreMask, at: fx.Node, walk: _Walk) -> Scores:
    return _scores(value, walk.masked(at, mask))


def _chosen(at: fx.Node, args: dict[str, Any], walk: _Walk) -> Scores:
    """``where(kept, scores, fill)`` or ``where(dropped, fill, scores)``."""
    for name, other, keeps in (("self", "other", True), ("other", "self", False)):
        fill = number(args[other])
        if fill is None:
            continue
        mask = ScoreMask(args["condition"], _shape(at), fill=_fill(at, fill), keeps=keeps)
        return _scores(_same_shape(at, args[name]), walk.masked(at, mask))
    raise NoMatch(f"{at} chooses between values, not between scores and a number")


def factor_of(node: fx.Node) -> tuple[fx.Node, float]:
    """What ``node`` multiplies, and by which number; ``NoMatch`` if it is none."""
    args = arguments(node)
    pairs = [(args["self"], args["other"])]
    if node.target in _MULTIPLIED:
        pairs.append((args["other"], args["self"]))
    elif args.get("rounding_mode") is not None:
        raise NoMatch(f"{node} rounds")
    for value, other in pairs:
        factor = number(other)
        if factor is None or not is_tensor(value):
            continue
        _check_scale(node, factor)
        return value, factor if node.target in _MULTIPLIED else 1.0 / factor
    raise NoMatch(f"{node} scales by no number that is known")


_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def _check_scale(node: fx.Node, factor: float) -> None:
    """Kernels take one scale, which they round to f32: it must stay what it is there."""
    require(_LEAST <= abs(factor) <= _MOST, NoMatch, f"{node} scales by {factor}")


def _fill(at: fx.Node, value: object) -> float:
    fill = number(value)
    require(fill is not None, NoMatch, f"{at} fills with no number that is known")
    assert fill is not None
    least = -math.inf if fill == -math.inf else torch.finfo(type_of(at).dtype).min / 2
    known = fill == -math.inf or fill <= max(least, -1e30)
    require(known, NoMatch, f"{at} fills with {fill}, which scores may come near")
    return fill


def _same_shape(at: fx.Node, value: object) -> object:
    same = is_tensor(value) and _shape(value) == _shape(at)
    require(same, NoMatch, f"{at} makes its operand larger")
    return value


def _shape(node: Any) -> tuple[int, ...]:
    return type_of(node).shape


# On from the softmax to the second product.


def _weights(softmax: fx.Node) -> tuple[fx.Node, ...]:
    """Views and casts of the softmax, down to what is multiplied."""
    chain = [softmax]
    while not any(map(_multiplies(chain[-1]), chain[-1].users)):
        readers = [user for user in chain[-1].users if not is_derivative(user)]
        dropped = any(map(_draws, readers))
        words = "dropout: its mask is of eager's random stream, drawn outside"
        require(not dropped, NoMatch, words)
        passes = len(readers) == 1 and (is_move(readers[0]) or is_cast(readers[0]))
        require(passes, NoMatch, _words_of(readers))
        chain.append(readers[0])
    return tuple(chain)


def _draws(reader: fx.Node) -> bool:
    """Whether a reader of the probabilities draws, or has an operand that was drawn."""
    return is_random(reader) or any(map(_is_drawn, reader.all_input_nodes))


def _is_drawn(node: fx.Node) -> bool:
    while not is_random(node) and len(node.all_input_nodes) == 1 and not _is_softmax(node):
        node = operand_of(node)
    return is_random(node)


def _is_softmax(node: fx.Node) -> bool:
    """Whether ``node`` is a softmax."""
    return node.target is aten._softmax.default


def _words_of(readers: Sequence[fx.Node]) -> str:
    if not readers:
        return "the probabilities are not multiplied with values"
    return f"the probabilities are used by {' and '.join(map(_name, readers))}"


def _name(node: fx.Node) -> str:
    return "the caller" if node.op == "output" else str(node)


def is_derivative(node: fx.Node) -> bool:
    """Whether ``node`` is the gradient of a softmax."""
    return node.target is aten._softmax_backward_data.default


def _multiplies(weights: fx.Node) -> Callable[[fx.Node], bool]:
    """Whether a node multiplies ``weights`` with values."""

    def test(node: fx.Node) -> bool:
        return node.target is aten.bmm.default and node.args[0] is weights

    return test


def _product_of(weights: fx.Node) -> fx.Node:
    """The first in order: a matrix of one element is its own transpose, and read by a gradient."""
    readers = set(filter(_multiplies(weights), weights.users))
    return next(node for node in weights.graph.nodes if node in readers)


# What must hold of all of it.


def _check_lone(forward: Forward) -> None:
    """Nobody else reads what will not exist any more, the gradient aside."""
    scores = forward.scores
    for node in (*scores.inside, scores.product):
        others = len(node.users) - 1
        require(others == 0, NoMatch, f"the scores {node} are used by others")


def _check_layouts(forward: Forward) -> None:
    """Rows are queries and columns are keys, all the way."""
    _, rows, columns, _ = forward.sizes
    scores = forward.scores
    layout = ElementOrder.plain(type_of(scores.product).shape)
    for node in reversed(scores.inside):
        if is_move(node):
            layout = layout.moved(node)
        else:
            require_rows(layout, rows, columns, node)
    require_rows(layout, rows, columns, forward.softmax)
    layout = ElementOrder.plain(type_of(forward.softmax).shape)
    for node in forward.weights[1:]:
        layout = layout.moved(node)
    require_rows(layout, rows, columns, forward.result)


def _check_types(forward: Forward) -> None:
    scores = forward.scores
    operands = [scores.query, scores.key, forward.value]
    dtypes = {type_of(operand).dtype for operand in (*operands, forward.result)}
    require(len(dtypes) == 1, NoMatch, "queries, keys and values are of different dtypes")
    (dtype,) = dtypes
    require(dtype in _DTYPES, NoMatch, f"no fused kernel for {dtype}")
    inside = type_of(forward.softmax).dtype
    require(inside in _DTYPES, NoMatch, f"the softmax is of {inside}")
    sizes = [n for operand in operands for n in type_of(operand).shape]
    require(all(sizes), NoMatch, "one of the sizes is 0")
    wide, deep = _shape(scores.query)[-1], _shape(forward.value)[-1]
    require(wide == deep, NoMatch, f"queries have {wide} features and values {deep}")
    n, heads = forward.sizes[0], forward.heads
    require(n == heads[0] * heads[1], NoMatch, "masks and softmax differ in their heads")


def _check_regions(forward: Forward) -> None:
    nodes = (*forward.scores.inside, forward.scores.product, *forward.weights, forward.result)
    for node in nodes:
        known = info(node)
        free = known.region is None and known.checkpoint is None
        require(free, NoMatch, f"{node} is in a checkpointed region")
