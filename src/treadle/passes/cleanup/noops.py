"""Remove operations that return their operand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from treadle.algebra.extents import Size, same
from treadle.graph.analysis.pieces import joined_source, stacked_source
from treadle.graph.core.dim_maps import CASTS, COPIES, EXPANDS, JOINS, RESHAPES, SQUEEZES, SWAPS
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import TensorType
from treadle.graph.rewrite.passes import Contract
from treadle.graph.rewrite.rules import (
    Program,
    ReplacementBuilder,
    Rule,
    RulePass,
    any_of,
    anything,
    lowering,
    number,
    shared,
)
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten


def _equals(name: str, pattern: Program, check: Callable[..., None] | None = None) -> Rule:
    """Calls like ``pattern`` equal ``x``, where ``x`` is of their type."""
    return Rule(name, pattern, lambda x: x, check) if check else Rule(name, pattern, lambda x: x)


def _is_view(x: object) -> object:
    """Views and copies of the whole: an equal type says that nothing was left out or moved."""
    return any_of(
        *RESHAPES,
        *SQUEEZES,
        *SWAPS,
        *EXPANDS,
        *COPIES,
        *CASTS,
        aten.repeat.default,
        aten.slice.Tensor,
    )(x, ...)


def _viewed_before(build: ReplacementBuilder, x: object, size: Sequence[int]) -> object:
    """``view(view(x))`` of the shape of ``x`` is ``x``."""
    while isinstance(x, fx.Node) and x.target in RESHAPES:
        source: fx.Node = arguments(x)["self"]
        shape = build.type_of(source).shape
        pairs = zip(size, shape, strict=False)
        if len(size) == len(shape) and all(same(n, -1) or same(n, e) for n, e in pairs):
            return source
        x = source
    raise NoMatch(f"{x} has another shape")


def _pieces_of(build: ReplacementBuilder, xs: Sequence[fx.Node], dim: int) -> fx.Node:
    """The only operand of a cat, or the value whose pieces all its operands are, in order."""
    if len(xs) == 1:
        return xs[0]
    return joined_source(xs, dim)


def _written_over(x: object) -> object:
    """A write to all of a value: only then the source has the size of the whole."""
    return any_of(aten.slice_scatter.default, aten.copy.default)(anything, x, ...)


def _pads_nothing(x: object, pad: Sequence[int]) -> None:
    require(not any(pad), NoMatch, f"pads by {list(pad)}")


def _rounds_whole(x: TensorType) -> None:
    require(_is_whole(x), NoMatch, f"rounds {x.dtype}")


def _is(value: object, number: int) -> bool:
    """Whether it is this number for all sizes."""
    return not isinstance(value, Size) and value == number


def _is_first(x: TensorType, exponent: object) -> None:
    require(_is(exponent, 1), NoMatch, f"power of {exponent}")
    _require_real(x)


def _is_one(x: object, one: complex) -> None:
    require(_is(one, 1), NoMatch, f"{one} is not 1")
    _require_real(_tensor(x))


def _takes_zero(x: object, zero: complex, alpha: object) -> None:
    """``x - 0.0`` is ``x``; ``x - (-0.0)`` turns ``-0.0`` into ``0.0``."""
    require(_is(alpha, 1), NoMatch, f"alpha is {alpha}")
    require(_is(zero, 0), NoMatch, f"{zero} is not 0")
    exact = _is_whole(_tensor(x)) or not _is_negative(zero)
    require(exact, NoMatch, "-0.0 - (-0.0) is 0.0")


def _adds_zero(x: object, zero: complex, alpha: object) -> None:
    """``x + (-0.0)`` is ``x``; ``x + 0.0`` turns ``-0.0`` into ``0.0``."""
    require(_is(alpha, 1), NoMatch, f"alpha is {alpha}")
    require(_is(zero, 0), NoMatch, f"{zero} is not 0")
    require(_is_whole(_tensor(x)) or _is_negative(zero), NoMatch, "-0.0 + 0.0 is 0.0")


_ADD = any_of(aten.add.Tensor, aten.add.Scalar)
_SUB = any_of(aten.sub.Tensor, aten.sub.Scalar)
_MUL = any_of(aten.mul.Tensor, aten.mul.Scalar)
_DIV = any_of(aten.div.Tensor, aten.div.Scalar)
_ROUND = any_of(aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default)

NO_OPS = (
    _equals("view-of-all", _is_view),
    _equals("written-over", _written_over),
    _equals("no-padding", lambda x, pad: aten.constant_pad_nd.default(x, pad, ...), _pads_nothing),
    Rule("cat-of-slices", lambda xs, dim: aten.cat.default(xs, dim), lowering(_pieces_of)),
    Rule(
        "stack-of-selects",
        lambda xs, dim: aten.stack.default(xs, dim),
        lowering(lambda build, xs, dim: stacked_source(xs, dim)),
    ),
    _equals("turned-twice", lambda x: aten.t.default(shared(aten.t.default(x)))),
    Rule("viewed-before", lambda x, size: any_of(*RESHAPES)(x, size), lowering(_viewed_before)),
    _equals("rounded-whole", lambda x: _ROUND(x), _rounds_whole),
    _equals("first-power", lambda x, exponent: aten.pow.Tensor_Scalar(x, exponent), _is_first),
    _equals("times-one", lambda x, one: _MUL(x, number(one)), _is_one),
    _equals("one-times", lambda x, one: _MUL(number(one), x), _is_one),
    _equals("over-one", lambda x, one: _DIV(x, number(one)), _is_one),
    _equals("minus-zero", lambda x, zero, alpha: _SUB(x, number(zero), alpha=alpha), _takes_zero),
    _equals("plus-zero", lambda x, zero, alpha: _ADD(x, number(zero), alpha=alpha), _adds_zero),
    _equals("zero-plus", lambda x, zero, alpha: _ADD(number(zero), x, alpha=alpha), _adds_zero),
)
"""Calls that return an operand, each with its conditions besides an equal type."""


def _tensor(x: object) -> TensorType:
    if not isinstance(x, TensorType):
        raise NoMatch(f"{x} is a number")
    return x


def _require_real(x: TensorType) -> None:
    """Complex infinities do not survive a product with ``1 + 0j``."""
    require(not x.dtype.is_complex, NoMatch, f"{x} is complex")


def _is_whole(x: TensorType) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex


def _is_negative(zero: complex) -> bool:
    return isinstance(zero, float) and math.copysign(1.0, zero) < 0


@dataclass(frozen=True)
class RemoveNoOps(RulePass):
    """Replace a value that equals one of its operands, bit for bit, by that operand.

    before:  a = view(x, [4, 8]); b = mul(a, 1); c = relu(b)      x: f32[4, 8]
    after:   c = relu(x)

    Size, stride, dtype and device must agree. No output becomes an input, and no two outputs,
    nor an output and an input, share bytes afterwards that did not share them before: where only
    one of two may go, it is the first.
    """

    contract = Contract()

    rules = NO_OPS

    def may_go_on(self, step: StepGraph) -> bool:
        return any(node.target in JOINS for node in step.graph.nodes)
