"""Reductions in Triton text: fill the missing lanes, combine tiles, collapse a tile."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treadle.codegen.triton.expr import TYPES, TritonWriter, literal
from treadle.loop.expr import Reduce, ReduceKind, identity
from treadle.loop.nest import accumulators, is_position

_COMBINE = {
    ReduceKind.SUM: "{0} + {1}",
    ReduceKind.PROD: "{0} * {1}",
    ReduceKind.ANY: "{0} | {1}",
}
_ARG = {ReduceKind.ARGMAX: "_arg_max", ReduceKind.ARGMIN: "_arg_min"}
_NO_POSITION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tile:
    """The block a program works on: its shape as text, and how to collapse the reduced axis."""

    shape: str  # "[16, 64]" or "[1024]"
    along: str  # the reduced axis, "r" or "c"
    axis: int  # its place in the shape
    keep: bool  # both axes are blocks, so the result keeps a place for the reduced one


@dataclass(frozen=True, slots=True)
class Partial:
    """Variables of a reduction under way: the value, and the position for argmax and argmin."""

    parts: tuple[str, ...]


def _literals(reduce: Reduce) -> tuple[str, ...]:
    """What an accumulator holds before the first element."""
    dtype = accumulators(reduce)[0]
    first = literal(identity(reduce.kind, dtype).value, dtype)
    return (first, str(_NO_POSITION)) if is_position(reduce) else (first,)


def identities(reduce: Reduce) -> tuple[str, ...]:
    """What a missing lane holds."""
    value, *position = _literals(reduce)
    return (f"tl.full((), {value}, {TYPES[accumulators(reduce)[0]]})", *position)


def fill(writer: TritonWriter, reduce: Reduce, tile: Tile) -> Partial:
    """The body over the whole tile, with the identity in the lanes that do not exist."""
    value = writer.evaluate(reduce.body)
    texts = [value.text]
    accumulator = accumulators(reduce)[0]
    if reduce.body.dtype is not accumulator:
        texts[0] = writer.name(f"{value.text}.to({TYPES[accumulator]})")
    if is_position(reduce):
        texts.append(tile.along)
    mask = writer.masks.get(tile.along)
    filled: list[str] = []
    for text, missing in zip(texts, identities(reduce), strict=True):
        if mask:
            text = writer.name(f"tl.where({mask}, {text}, {missing})")
        filled.append(writer.name(f"tl.broadcast_to({text}, {tile.shape})"))
    if len(filled) == 2:
        filled[1] = writer.name(f"{filled[1]}.to(tl.int32)")
    return Partial(tuple(filled))


def start(writer: TritonWriter, reduce: Reduce, tile: Tile) -> Partial:
    """Fresh accumulators, one lane per lane of the tile."""
    names: list[str] = []
    for value, dtype in zip(_literals(reduce), accumulators(reduce), strict=True):
        names.append(f"a{writer.count}")
        writer.count += 1
        writer.line(f"{names[-1]} = tl.full({tile.shape}, {value}, {TYPES[dtype]})")
    return Partial(tuple(names))


def combine(writer: TritonWriter, reduce: Reduce, into: Partial, new: Partial) -> None:
    """``into <- into (+) new``, lane by lane."""
    if reduce.kind in _ARG:
        call = f"{_ARG[reduce.kind]}({', '.join((*into.parts, *new.parts))})"
        writer.line(f"{', '.join(into.parts)} = {call}")
    elif reduce.kind in _COMBINE:
        text = _COMBINE[reduce.kind].format(into.parts[0], new.parts[0])
        writer.line(f"{into.parts[0]} = {text}")
    else:
        writer.line(f"{into.parts[0]} = {_extreme(reduce)}({into.parts[0]}, {new.parts[0]})")


def rescale(
    writer: TritonWriter,
    top: Reduce,
    into: Partial,
    new: Sequence[Partial],
    sums: Sequence[Partial],
) -> None:
    """Bring ``into`` up to the maximum that the ``new`` make, and sums of exp(x - into) with it,
    and add what is new."""
    old, xs = into.parts[0], [partial.parts[0] for partial in new]
    largest = xs[0]
    for x in (*xs[1:], old):
        largest = writer.name(f"_top({largest}, {x})")
    dtype = accumulators(top)[0]
    nothing = f'{largest} == float("-inf")'  # so far: that is not a sum, and not yet NaN
    base = writer.name(f"tl.where({nothing}, {literal(0.0, dtype)}, {largest})")
    for partial_sum in sums:
        total = partial_sum.parts[0]
        added = " + ".join(_power(f"{x} - {base}", dtype) for x in xs)
        factor = _power(f"{old} - {base}", dtype)
        writer.line(f"{total} = tl.fma({total}, {factor}, {added})")
    writer.line(f"{old} = {largest}")


def _power(exponent: str, dtype: torch.dtype) -> str:
    """exp of what is at most zero, of which the largest are: numbers too small for all their bits
    are nothing beside a sum of one."""
    return f"{'_power' if dtype is torch.float32 else 'tl.exp'}({exponent})"


def scaled(writer: TritonWriter, total: Partial, lanes: Partial, top: Partial) -> Partial:
    """A sum of exp(x - lanes), as one of exp(x - top)."""
    factor = f"tl.exp({lanes.parts[0]} - {top.parts[0]})"
    return Partial((writer.name(f"{total.parts[0]} * {factor}"),))


def collapse(writer: TritonWriter, reduce: Reduce, partial: Partial, tile: Tile) -> Partial:
    """The tile's one value along its reduced axis."""
    keep = ", keep_dims=True" if tile.keep else ""
    if reduce.kind in _ARG:
        pair = f"({', '.join(partial.parts)})"
        names = (f"a{writer.count}", f"a{writer.count + 1}")
        writer.count += 2
        call = f"tl.reduce({pair}, {tile.axis}, {_ARG[reduce.kind]}{keep})"
        writer.line(f"{', '.join(names)} = {call}")
        return Partial(names)
    value = partial.parts[0]
    match reduce.kind:
        case ReduceKind.SUM:
            text = f"tl.sum({value}, axis={tile.axis}{keep})"
        case ReduceKind.PROD:
            text = f"tl.reduce({value}, {tile.axis}, _mul{keep})"
        case ReduceKind.ANY:
            text = f"tl.max({value}, axis={tile.axis}{keep})"
        case _:
            text = f"tl.reduce({value}, {tile.axis}, {_extreme(reduce)}{keep})"
    return Partial((writer.name(text),))


def finish(writer: TritonWriter, reduce: Reduce, partial: Partial) -> str:
    """The reduction's value, in its own dtype."""
    value = partial.parts[-1]
    if reduce.dtype is torch.bool:
        return writer.name(f"{value} != 0")
    if accumulators(reduce)[-1] is not reduce.dtype:
        return writer.name(f"{value}.to({TYPES[reduce.dtype]})")
    return value


def _extreme(reduce: Reduce) -> str:
    """The pairwise function of a max or min; for floats NaN wins. One instruction where that of two
    values has four: which of 0.0 and -0.0 a reduction finds is not specified.
    """
    return "_top" if reduce.kind is ReduceKind.MAX else "_bottom"
