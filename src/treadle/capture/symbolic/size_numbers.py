"""Sizes of arguments, as Python numbers, in a step for many sizes.

::

    total += loss.item() * len(x)      a number of the call, computed again at each
    scores / math.sqrt(x.shape[1])     an input of the graph, likewise
    f"{len(x)} rows"                   a text, likewise

PyTorch's symbols are used as sizes of tensors. If Python computes something else from one, a
substitute number takes its place, which the call's own arguments determine
(``capture/symbolic/call_sizes``).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard
from weakref import WeakValueDictionary

from torch import SymFloat, SymInt

from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.numbers import PlainNumber, is_number, lead_of
from treadle.compat.unsized import Symbol, is_symbol, is_unsized, trace_of


class SizesOfTrace(Protocol):
    """Knows the sizes of a trace."""

    def number(self, value: Symbol) -> object:
        """The stand-in for a number; without one the number itself, for this size only."""
        ...

    def note(
        self, result: object, function: Callable[..., Any], operands: tuple[object, ...]
    ) -> None:
        """``function`` of sizes gave ``result``, of which PyTorch's own form may not be exact."""
        ...


OF_TRACES: WeakValueDictionary[int, SizesOfTrace] = WeakValueDictionary()
"""By the id of the environment of a trace's symbols: those of its last run."""


def alone(value: Symbol) -> PlainNumber:
    """The number of this run; the trace is valid only for it from now on."""
    if isinstance(value, SymInt):
        return int(value)
    return float(value) if isinstance(value, SymFloat) else bool(value)


def _sizes(value: Symbol) -> SizesOfTrace | None:
    return None if is_unsized(value) else OF_TRACES.get(id(trace_of(value)))


def is_size(value: object) -> TypeGuard[Symbol]:
    """Whether it depends on sizes of the arguments, in a step for many sizes."""
    return is_symbol(value) and _sizes(value) is not None


def as_number(value: object) -> object:
    """The stand-in for a size; anything else itself."""
    sizes = _sizes(value) if is_symbol(value) else None
    return value if sizes is None or not is_symbol(value) else sizes.number(value)


def computed(function: Callable[..., Any], operands: Sequence[object]) -> object:
    """``function`` of numbers, some of which may be sizes: a number of the call, or a decision."""
    numbers = list(map(as_number, operands))
    known = any(map(is_number, numbers))
    return lead_of(numbers).applied(function, numbers) if known else function(*numbers)


def made_of_sizes(
    function: Callable[..., Any], operands: tuple[object, ...], otherwise: Callable[[], object]
) -> object:
    """What Python's ``function`` makes of sizes: a size again, which PyTorch gives (``otherwise``),
    of integers and where it rounds."""
    sizes = next(filter(None, map(_sizes, filter(is_symbol, operands))), None)
    if sizes is None:
        return otherwise()
    of_numbers = all(is_symbol(each) or is_number(each) or is_real(each) for each in operands)
    if function in ROUND and isinstance(operands[0], SymInt):
        return operands[0]
    if of_numbers and function not in ROUND and any(map(_is_float, operands)):
        return computed(function, operands)
    result = otherwise()
    if result is not NotImplemented:
        sizes.note(result, function, operands)
    return result


def _is_float(value: object) -> bool:
    return isinstance(value, float | SymFloat)


def truncated(value: Symbol) -> object:
    """``int(value)``, which may be a size again."""
    if not isinstance(value, SymFloat):
        return value if isinstance(value, SymInt) else int(bool(value))
    return made_of_sizes(_TRUNC, (value,), lambda: _TRUNC(value))


_TRUNC = math.trunc  # while a trace runs, ours is in its place
ROUND = frozenset({math.ceil, math.floor, math.trunc})
"""What makes an integer of a size or a fraction of one."""
