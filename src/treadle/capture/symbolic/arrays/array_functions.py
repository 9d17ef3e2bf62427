"""NumPy functions of substitute numbers and arrays, and lists of them: the results are substitutes
again.

::

    np.array([n, w[0]])     an array that is made anew at every call
    np.interp(n, xs, ys)    a number of the call
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, NoneType
from typing import Any

import numpy as np

from treadle.capture.python_state.containers.list_slices import is_list_slice
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf, computed, is_array
from treadle.capture.symbolic.functions.number_lists import NEEDS_ALL
from treadle.capture.symbolic.numbers import Number, is_number, is_stand_in, plain

_NAMES = (
    "all", "allclose", "any", "argmax", "argmin", "argsort", "array_equal", "average", "clip",
    "column_stack", "concatenate", "convolve", "corrcoef", "count_nonzero", "cov", "cross",
    "cumprod", "cumsum", "diag", "diagonal", "diff", "digitize", "dot", "einsum", "expand_dims",
    "flip", "full_like", "gradient", "hstack", "inner", "interp", "isclose", "kron", "linspace",
    "logspace", "max", "mean", "median", "min", "moveaxis", "nan_to_num", "nanmax", "nanmean",
    "nanmin", "nansum", "ones_like", "outer", "pad", "percentile", "polyval", "prod", "ptp",
    "quantile", "ravel", "repeat", "reshape", "roll", "rot90", "round", "searchsorted", "sort",
    "squeeze", "stack", "std", "sum", "swapaxes", "take", "tile", "trace", "transpose", "tril",
    "triu", "var", "vstack", "where", "zeros_like",
)  # fmt: skip
_OF_ALGEBRA = ("cond", "det", "inv", "matrix_power", "norm", "pinv", "solve")
FUNCTIONS_OF_KINDS: frozenset[object] = frozenset(
    [*(getattr(np, name) for name in _NAMES), *(getattr(np.linalg, name) for name in _OF_ALGEBRA)]
)
"""Functions whose result's kind follows from the kinds of operands alone. By name, since their
types are unions of overloads that no type checker can compare."""
_AS_MANY_AS_THERE_ARE = frozenset({np.where})
"""Functions whose result, given one operand, has as many elements as are true."""
_MAKERS = ("array", "asarray", "ascontiguousarray")
"""Functions that make arrays without dispatching to an operand."""


def _is_option(value: object) -> bool:
    """Whether it is an option, which is the same at every call."""
    return type(value) in (bool, str, NoneType, type) or isinstance(value, np.dtype)


def _is_nest(value: object) -> bool:
    """Whether it is an operand, an option, or a list of such."""
    if type(value) in (list, tuple):
        return all(map(_is_nest, _items(value)))
    if is_number(value):
        return type(value) is Number and value.scales
    return is_array(value) or is_real(value) or type(value) is np.ndarray or _is_option(value)


def _items(value: Any) -> Sequence[object]:
    return value


def _stand_ins(value: object) -> Iterator[object]:
    if type(value) in (list, tuple):
        for item in _items(value):
            yield from _stand_ins(item)
    elif is_stand_in(value):
        yield value


def _filled(value: object, values: Iterator[object]) -> Any:
    """Nested lists with other values in place of stand-ins."""
    if type(value) is list:
        return [_filled(item, values) for item in value]
    if type(value) is tuple:
        return tuple([_filled(item, values) for item in value])
    return next(values) if is_stand_in(value) else value


def are_nests(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether there are stand-ins in arguments that can be split into leaves."""
    nest = (*args, *kwargs.values())
    return all(map(_is_nest, nest)) and any(True for _ in _stand_ins(nest))


def of_nests(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """``function`` of nested lists, from whose kinds the kind of its result follows; of the values
    themselves if the lists cannot be split into leaves."""
    nest = (*args, *kwargs.values())
    short = function in _AS_MANY_AS_THERE_ARE and len(nest) == 1
    if short or not all(map(_is_nest, nest)):
        return function(*plain(tuple(args)), **plain(dict(kwargs)))
    count = len(args)

    def call(*values: object) -> object:
        own = _filled(nest, iter(values))
        return function(*own[:count], **dict(zip(kwargs, own[count:], strict=True)))

    return computed(call, *_stand_ins(nest))


def makers() -> list[tuple[ModuleType, str, Callable[..., object]]]:
    """Replacements of NumPy's functions, which do not dispatch to the items of a list, and of those
    that make arrays, which do not dispatch at all; except those in ``functions/reductions``."""
    names = [name for name in (*_MAKERS, *_NAMES) if getattr(np, name) not in NEEDS_ALL]
    places: list[tuple[ModuleType, str]] = [(np, name) for name in names]
    places += [(np.linalg, name) for name in _OF_ALGEBRA]
    return [(module, name, maker(getattr(module, name))) for module, name in places]


def maker(original: Callable[..., object]) -> Callable[..., object]:
    """The replacement of a function that does not dispatch to the items of a list."""

    def call(*args: object, **kwargs: object) -> object:
        args = tuple(arg.opened() if is_list_slice(arg) else arg for arg in args)
        stand_ins = list(_stand_ins((*args, *kwargs.values())))
        if stand_ins and not any(map(_is_known_later, stand_ins)):
            return of_nests(original, args, kwargs)
        return original(*args, **kwargs)

    return call


def _is_known_later(value: object) -> bool:
    """Whether it is an array that is known later, which dispatches NumPy's functions itself
    (``deferred_arrays``)."""
    return isinstance(value, np.ndarray) and not is_array(value)


def array_of(nest: object) -> ArrayLeaf | None:
    """Lists of numbers, some of them stand-ins, as an array; ``None`` for lists of anything
    else."""
    leaves = list(_stand_ins(nest))
    if type(nest) not in (list, tuple) or not leaves or not _is_nest(nest):
        return None
    array = of_nests(np.array, (nest,), {})
    return array if type(array) is ArrayLeaf else None


def _asked(
    self: object,
    function: Callable[..., object],
    types: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """``__array_function__``."""
    if function in FUNCTIONS_OF_KINDS:
        return of_nests(function, args, kwargs)
    return function(*plain(tuple(args)), **plain(dict(kwargs)))


for _kind in (ArrayLeaf, Number):
    setattr(_kind, "__array_function__", _asked)  # noqa: B010
