"""Reads elements of values that are made and of those that move: numbers, views, joins, lookups.

::

    arange(n)[i] = i      x.t()[i, j] = x[j, i]      x[f(i)] of places f(i) that are proved
"""

import torch
from torch import fx

from treadle.algebra.extents import Size, same, surely_less
from treadle.graph.index_formulas import (
    Condition,
    Linear,
    Term,
    all_of,
    at_most,
)
from treadle.graph.index_rules import (
    At,
    ElementReader,
    Given,
    Rules,
    chosen_by,
    constant,
    dim_of,
    either,
    input_of,
    operand,
    shape_of,
)
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import type_of
from treadle.util.errors import require

aten = torch.ops.aten

RULES = Rules()
"""Of operations that make values or move their elements."""


# Values that are made.


@RULES.reads(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``start + step * i``"""
    start, step = given.get("start", 0), given.get("step", 1)
    whole = isinstance(start, int) and isinstance(step, int) and not isinstance(step, Size)
    require(whole, NoMatch, f"{node} counts from {start} in steps of {step}")
    return Linear.of(start).plus(at[0], step)


@RULES.reads(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return constant(given["fill_value"])


@RULES.reads(aten.scalar_tensor.default)
def _scalar(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return constant(given["s"])


@RULES.reads(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return Linear(1)


@RULES.reads(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return Linear(0)


# Elements that move.


@RULES.reads(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
def _same(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i]``, in another dtype or layout perhaps."""
    return operand(reader, given.get("self", given.get("a")), at)


@RULES.reads(aten.expand.default)
def _expand(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i]`` for the last dims; the reader knows that a dim of size 1 has one place."""
    return operand(reader, given["self"], at)


@RULES.reads(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _reshaped(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """Dims of size 1 come and go; all others stay, in their order."""
    x = input_of(given)
    before, after = shape_of(x), shape_of(node)
    moving = [(n, i) for n, i in zip(after, at, strict=True) if not same(n, 1)]
    kept = [n for n in before if not same(n, 1)]
    fits = len(kept) == len(moving) and all(map(same, kept, [n for n, _ in moving]))
    require(fits, NoMatch, f"{node} makes {list(after)} of {list(before)}")
    indices = iter(i for _, i in moving)
    return reader.at(x, [Linear(0) if same(n, 1) else next(indices) for n in before])


@RULES.reads(aten.permute.default)
def _permuted(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    place = {dim_of(dim, len(at)): i for dim, i in zip(given["dims"], at, strict=True)}
    return reader.at(input_of(given), [place[dim] for dim in range(len(at))])


@RULES.reads(aten.transpose.int)
def _transposed(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    place = list(at)
    one, two = dim_of(given["dim0"], len(at)), dim_of(given["dim1"], len(at))
    place[one], place[two] = place[two], place[one]
    return reader.at(input_of(given), place)


@RULES.reads(aten.t.default)
def _t(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return reader.at(input_of(given), at[::-1])


@RULES.reads(aten.slice.Tensor)
def _slice(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[start + step * i]``"""
    x = input_of(given)
    dim = dim_of(given["dim"], len(at))
    start, step = given["start"], given["step"]
    require(not isinstance(step, Size), NoMatch, f"{node} takes steps of {step}")
    first = _place(0 if start is None else start, shape_of(x)[dim], node)
    moved = Linear.of(first).plus(at[dim], step)
    return reader.at(x, [*at[:dim], moved, *at[dim + 1 :]])


@RULES.reads(aten.select.int)
def _select(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    x = input_of(given)
    dim = dim_of(given["dim"], len(at) + 1)
    chosen = Linear.of(_place(given["index"], shape_of(x)[dim], node))
    return reader.at(x, [*at[:dim], chosen, *at[dim:]])


def _place(start: int, size: int, node: fx.Node) -> int:
    """A start as a place that is counted from the first element."""
    negative = surely_less(start, 0)
    place = start + size if negative else start
    inside = surely_less(-1, place) and surely_less(place, size + 1)
    require(inside, NoMatch, f"{node} starts at {start} of {size}")
    return place


@RULES.reads(aten.flip.default)
def _flip(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    flipped = {dim_of(dim, len(at)) for dim in given["dims"]}
    shape = shape_of(node)
    place = [
        Linear.of(n).shifted(-1).plus(i, -1) if dim in flipped else i
        for dim, (n, i) in enumerate(zip(shape, at, strict=True))
    ]
    return reader.at(input_of(given), place)


@RULES.reads(aten.cat.default)
def _cat(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """The first part that the index is within."""
    parts: list[fx.Node] = list(given["tensors"])
    require(
        len({len(shape_of(each)) for each in parts}) == 1, NoMatch, f"{node} joins an empty part"
    )
    dim = dim_of(given["dim"], len(at))
    found: list[tuple[Condition, Term]] = []
    start = Linear(0)
    for part in parts:
        inner = at[dim].plus(start, -1)
        start = start.plus(Linear.of(shape_of(part)[dim]))
        inside = at_most(at[dim].shifted(1).plus(start, -1))
        found.append((inside, reader.at(part, [*at[:dim], inner, *at[dim + 1 :]])))
    result = found[-1][1]
    for inside, term in reversed(found[:-1]):
        result = either(inside, term, result)
    return result


@RULES.reads(aten.constant_pad_nd.default)
def _padded(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i - before]`` inside, the value of the padding outside."""
    x, pads = input_of(given), list(given["pad"])
    shape, place, inside = shape_of(x), list(at), list[Condition]()
    for position in range(0, len(pads), 2):
        dim = len(at) - 1 - position // 2
        place[dim] = at[dim].plus(Linear.of(pads[position]), -1)
        inside.append(at_most(Linear(0).plus(place[dim], -1)))
        inside.append(at_most(place[dim].shifted(1).plus(Linear.of(shape[dim]), -1)))
    return either(all_of(*inside), reader.at(x, place), constant(given["value"]))


@RULES.reads(aten.index.Tensor)
def _indexed(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[f(i), g(i), ...]`` for whole numbers ``f(i)``, all proved to be places of ``x``."""
    x, indices = input_of(given), list(given["indices"])
    require(None not in indices, NoMatch, f"{node} leaves out dims")
    shape = shape_of(x)
    rank = len(at) - (len(shape) - len(indices))
    place = [_chosen(reader, each, at[:rank]) for each in indices]
    for term, size in zip(place, shape, strict=False):
        inside = all_of(
            at_most(Linear(0).plus(term, -1)), at_most(term.shifted(1).plus(Linear.of(size), -1))
        )
        require(reader.prover.holds(inside), NoMatch, f"{node} may choose a place outside of {x}")
    return reader.at(x, [*place, *at[rank:]])


def _chosen(reader: ElementReader, index: fx.Node, at: At) -> Linear:
    require(type_of(index).dtype in (torch.int32, torch.int64), NoMatch, f"{index} is a mask")
    term = operand(reader, index, at)
    require(isinstance(term, Linear), NoMatch, f"the place that {index} chooses has cases")
    assert isinstance(term, Linear)
    return term


@RULES.reads(aten.tril.default)
def _tril(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i, j]`` where ``j <= i + diagonal``, 0 elsewhere."""
    *_, row, column = at
    inside = at_most(column.plus(row, -1).plus(Linear.of(given["diagonal"]), -1))
    return chosen_by(inside, reader.at(input_of(given), at), Linear(0), type_of(node).dtype)


@RULES.reads(aten.triu.default)
def _triu(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i, j]`` where ``j >= i + diagonal``, 0 elsewhere."""
    *_, row, column = at
    inside = at_most(row.plus(column, -1).plus(Linear.of(given["diagonal"])))
    return chosen_by(inside, reader.at(input_of(given), at), Linear(0), type_of(node).dtype)


__all__ = ["RULES"]
