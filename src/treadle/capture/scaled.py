"""Torch's functions of numbers that stand in for others, as functions of tensors without dims.

So a factor of a moving average, a bound or a threshold that changes from call to call is an
input of the graph. A function that has no form here is given the number itself, on which the graph
then depends.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from treadle.capture.array_functions import array_of
from treadle.capture.arrays import ArrayLeaf
from treadle.capture.numbers import Number, PlainNumber, is_number, plain, value_now
from treadle.capture.plain_values import is_real, is_whole
from treadle.compat.tracing import outside_modes

Call = tuple[Callable[..., Any], tuple[object, ...], dict[str, object]]
Elementwise = Callable[..., Tensor]
INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
Operand = Tensor | Number | PlainNumber


def scaled(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Call:
    """The call ``func(*args, **kwargs)`` with tensors in the place of numbers that stand in."""
    name = getattr(func, "__name__", "")
    if func in INDEXING:
        return func, args, dict(kwargs)  # see ``ScalarIndices``
    index = _as_index(*cast(Any, args)) if name == "narrow" and not kwargs else None
    if index is not None:
        return Tensor.__getitem__, index, {}
    if name.startswith("_foreach_"):
        return _of_each(name.removeprefix("_foreach_"), args, kwargs) or _as_it_is(
            func, args, kwargs
        )
    if name in _BINARY and not kwargs:
        tensor = next((each for each in args if isinstance(each, Tensor)), None)
        if tensor is not None and not _is_whole_power(name, args):
            return func, tuple(_beside(tensor, each) for each in args), {}
    if name in _MAKERS and not kwargs.get("requires_grad"):
        return _made(func, args, kwargs)
    base, in_place = name.removesuffix("_"), name.endswith("_")
    form = _FORMS.get(base if in_place else name)
    if form is not None and "out" not in kwargs and _keeps_dtype((*args, *kwargs.values())):
        return _computed(form, in_place=in_place), args, dict(kwargs)
    return _as_it_is(func, args, kwargs)


def _as_index(x: Any, dim: Any, start: Any, length: Any) -> tuple[Any, ...] | None:
    """Of ``narrow`` the tensor and an index, where only the place is a number that stands in."""
    inside = type(dim) is int and 0 <= dim < x.ndim and type(length) is int
    if not inside or not is_number(start) or not is_whole(start.value):
        return None
    if start.decided(operator.lt, (start, 0)):
        return None
    return x, (slice(None),) * dim + (slice(start, start.derived(operator.add, length)),)


def _is_whole_power(name: str, args: tuple[Any, ...]) -> bool:
    """Whether whole numbers are raised to a number: PyTorch refuses a negative one, and does not
    look at a tensor of them."""
    base, exponent = args[0], args[-1]
    return "pow" in name and is_number(exponent) and not base.is_floating_point()


def _keeps_dtype(operands: tuple[object, ...]) -> bool:
    """Whether the result has the dtype of every tensor among them that is not a condition."""
    dtypes = {each.dtype for each in operands if isinstance(each, Tensor)} - {torch.bool}
    if len(dtypes) != 1:
        return False
    numbers = [each for each in operands if isinstance(each, int | float)]
    return dtypes.pop().is_floating_point or all(isinstance(each, int) for each in numbers)


def _as_it_is(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Call:
    return func, plain(args), plain(dict(kwargs))


def _beside(tensor: Tensor, value: object) -> Any:
    return value.tensor(tensor) if is_number(value) else value


def _computed(form: Elementwise, *, in_place: bool) -> Callable[..., Tensor]:
    """``form`` at the precision at which PyTorch's kernels compute with a number: float32 for
    halves; written to its first operand if ``in_place``."""

    def call(*args: Any, **kwargs: object) -> Tensor:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        dtype = next(each.dtype for each in tensors if each.dtype is not torch.bool)
        named = {name: _wide(each) for name, each in kwargs.items()}
        result = form(*map(_wide, args), **named).to(dtype)
        return args[0].copy_(result) if in_place else result

    return call


def _wide(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


# An element at a bound that is a number keeps its gradient until PyTorch 2.13, and has none since.
_TIES_PASS = torch.__version__ < "2.14"  # compared as versions
_BELOW, _ABOVE = (torch.lt, torch.gt) if _TIES_PASS else (torch.le, torch.ge)


# -- elementwise forms; their operands and defaults are those of torch's functions ------------


def _add(input: Tensor, other: Operand, *, alpha: Operand = 1) -> Tensor:
    other = _beside(input, other)
    return input + other * _beside(other if isinstance(other, Tensor) else input, alpha)


def _sub(input: Tensor, other: Operand, *, alpha: Operand = 1) -> Tensor:
    other = _beside(input, other)
    return input - other * _beside(other if isinstance(other, Tensor) else input, alpha)


def _lerp(input: Tensor, end: Tensor, weight: Operand) -> Tensor:
    by = _beside(input, weight)
    return torch.lerp(input, end, by.to(input.dtype) if isinstance(by, Tensor) else by)


def _addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, value: Operand = 1) -> Tensor:
    return input + tensor1 * _beside(tensor1, value) * tensor2


def _addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, value: Operand = 1) -> Tensor:
    return input + tensor1 / tensor2 * _beside(tensor1, value)


def _clamp(input: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """By comparisons: bounds that are tensors share the gradient of ties since PyTorch 2.14."""
    for bound, beyond in ((min, _BELOW), (max, _ABOVE)):
        if bound is not None:
            limit = _beside(input, bound)
            input = torch.where(beyond(input, limit) | (limit != limit), limit, input)
    return input


def _clamp_min(input: Tensor, min: Operand) -> Tensor:
    return _clamp(input, min=min)


def _clamp_max(input: Tensor, max: Operand) -> Tensor:
    return _clamp(input, max=max)


def _where(condition: Tensor, input: Operand, other: Operand) -> Tensor:
    tensor = input if isinstance(input, Tensor) else other
    if not isinstance(tensor, Tensor):
        return torch.where(condition, plain(input), plain(other))
    return torch.where(condition, _beside(tensor, input), _beside(tensor, other))


def _masked_fill(input: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return torch.where(mask, _beside(input, value), input)


def _fill(input: Tensor, value: Operand) -> Tensor:
    made: Any = value.tensor(input, copied=True) if is_number(value) else value
    return made.expand(input.shape) if isinstance(made, Tensor) else torch.full_like(input, made)


_FORMS: dict[str, Elementwise] = {
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "where": _where,
    "masked_fill": _masked_fill,
    "fill": _fill,
}

_BINARY = frozenset(
    f"{under}{prefix}{name}{under}" + suffix
    for name in (
        "add", "sub", "mul", "div", "truediv", "true_divide", "multiply", "divide", "pow",
        "remainder", "mod", "floor_divide", "floordiv", "fmod",
        "lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal",
        "not_equal",
    )
    for under, prefix, suffix in (
        ("", "", ""), ("", "", "_"), ("__", "", ""), ("__", "r", ""), ("__", "i", ""),
    )
)  # fmt: skip
"""Functions whose form for two tensors means what their form for a number means."""


# -- functions that make tensors of a number ---------------------------------------------------

_MAKERS = {
    "full_like": 1,
    "new_full": 2,
    "full": 1,
    "tensor": 0,
    "as_tensor": 0,
    "scalar_tensor": 0,
}
_NAMES = ("fill_value", "data", "s")


def _dtype_of(func: Callable[..., Any], value: PlainNumber | list[Any]) -> torch.dtype:
    """Of a tensor that ``func`` makes of a number: of NumPy's it is theirs."""
    return func(value).dtype


def _made(func: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Call:
    """A tensor of zeros that is then filled; of lists of numbers, what NumPy makes of them."""
    at = _MAKERS[func.__name__]
    name = next((name for name in _NAMES if name in kwargs), None)
    number = args[at] if at < len(args) else kwargs.get(name or "")
    rest = plain(args[:at] + args[at + 1 :])
    named = plain({key: each for key, each in kwargs.items() if key != name})
    array = None if at or named.keys() - {"dtype", "device"} else array_of(number)
    if array is not None:
        return _of_array(func, array, _values(number)), rest, named
    if not is_number(number) or not is_real(number.value):
        return _as_it_is(func, args, kwargs)

    def call(*args: object, **kwargs: Any) -> Tensor:
        if at == 0:
            with outside_modes():
                dtype = _dtype_of(func, number.value)
            named: dict[str, Any] = {"dtype": dtype, **kwargs}
            filled = torch.zeros((), **named)
        else:
            filled = func(*args[:at], type(number.value)(0), *args[at:], **kwargs)
        return filled.copy_(_fill(filled, number))

    return call, rest, named


def _of_array(func: Callable[..., Any], array: ArrayLeaf, values: list[Any]) -> Callable[..., Any]:
    """``func`` of lists of numbers, which are ``values`` in this run."""
    with outside_modes():
        dtype = _dtype_of(func, values)

    def call(**named: Any) -> Tensor:
        how: dict[str, Any] = {"dtype": dtype, **named}
        return array.tensor().to(**how)

    return call


def _values(nest: Any) -> list[Any]:
    """What lists hold in this run."""
    return [_values(each) if type(each) in (list, tuple) else value_now(each) for each in nest]


# -- functions of lists of tensors -------------------------------------------------------------


def _of_each(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Call | None:
    """``torch._foreach_mul_`` and its like, one tensor after the other; ``None`` for those whose
    function of one tensor has no form."""
    has_form = name in _BINARY or name.removesuffix("_") in _FORMS
    if not has_form or not args or not isinstance(args[0], list | tuple):
        return None
    function = getattr(Tensor, name)

    def call(*args: Any, **kwargs: object) -> tuple[Tensor, ...] | None:
        count = len(args[0])
        results: list[Tensor] = []
        for k in range(count):
            own = tuple(each[k] if _is_list(each, count) else each for each in args)
            func, mine, named = scaled(function, own, kwargs)
            results.append(func(*mine, **named))
        return None if name.endswith("_") else tuple(results)

    return call, args, dict(kwargs)


def _is_list(value: object, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count
