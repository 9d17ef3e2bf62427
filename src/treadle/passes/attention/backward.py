"""The gradient of a matched attention, with a check of each node."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.graph.analysis.dataflow import readers_of
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.passes.attention.forward import SCALES, Forward, factor_of, is_derivative
from treadle.passes.attention.moves import (
    ElementOrder,
    are_transposed,
    is_cast,
    is_move,
    operand_of,
    require_rows,
)
from treadle.passes.attention.rows import ScoreMask, number
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_FILLS = frozenset({aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor})


@final
@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of one attention; gradients that nobody wants are ``None``.

    ::

        d_value = weights^T @ d_result
        d_weights = d_result @ value^T
        d_scores = scale * softmax'(d_weights)
        d_query = d_scores @ key^T          key as it is multiplied, [N, D, S]
        d_key = query^T @ d_scores          [N, D, S]

    ``filled``: every mask puts 0 into the gradient where it filled in scores.
    """

    d_result: fx.Node
    d_value: fx.Node | None
    d_weights: fx.Node | None
    d_query: fx.Node | None
    d_key: fx.Node | None
    filled: bool


@final
@dataclass(frozen=True, slots=True)
class _Into:
    """The gradient of the scores."""

    d_weights: fx.Node
    d_result: fx.Node
    d_query: fx.Node | None
    d_key: fx.Node | None
    filled: bool


def backward_of(forward: Forward) -> Backward | None:
    """The gradient of ``forward``; ``None`` if there is none, ``NoMatch`` if it is another one."""
    d_value = _of_value(forward)
    into = _of_scores(forward)
    _check_readers(forward)
    if d_value is None and into is None:
        return None
    results = {node for node in (_second(d_value), into and into.d_result) if node is not None}
    require(len(results) == 1, NoMatch, "its gradients are of different results")
    (d_result,) = results
    backward = Backward(
        d_result,
        d_value,
        into and into.d_weights,
        into and into.d_query,
        into and into.d_key,
        filled=into is None or into.filled,
    )
    _check_regions(backward)
    return backward


def _second(product: fx.Node | None) -> fx.Node | None:
    return None if product is None else arguments(product)["mat2"]


def _of_value(forward: Forward) -> fx.Node | None:
    """``weights^T @ d_result``: what else multiplies the weights."""
    weights = forward.weights[-1]
    nodes: list[fx.Node] = []
    for reader in _products(weights):
        if reader is forward.result:
            continue
        left = reader.args[0]
        require(are_transposed(left, weights), NoMatch, f"{reader} multiplies the probabilities")
        nodes.append(reader)
    require(len(nodes) <= 1, NoMatch, "the values have two gradients")
    return nodes[0] if nodes else None


def _products(value: fx.Node) -> list[fx.Node]:
    """Products that ``value`` is an operand of, by itself or as a view."""
    return [reader for reader in readers_of(value, is_move) if reader.target is aten.bmm.default]


def _of_scores(forward: Forward) -> _Into | None:
    derivatives = [user for user in forward.softmax.users if is_derivative(user)]
    require(len(derivatives) <= 1, NoMatch, "the softmax has two gradients")
    if not derivatives:
        return None
    (derivative,) = derivatives
    args = arguments(derivative)
    kind = type_of(derivative)
    same = args["output"] is forward.softmax and args["dim"] in (-1, kind.ndim - 1)
    require(same, NoMatch, f"{derivative} is not the gradient of {forward.softmax}")
    d_weights, d_result = _incoming(forward, derivative)
    filled: set[ScoreMask] = set()
    d_scores = _outgoing(forward, derivative, filled)
    d_query, d_key = _operand_gradients(forward, d_scores)
    return _Into(d_weights, d_result, d_query, d_key, filled == set(forward.scores.masks))


def _incoming(forward: Forward, derivative: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The product that gives the gradient of the weights, and the gradient of the result in it."""
    chain: list[fx.Node] = []
    at = arguments(derivative)["grad_output"]
    while is_move(at) or is_cast(at):
        chain.append(at)
        at = operand_of(at)
    product = isinstance(at, fx.Node) and at.target is aten.bmm.default
    require(product, NoMatch, f"the gradient of the probabilities is {at}, not a product")
    args = arguments(at)
    values = are_transposed(args["mat2"], forward.value)
    require(values, NoMatch, f"{at} is not a product with the values")
    layout = ElementOrder.plain(type_of(at).shape)
    for node in (at, *chain):
        lone = len(node.users) == 1
        require(lone, NoMatch, f"the gradient of the probabilities {node} is used by others")
    for node in reversed(chain):
        layout = layout.moved(node)
    _, rows, columns, _ = forward.sizes
    require_rows(layout, rows, columns, derivative)
    return at, args["self"]


def _outgoing(forward: Forward, derivative: fx.Node, filled: set[ScoreMask]) -> fx.Node:
    """From the softmax's gradient to what is multiplied with keys and queries; ``filled`` gets the
    masks that are on the way."""
    _, rows, columns, _ = forward.sizes
    layout, scale = ElementOrder.plain(type_of(derivative).shape), 1.0
    at = derivative
    while not _is_multiplied(at):
        readers = list(at.users)
        words = ", ".join("the caller" if user.op == "output" else str(user) for user in readers)
        require(len(readers) == 1, NoMatch, _also_used(forward, words))
        (reader,) = readers
        if is_move(reader):
            layout = layout.moved(reader)
        elif not is_cast(reader):
            require_rows(layout, rows, columns, reader)
            masks = [mask for mask in forward.scores.masks if _is_mask(reader, at, mask)]
            filled.update(masks)
            scale *= 1.0 if masks else _factor(forward, reader, at)
        at = reader
    require_rows(layout, rows, columns, at)
    same = math.isclose(scale, forward.scores.scale, rel_tol=1e-9)
    words = f"scores are scaled by {forward.scores.scale}, their gradient by {scale}"
    require(same, NoMatch, words)
    return at


def _is_multiplied(node: fx.Node) -> bool:
    return bool(node.users) and all(user.target is aten.bmm.default for user in node.users)


def _also_used(forward: Forward, names: str) -> str:
    """Why the call is left alone, where more than keys and queries get the gradient of the scores:
    a bias that is learned is the sum of it over what it was added to."""
    words = f"the gradient of the scores is used by {names}"
    if not any(mask.add for mask in forward.scores.masks):
        return words
    return f"{words}: a bias is learned, and the kernel computes no gradient for it"


def _factor(forward: Forward, reader: fx.Node, at: fx.Node) -> float:
    """By how much ``reader`` scales the gradient ``at``."""
    name = "the caller" if reader.op == "output" else str(reader)
    miss = _also_used(forward, name)
    require(reader.target in SCALES, NoMatch, miss)
    value, factor = factor_of(reader)
    require(value is at, NoMatch, miss)
    return factor


def _is_mask(reader: fx.Node, at: fx.Node, mask: ScoreMask) -> bool:
    """Whether ``reader`` puts 0 where ``mask`` filled in scores of this shape: which leaves the
    gradient what it is, unless a row is masked whole."""
    if reader.target not in _FILLS or mask.add or type_of(reader).shape != mask.shape:
        return False
    args = arguments(reader)
    if reader.target is not aten.where.self:
        fills = not mask.keeps and args["mask"] is mask.node
        return fills and args["self"] is at and number(args["value"]) == 0.0
    value, other = ("self", "other") if mask.keeps else ("other", "self")
    return args["condition"] is mask.node and args[value] is at and number(args[other]) == 0.0


def _operand_gradients(
    forward: Forward, d_scores: fx.Node
) -> tuple[fx.Node | None, fx.Node | None]:
    """``d_scores @ key^T`` and ``query^T @ d_scores``: there is nothing else."""
    d_query = d_key = None
    scores = forward.scores
    for product in d_scores.users:
        left, right = product.args
        if d_query is None and left is d_scores and are_transposed(right, scores.key):
            d_query = product
        elif d_key is None and right is d_scores and are_transposed(left, scores.query):
            d_key = product
        else:
            raise NoMatch(f"the gradient of the scores is multiplied by others in {product}")
    return d_query, d_key


def _check_readers(forward: Forward) -> None:
    """The weights are read by the two products and the gradient, and by nobody else."""
    *before, weights = forward.weights
    for node, following in zip(before, forward.weights[1:], strict=True):
        others = [user for user in _readers(node, forward) if user is not following]
        require(not others, NoMatch, f"the probabilities are used by {others}")
    for user in _readers(weights, forward):
        known = user.target is aten.bmm.default or is_move(user)
        require(known, NoMatch, f"the probabilities are used by {user}")
    for user in filter(is_move, weights.users):
        readers = list(user.users)
        known = bool(readers) and all(reader.target is aten.bmm.default for reader in readers)
        require(known, NoMatch, f"the probabilities are used by {readers}")


def _readers(node: fx.Node, forward: Forward) -> list[fx.Node]:
    """Who reads ``node``, the gradient of the softmax aside."""
    softmax = node is forward.softmax
    return [user for user in node.users if not (softmax and is_derivative(user))]


def _check_regions(backward: Backward) -> None:
    regions = (backward.d_value, backward.d_weights, backward.d_query, backward.d_key)
    for node in regions:
        free = node is None or (info(node).region is None and info(node).checkpoint is None)
        require(free, NoMatch, f"{node} is in a checkpointed region")
