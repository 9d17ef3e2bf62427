"""Sizes of the arguments of a step for many sizes, as numbers of Python's.

::

    total += loss.item() * len(x)      a number of the call, computed again at each
    scores / math.sqrt(x.shape[1])     an input of the graph, likewise
    f"{len(x)} rows"                   a text, likewise

PyTorch's symbols serve as sizes of tensors. Where Python makes something else of one, a number
stands in for it, which the call's own arguments give (``capture/tracing/call_sizes``).
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import SymFloat, SymInt

from treadle.capture.symbolic.numbers import Number, PlainNumber
from treadle.compat.unsized import Symbol, is_symbol, is_unsized, trace_of


class SizesOfTrace(Protocol):
    """What knows the sizes of a trace."""

    def number(self, value: Symbol) -> Number | PlainNumber:
        """What stands in for it; the number itself, for this size alone, where nothing can."""
        ...

    def note(
        self, result: object, function: Callable[..., Any], operands: tuple[object, ...]
    ) -> None:
        """``function`` of sizes gave ``result``, of which PyTorch's own form may not be exact."""
        ...


OF_TRACES: WeakValueDictionary[int, SizesOfTrace] = WeakValueDictionary()
"""By the id of the environment of a trace's symbols: those of its last run."""


def alone(value: Symbol) -> PlainNumber:
    """The number of this run, for which the trace is right from now on."""
    if isinstance(value, SymInt):
        return int(value)
    return float(value) if isinstance(value, SymFloat) else bool(value)


def _sizes(value: Symbol) -> SizesOfTrace | None:
    return None if is_unsized(value) else OF_TRACES.get(id(trace_of(value)))


def is_size(value: object) -> TypeGuard[Symbol]:
    """Whether sizes of the arguments decide it, in a step for many sizes."""
    return is_symbol(value) and _sizes(value) is not None


def as_number(value: object) -> object:
    """What stands in for a size; anything else itself."""
    sizes = _sizes(value) if is_symbol(value) else None
    return value if sizes is None or not is_symbol(value) else sizes.number(value)


def note_made(result: object, function: Callable[..., Any], operands: tuple[object, ...]) -> None:
    """Python's arithmetic with sizes gave ``result``."""
    symbol = next(filter(is_symbol, operands), None)
    sizes = None if symbol is None else _sizes(symbol)
    if sizes is not None:
        sizes.note(result, function, operands)


def truncated(value: Symbol) -> object:
    """``int(value)``, which may be a size again."""
    if not isinstance(value, SymFloat):
        return value if isinstance(value, SymInt) else int(bool(value))
    result = torch.sym_int(value)
    note_made(result, int, (value,))
    return result
