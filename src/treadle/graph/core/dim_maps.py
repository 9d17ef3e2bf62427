"""What an operator does to dims, declared once: which dims of a result are which of an operand.

::

    permute(x, [1, 0])      x: [a] [b]             ->  [b] [a]      moves
    view(x, [24, 8])        x: [a 2] [b 12] [c 8]  ->  [a b] [c]    joins; the other way: splits
    expand(x, [4, 3])       x: [] [a]              ->  [n] [a]      broadcasts
    add(x, y)               x: [a] [b]   y: [b]    ->  [a] [b]      keeps
    sum(x, [1])             x: [a] [b]             ->  [a]          reduces
    _softmax(x, 1)          x: [a] [b]             ->  [a] [c]      each c is made of all b
    slice(x, 1, 2, 5)       x: [a] [b]             ->  [a] [c]
    mm(x, y)                x: [a] [k]  y: [k] [b] ->  [a] [b]      contracts

The letters are *factors*. A dim is a list of factors, the slowest first; a dim of size 1 has none.
A factor that an operand shares with the result is needed index by index: element ``i`` of the
factor uses elements ``i`` of the operands that have it, so the call on some of its indices gives
those indices of the result. A factor of only an operand is needed whole.

``tests/graph/test_dim_maps.py`` compares every declaration with the operator.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias, final

import torch
from torch import fx

from treadle.algebra.extents import divides, is_zero, same, same_sizes, sample_of
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import is_tensor, tensors_in, type_of, type_of_tensor
from treadle.util.errors import require
from treadle.util.nested import leaves
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

Factors: TypeAlias = tuple[int, ...]
"""Numbers of factors, the slowest first."""
Dims: TypeAlias = tuple[Factors, ...]
"""The factors of each dim."""
Shape: TypeAlias = tuple[int, ...]

# Operators by what they do to dims.

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
"""The same elements in the same order, in a shape that is given."""
SQUEEZES = (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
"""Dims of size 1 come or go."""
SWAPS = (aten.t.default, aten.transpose.int, aten.permute.default)
"""The same dims in another order."""
EXPANDS = (aten.expand.default,)
"""Dims of size 1 repeat their element; more stand before them."""
COPIES = (
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default,
)  # fmt: skip
"""Every element where it was."""
_VIEWS = frozenset((*RESHAPES, *SWAPS))
MOVES = frozenset((*RESHAPES, *SQUEEZES, *SWAPS, *EXPANDS, *COPIES))
"""Operators whose result has the elements of one operand, elsewhere, and nothing else."""
CONVERSIONS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
"""Each element as another dtype, or on another device."""
CASTS = (*CONVERSIONS, aten.view.dtype)
"""These, and the bytes of each element as one of another dtype."""
SPLITS = (
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default, aten.chunk.default, aten.unsafe_chunk.default,
)  # fmt: skip
"""Operators that cut a value along one dim into pieces that cover it."""
JOINS = (aten.cat.default, aten.stack.default)
"""Operators that put values one behind the other along a dim: one of theirs, or a new one."""
REDUCTIONS = (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.logsumexp.default, aten.any.dim, aten.all.dim, aten.var.correction, aten.std.correction,
    aten.linalg_vector_norm.default, aten.prod.dim_int, aten.argmax.default, aten.argmin.default,
    aten.max.dim, aten.min.dim,
)  # fmt: skip
"""One element, or one of several results, is made of all that dims have."""
ALONG_DIM = (
    aten._log_softmax.default, aten._softmax.default, aten._log_softmax_backward_data.default,
    aten._softmax_backward_data.default, aten.cumsum.default, aten.gather.default, aten.scatter.src,
    aten.scatter.value, aten.scatter_add.default, aten.topk.default,
)  # fmt: skip
"""Each element is made of all that one dim has, at the same place of all others."""
PARTS = (aten.slice.Tensor, aten.select.int, aten.unbind.int)
"""Elements of a part of one dim."""
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
"""Products of matrices, and what is added to them."""


@final
class FactorTable:
    """Factors by number: their sizes, and the two parts of each factor that was divided. The parts
    stand for the factor from then on, everywhere."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def dims_of(self, shape: Sequence[int]) -> Dims:
        """New factors, one for each dim."""
        return tuple(self._new(size) for size in shape)

    def factors(self, dims: Iterable[Factors]) -> Factors:
        """Those of all the dims, one behind the other."""
        return tuple(known for dim in dims for factor in dim for known in self._known(factor))

    def sizes(self, factors: Iterable[int]) -> list[int]:
        """How many indices each has."""
        return [self._sizes[factor] for factor in factors]

    def shape(self, dims: Dims) -> Shape:
        """How many indices the factors of each dim have together."""
        return tuple(prod(self.sizes(dim)) for dim in dims)

    def grouped(self, node: fx.Node, dims: Iterable[Factors], shape: Sequence[int]) -> Dims:
        """The factors of all ``dims`` in their order, as dims of other sizes."""
        left = list(self.factors(dims))
        groups = tuple(self.taken(node, left, size) for size in shape)
        require(not left, NoMatch, f"{node} has another size than what it shows")
        return groups

    def taken(self, node: fx.Node, factors: list[int], size: int) -> Factors:
        """The first of ``factors``, which go: those that have ``size`` indices together."""
        used: list[int] = []
        while not same(size, 1):
            require(bool(factors), NoMatch, f"{node} has another size than what it shows")
            first = factors.pop(0)
            has = self._sizes[first]
            if same(has, size):
                return (*used, first)
            require(not is_zero(has) and not is_zero(size), NoMatch, _mixes(node))
            if not divides(has, size):
                require(divides(size, has), NoMatch, _mixes(node))
                first, rest = self._divide(first, size)
                factors.insert(0, rest)
                return (*used, first)
            used.append(first)
            size //= has
        return tuple(used)

    def through(self, node: fx.Node, dims: Dims) -> Dims:
        """The dims of ``node``, whose one operand has ``dims``; ``NoMatch`` where it does more than
        to put elements elsewhere, or to give them another dtype."""
        moves = node.target in MOVES or node.target in CASTS
        require(moves, NoMatch, f"{node} is not a move of elements")
        known = dim_map(node)
        place: dict[int, Factors] = {}
        for dim, factors in zip(dims, known.operands[0][1], strict=True):
            parts = self.grouped(node, [dim], known.table.sizes(factors))
            place |= zip(factors, parts, strict=True)
        after = {factor for dim in known.result for factor in dim}
        require(place.keys() <= after, NoMatch, _mixes(node))
        new = sorted(after - place.keys())
        place |= zip(new, self.dims_of(known.table.sizes(new)), strict=True)
        return tuple(tuple([f for factor in dim for f in place[factor]]) for dim in known.result)

    def refined(self, dims: Dims) -> Dims:
        """The same dims, by factors of which none is divided."""
        return tuple(self.factors([dim]) for dim in dims)

    def _new(self, size: int) -> Factors:
        if same(size, 1):
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def _known(self, factor: int) -> Factors:
        if factor not in self._parts:
            return (factor,)
        return tuple(known for part in self._parts[factor] for known in self._known(part))

    def _divide(self, factor: int, size: int) -> tuple[int, int]:
        (slow,), (fast,) = self._new(size), self._new(self._sizes[factor] // size)
        self._parts[factor] = slow, fast
        return slow, fast


def _mixes(node: fx.Node) -> str:
    return f"{node} puts parts of several dims together"


@final
@dataclass(frozen=True, slots=True, eq=False)
class DimMap:
    """The dims of operands, by what the argument is called, and of results."""

    table: FactorTable
    operands: tuple[tuple[str, Dims], ...]
    results: tuple[Dims, ...]

    @property
    def result(self) -> Dims:
        """The dims of the only result."""
        (dims,) = self.results
        return dims

    def keeps(self, count: int) -> bool:
        """Whether the first dims of the first operand are those of every result."""
        leading = self.operands[0][1][:count]
        return all(dims[:count] == leading for dims in self.results)


@final
@dataclass(frozen=True, slots=True)
class _Call:
    node: fx.Node
    args: dict[str, Any]
    operands: list[Shape]
    results: list[Shape]
    table: FactorTable = field(default_factory=FactorTable)


_Declared: TypeAlias = tuple[list[Dims], list[Dims]]
_Declaration: TypeAlias = Callable[[_Call], _Declared]
"""The dims of operands and results of a call, as factors of its table."""


def dim_map(node: fx.Node) -> DimMap:
    """What ``node`` does to dims; ``NoMatch`` if its operator does not say."""
    declaration = _declaration(node.target)
    require(declaration is not None, NoMatch, f"what {node} does to dims is not known")
    assert declaration is not None
    args = arguments(node)
    tensors = [(name, leaf) for name in args for leaf in leaves(args[name]) if is_tensor(leaf)]
    results = [type_of_tensor(tensor).shape for tensor in tensors_in(value_of(node))]
    call = _Call(node, args, [type_of(leaf).shape for _, leaf in tensors], results)
    table, (before, after) = call.table, declaration(call)
    operands = [(name, table.refined(d)) for (name, _), d in zip(tensors, before, strict=True)]
    return DimMap(table, tuple(operands), tuple(map(table.refined, after)))


def with_columns(node: fx.Node) -> list[fx.Node]:
    """``node`` and the values that it is a view of, down to the first that is not a view.
    ``NoMatch`` if a view has another last dim than its operand."""
    chain = [node]
    while chain[-1].target in _VIEWS:
        view, (above,) = chain[-1], chain[-1].all_input_nodes
        kept = view.target in RESHAPES and type_of(view).ndim > 0
        kept = kept and same(type_of(view).shape[-1], type_of(above).shape[-1])
        require(kept, NoMatch, f"{view} moves the columns of {above}")
        chain.append(above)
    return chain


def permutation(node: fx.Node) -> list[int]:
    """For each dim of ``node``, one of ``SWAPS``, which of its operand it is."""
    args, count = arguments(node), type_of(node).ndim
    order = list(range(count))
    match node.target:
        case aten.permute.default:
            return [dim % count for dim in args["dims"]]
        case aten.transpose.int if count:
            one, other = args["dim0"] % count, args["dim1"] % count
            order[one], order[other] = other, one
            return order
        case _:
            return order[::-1]


def _declaration(target: object) -> _Declaration | None:
    declaration = _DECLARED.get(target)
    if declaration is None and isinstance(target, OpOverload) and facts_of(target).elementwise:
        return _by_element
    return declaration


def _by_element(call: _Call) -> _Declared:
    """``out[i, j] = f(x[i, j], y[j], z[i, 0])``"""
    node, shape = call.node, call.results[0]
    alike = all(same_sizes(shape, result_shape) for result_shape in call.results)
    require(alike, NoMatch, f"{node} has results of several shapes")
    result = call.table.dims_of(shape)
    operands = [_broadcast(node, operand, shape, result) for operand in call.operands]
    return operands, [result] * len(call.results)


def _broadcast(node: fx.Node, operand: Shape, shape: Shape, dims: Dims) -> Dims:
    """The dims of ``operand``, which has elements for those of ``shape``."""
    require(len(operand) <= len(shape), NoMatch, f"{node} has fewer dims than its operand")
    factors: list[Factors] = []
    for size, wide, dim in zip(reversed(operand), reversed(shape), reversed(dims), strict=False):
        alone = same(size, 1)
        fits = alone or same(size, wide)
        require(fits, NoMatch, f"{node} has other sizes than its operand")
        factors.insert(0, () if alone else dim)
    return tuple(factors)


def _in_order(call: _Call) -> _Declared:
    """``out[unflatten(i)] = x[unflatten(i)]``. Dims between which none is cut are one part; its
    factors are not known if one is cut off where no other ends: ``[4, 6] -> [6, 4]``."""
    table, (old,), (new,) = call.table, call.operands, call.results
    before, after = list[Factors]([()] * len(old)), list[Factors]([()] * len(new))
    for left, right in _parts(old, new):
        sizes, wanted = [old[dim] for dim in left], [new[dim] for dim in right]
        dims = table.dims_of(sizes)
        parts = attempt(_cut_alike, call, dims, wanted)
        if isinstance(parts, NoMatch):
            dims, parts = table.dims_of(sizes), table.dims_of(wanted)
        for known, places, factors in ((before, left, dims), (after, right, parts)):
            for place, dim in zip(places, factors, strict=True):
                known[place] = dim
    return [tuple(before)], [tuple(after)]


def _cut_alike(call: _Call, dims: Dims, wanted: Sequence[int]) -> Dims:
    """The factors of ``dims`` as dims of the ``wanted`` sizes; ``NoMatch`` if one is cut apart."""
    sizes = call.table.shape(dims)
    if same_sizes(sizes, wanted):
        return dims
    require(not is_zero(prod(sizes)), NoMatch, f"{call.node} has no elements")
    return call.table.grouped(call.node, dims, wanted)


def _parts(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Neighbouring dims of ``old`` and of ``new`` that have the same elements, as few as can be;
    dims of size 1 aside."""
    before = [dim for dim, size in enumerate(old) if not same(size, 1)]
    after = [dim for dim, size in enumerate(new) if not same(size, 1)]
    left, right = list[int](), list[int]()
    while before or after:
        one, other = (
            prod(sample_of(of[d]) for d in part) for of, part in ((old, left), (new, right))
        )
        if before and (not left or not after or (right and one <= other)):
            left.append(before.pop(0))
        else:
            right.append(after.pop(0))
        if left and right and same(prod(old[d] for d in left), prod(new[d] for d in right)):
            yield left, right
            left, right = [], []
    if left or right:
        yield left, right


def _permuted(call: _Call) -> _Declared:
    dims = call.table.dims_of(call.operands[0])
    return [dims], [tuple(dims[dim] for dim in permutation(call.node))]


def _across(call: _Call) -> _Declared:
    """All but the dims that are named, or all dims if none is, are the same in operands and
    results; results may lack the named ones."""
    first = call.operands[0]
    named = call.args["dim"]
    listed = named if isinstance(named, Sequence) else [] if named is None else [named]
    across = {dim % len(first) for dim in listed or range(len(first))} if first else set[int]()
    dims_of = call.table.dims_of
    dims, kept = dims_of(first), [index for index in range(len(first)) if index not in across]

    def seen(shape: Shape) -> Dims:
        places, own = range(len(first)) if len(shape) == len(first) else kept, dims_of(shape)
        if len(places) != len(shape):
            return own
        pairs = zip(places, shape, own, strict=True)
        return tuple([dims[p] if p in kept and same(first[p], n) else new for p, n, new in pairs])

    return [dims, *map(seen, call.operands[1:])], [*map(seen, call.results)]


def _stacked(call: _Call) -> _Declared:
    """``out[i, k, j] = xs[k][i, j]``"""
    (shape,) = call.results
    at = call.args["dim"] % len(shape)
    dims = list(call.table.dims_of(shape))
    inner = tuple(dims[:at] + dims[at + 1 :])
    return [inner] * len(call.operands), [tuple(dims)]


def _product(call: _Call) -> _Declared:
    """``out[b, i, j] = sum{k} x[b, i, k] * y[b, k, j]``, and what is added to it."""
    *added, left, _ = call.operands
    (shape,) = call.results
    result = call.table.dims_of(shape)
    *batch, row, column = result
    (summed,) = call.table.dims_of(left[-1:])
    factors = [(*batch, row, summed), (*batch, summed, column)]
    return [_broadcast(call.node, operand, shape, result) for operand in added] + factors, [result]


def _scaled_product(call: _Call) -> _Declared:
    """``_product`` with a number that scales each row, one for each column, or one for all."""
    left, right, of_rows, of_columns, *added = call.operands
    ((rows, columns),) = call.results
    for scale, whole in ((of_rows, (rows, 1)), (of_columns, (1, columns))):
        simple = same(prod(scale), 1) or same_sizes(scale, whole)
        require(simple, NoMatch, f"{call.node} scales blocks: {list(scale)} of {list(whole)}")
    added = [of_rows, of_columns, *added]
    (*others, x, y), result = _product(replace(call, operands=[*added, left, right]))
    return [x, y, *others], result


_DECLARED: Mapping[object, _Declaration] = {
    **dict.fromkeys((*RESHAPES, *SQUEEZES), _in_order),
    **dict.fromkeys(SWAPS, _permuted),
    **dict.fromkeys((*EXPANDS, *COPIES, *CASTS), _by_element),
    **dict.fromkeys((*REDUCTIONS, *ALONG_DIM, *PARTS, *SPLITS), _across),
    aten.slice_backward.default: _across,
    aten.cat.default: _across,
    aten.stack.default: _stacked,
    **dict.fromkeys(_PRODUCTS, _product),
    aten._scaled_mm.default: _scaled_product,
}
DECLARED = frozenset(_DECLARED)
"""Operators that say what they do to dims, besides those that work element by element."""
