"""Sizes that depend on the step's own values: operations that depend on them are called at run
time."""

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from treadle.compat.fake import is_of_values
from treadle.graph.analysis.data_dependent import DataDependentOp, fresh
from treadle.graph.core.node_info import info, known_value, set_value, value_of
from treadle.graph.core.types import tensors_in
from treadle.util.errors import CaptureError

Symbolic = SymInt | SymFloat | SymBool
_MOST_SYMBOLS = 4
"""Of an expression of which all corners are looked at."""
Bounds = dict[object, int]
"""By symbol, the number that stands for it."""


def wrap_unsized(graph: fx.Graph) -> None:
    """Every operation that gives or takes a value of unknown size becomes ``DataDependentOp``.

    A symbol is bounded by the most elements that an operand of its operation has: the rows that a
    mask picks, the distinct values of a tensor.
    """
    bounds: Bounds = {}
    unsized: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        value = known_value(node)
        takes = [input_ for input_ in node.all_input_nodes if input_ in unsized]
        if not takes and not _is_symbolic(value):
            continue
        _bound(bounds, value, node)
        known = _known(value, bounds)
        parts = value if isinstance(value, tuple | list) else (value,)
        flags = tuple(map(_is_symbolic, parts))
        if node.target is not operator.getitem:
            node.target = DataDependentOp(node.target, fresh(known), flags)
        set_value(node, known)
        if any(flags):
            unsized.add(node)


def refuse_unsized(graph: fx.Graph) -> None:
    """TR-150 where a size depends on values: steps with declared dims have symbols of their own."""
    for node in graph.nodes:
        if any(map(is_of_values, _symbols(known_value(node)))):
            raise unsized_error(info(node).where)


def unsized_error(
    where: str, why: str = "the step has a size that depends on values"
) -> CaptureError:
    """TR-150 for the user's line."""
    return CaptureError(
        why,
        code="TR-150",
        where=where,
        remedy=(
            "keep the shape: use torch.where(mask, x, 0) with a sum over mask.sum(), or "
            "cross_entropy(..., ignore_index=...), instead of selecting rows"
        ),
    )


def _is_symbolic(value: object) -> bool:
    return next(_sizes(value), None) is not None


def _sizes(value: object) -> Iterator[Symbolic]:
    """The numbers in a value that only a run can tell, or that a run has yet to confirm."""
    match value:
        case SymInt() | SymFloat() | SymBool():
            yield value
        case tuple() | list():
            for part in value:
                yield from _sizes(part)
        case Tensor() if value.layout is torch.strided:
            held = value.untyped_storage().nbytes()  # a row of such a value is in its memory
            yield from _sizes((*value.shape, *value.stride(), value.storage_offset(), held))
        case _:
            pass


def _symbols(value: object) -> list[object]:
    """Their symbols."""
    symbols = {symbol for size in _sizes(value) for symbol in size.node.expr.free_symbols}
    return sorted(symbols, key=str)


def _bound(bounds: Bounds, value: object, node: fx.Node) -> None:
    for symbol in _symbols(value):
        if symbol not in bounds:
            operands = [t for input_ in node.all_input_nodes for t in tensors_in(value_of(input_))]
            bounds[symbol] = max([1, *(int(operand.numel()) for operand in operands)])


def _known(value: object, bounds: Mapping[object, int]) -> Any:
    """``value`` with every symbol replaced by its bound."""
    match value:
        case SymInt():
            return int(_number(value, bounds))
        case SymBool():
            return bool(_number(value, bounds))
        case SymFloat():
            return float(_number(value, bounds))
        case tuple() | list():
            return type(value)(_known(part, bounds) for part in value)
        case Tensor() if _is_symbolic(value):
            shape = [int(_number(size, bounds)) for size in value.shape]
            strides = [int(_number(stride, bounds)) for stride in value.stride()]
            mode: Any = value.fake_mode  # pyright: ignore[reportAttributeAccessIssue]
            with mode:
                return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        case _:
            return value


def _number(value: object, bounds: Mapping[object, int]) -> Any:
    """The most that it may be: of ``k - n`` it is that of no ``n``."""
    if not isinstance(value, Symbolic):
        return value
    expression = value.node.expr
    free = sorted(expression.free_symbols, key=str)
    if not free or isinstance(value, SymBool) or len(free) > _MOST_SYMBOLS:
        return expression.subs(dict(bounds))
    corners = itertools.product(*((0, bounds[symbol]) for symbol in free))
    found = (_at(expression, dict(zip(free, corner, strict=True))) for corner in corners)
    return max(number for number in found if number is not None)


def _at(expression: Any, numbers: Mapping[object, int]) -> Any:
    """``1 / n`` is nothing where there is no ``n``: eager divides by no number of rows either."""
    try:
        return expression.subs(numbers)
    except ZeroDivisionError:
        return None
