"""Torch functions of substitute numbers, as functions of 0-dim tensors.

So a factor of a moving average, a bound or a threshold that changes from call to call is an input
of the graph. A function that is not rewritten here receives the number itself, and the graph then
depends on it.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.capture.python_state.plain_values import is_real, is_whole
from treadle.capture.symbolic.arrays.array_functions import array_of
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf
from treadle.capture.symbolic.numbers import PlainNumber, is_number, sized, value_now
from treadle.capture.symbolic.scaled_forms import ELEMENTWISE, OTHERS, ScaledFunction, beside, fill
from treadle.compat.tracing import outside_modes

Call = tuple[Callable[..., Any], tuple[object, ...], dict[str, object]]
INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def scaled(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Call:
    """The call ``func(*args, **kwargs)`` with tensors in the place of numbers that stand in."""
    name = getattr(func, "__name__", "")
    if func in INDEXING:
        return func, args, dict(kwargs)  # see ``ScalarIndices``
    index = _as_index(*args) if name == "narrow" and not kwargs else None
    if index is not None:
        return Tensor.__getitem__, index, {}
    if name.startswith("_foreach_"):
        return _of_each(name.removeprefix("_foreach_"), args, kwargs) or _as_it_is(
            func, args, kwargs
        )
    if name in _BINARY and not kwargs.keys() - {"rounding_mode"}:
        operands = _promoted(name, args)
        tensor = next((operand for operand in operands if isinstance(operand, Tensor)), None)
        if tensor is not None and not _is_whole_power(name, operands):
            return func, tuple(beside(tensor, operand) for operand in operands), dict(kwargs)
    if name in _MAKERS and not kwargs.get("requires_grad"):
        return _made(func, args, kwargs)
    if _is_written_in_python(func):
        named = {key: _unless_whole(value) for key, value in kwargs.items()}
        return func, tuple(map(_unless_whole, args)), named
    base, in_place = name.removesuffix("_"), name.endswith("_")
    form = ELEMENTWISE.get(base if in_place else name)
    if form is not None and "out" not in kwargs and _keeps_dtype((*args, *kwargs.values())):
        return _computed(form, in_place=in_place), args, dict(kwargs)
    if name in OTHERS and "out" not in kwargs:
        return OTHERS[name], args, dict(kwargs)
    return _as_it_is(func, args, kwargs)


def functions_of_sizes() -> list[tuple[object, str, Callable[..., object]]]:
    """Replacements of functions that take sizes one by one, where PyTorch does not accept objects
    with ``__torch_function__``."""
    return [
        (owner, name, _of_sizes(getattr(owner, name)))
        for owner, names in _TAKE_SIZES.items()
        for name in names.split()
    ]


_TAKE_SIZES: Mapping[object, str] = {
    torch: "empty ones rand randn zeros",
    Tensor: "expand new_empty new_ones new_zeros repeat reshape tile unflatten view",
}


def _of_sizes(original: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        if any(map(is_number, args)):
            args = sized(args)
        return original(*args, **kwargs)

    return call


def _as_index(x: object, dim: object, start: object, length: object) -> tuple[object, ...] | None:
    """Of ``narrow`` the tensor and an index, where only the place is a number that stands in."""
    if not isinstance(x, Tensor) or type(dim) is not int or not 0 <= dim < x.ndim:
        return None
    if type(length) is not int or not is_number(start) or not is_whole(start.value):
        return None
    if start.uses.as_size(start) is not None or start.decided(operator.lt, (start, 0)):
        return None
    return x, (slice(None),) * dim + (slice(start, start.derived(operator.add, length)),)


def _is_written_in_python(func: Callable[..., object]) -> bool:
    """Whether it is a function of PyTorch's that calls others, which have forms."""
    of_torch = isinstance(func, FunctionType) and func.__module__ in _OF_FUNCTIONS
    return of_torch and func is not torch.broadcast_tensors


_OF_FUNCTIONS = frozenset(module.__name__ for module in (F, torch.functional, torch.nn.init))


def _unless_whole(value: object) -> object:
    """Integers are sizes, dims and counts there."""
    if is_number(value) and not is_whole(value.value):
        return value
    return sized(value)


def _promoted(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors of integers beside a number that makes others of them: tensors of those."""
    is_written = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    numbers = [value_now(arg) for arg in args if not isinstance(arg, Tensor)]
    if is_written or not numbers or not all(map(is_real, numbers)):
        return args
    whole = all(map(is_whole, numbers))

    def promoted(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
        if whole:
            return tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor
        return tensor.to(torch.get_default_dtype())

    return tuple(promoted(arg) if isinstance(arg, Tensor) else arg for arg in args)


def _is_whole_power(name: str, args: tuple[object, ...]) -> bool:
    """Whether integers are raised to a number: PyTorch refuses a negative one, and does not
    look at a tensor of them."""
    base, exponent = args[0], args[-1]
    is_power = "pow" in name and is_number(exponent)
    return is_power and isinstance(base, Tensor) and not base.is_floating_point()


def _keeps_dtype(operands: tuple[object, ...]) -> bool:
    """Whether the result has the dtype of every tensor among them that is not a condition."""
    dtypes = {operand.dtype for operand in operands if isinstance(operand, Tensor)} - {torch.bool}
    if len(dtypes) != 1:
        return False
    numbers = [operand for operand in operands if isinstance(operand, int | float)]
    return dtypes.pop().is_floating_point or all(isinstance(number, int) for number in numbers)


def _as_it_is(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Call:
    return func, sized(args), sized(dict(kwargs))


def _computed(form: ScaledFunction, *, in_place: bool) -> Callable[..., Tensor]:
    """``form`` at the precision at which PyTorch's kernels compute with a number: float32 for
    halves; written to its first operand if ``in_place``."""

    def call(*args: Any, **kwargs: object) -> Tensor:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        dtype = next(tensor.dtype for tensor in tensors if tensor.dtype is not torch.bool)
        named = {name: _wide(value) for name, value in kwargs.items()}
        result = form(*map(_wide, args), **named).to(dtype)
        return args[0].copy_(result) if in_place else result

    return call


def _wide(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


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
    "new_tensor": 1,
    "new": 1,
    "full": 1,
    "tensor": 0,
    "as_tensor": 0,
    "scalar_tensor": 0,
}
_NAMES = ("fill_value", "data", "s")
_TAKE_DATA = frozenset({"tensor", "as_tensor", "scalar_tensor", "new_tensor", "new"})


def _kind_of(
    func: Callable[..., Any], args: Sequence[object], value: PlainNumber | list[object]
) -> dict[str, Any]:
    """Dtype and device of a tensor that ``func`` makes of a number: of NumPy's the dtype is theirs,
    of a tensor's method both are that one's."""
    if args and isinstance(args[0], Tensor):
        return {"dtype": args[0].dtype, "device": args[0].device}
    with outside_modes():
        return {"dtype": func(value).dtype}


def _made(func: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Call:
    """A tensor of zeros that is then filled; of lists of numbers, what NumPy makes of them."""
    at = _MAKERS[func.__name__]
    name = next((name for name in _NAMES if name in kwargs), None)
    number = args[at] if at < len(args) else kwargs.get(name or "")
    rest = sized(args[:at] + args[at + 1 :])
    named = sized({key: value for key, value in kwargs.items() if key != name})
    is_data = func.__name__ in _TAKE_DATA and not named.keys() - {"dtype", "device"}
    array = array_of(number) if is_data else None
    if array is not None:
        return _of_array(func, array, _values(number)), rest, named
    if is_data and type(number) in (list, tuple) and all(map(_is_plain_or_number, _leaves(number))):
        return _of_leaves(func, number), rest, named
    if not is_number(number) or not is_real(number.value) or func.__name__ == "new":
        return _as_it_is(func, args, kwargs)

    def call(*args: object, **kwargs: Any) -> Tensor:
        if func.__name__ in _TAKE_DATA:
            named: dict[str, Any] = {**_kind_of(func, args, number.value), **kwargs}
            filled = torch.zeros((), **named)
        else:
            filled = func(*args[:at], type(number.value)(0), *args[at:], **kwargs)
        return filled.copy_(fill(filled, number))

    return call, rest, named


def _of_array(
    func: Callable[..., object], array: ArrayLeaf, values: list[object]
) -> Callable[..., object]:
    """``func`` of lists of numbers, which are ``values`` in this run."""

    def call(*args: Tensor, **named: Any) -> Tensor:
        how: dict[str, Any] = {**_kind_of(func, args, values), **named}
        return array.tensor().to(**how)

    return call


def _of_leaves(func: Callable[..., object], nest: object) -> Callable[..., object]:
    """``func`` of lists of numbers, of which some are known after the launch: in the graph each is
    a tensor."""

    def call(*args: Tensor, **named: Any) -> Tensor:
        return _stacked(nest, {**_kind_of(func, args, _values(nest)), **named})

    return call


def _stacked(nest: Any, how: Mapping[str, Any]) -> Tensor:
    if type(nest) in (list, tuple):
        return torch.stack([_stacked(item, how) for item in nest])
    if not is_number(nest):
        return torch.full((), nest, **how)
    filled = torch.zeros((), **how)
    return filled.copy_(fill(filled, nest))


def _leaves(nest: Any) -> Iterator[object]:
    for item in nest:
        if type(item) in (list, tuple):
            yield from _leaves(item)
        else:
            yield item


def _is_plain_or_number(leaf: object) -> bool:
    return is_number(leaf) or is_real(leaf) or type(leaf) is bool


def _values(nest: Any) -> list[object]:
    """The values of nested lists in this run."""
    return [_values(item) if type(item) in (list, tuple) else value_now(item) for item in nest]


# -- functions of lists of tensors -------------------------------------------------------------


def _of_each(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Call | None:
    """``torch._foreach_mul_`` and its like, one tensor after the other; ``None`` for those whose
    function of one tensor has no form."""
    has_form = name in _BINARY or name.removesuffix("_") in ELEMENTWISE
    if not has_form or not args or not isinstance(args[0], list | tuple):
        return None
    function = getattr(Tensor, name)

    def call(*args: Any, **kwargs: object) -> tuple[Tensor, ...] | None:
        count = len(args[0])
        results: list[Tensor] = []
        for k in range(count):
            own = tuple(arg[k] if _is_list(arg, count) else arg for arg in args)
            func, mine, named = scaled(function, own, kwargs)
            results.append(func(*mine, **named))
        return None if name.endswith("_") else tuple(results)

    return call, args, dict(kwargs)


def _is_list(value: object, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count
