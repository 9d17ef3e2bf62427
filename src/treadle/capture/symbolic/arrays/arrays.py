"""NumPy arrays among the arguments, while a step is captured: inputs, as tensors are.

::

    step(np_x):  x = torch.from_numpy(np_x.astype("float32"))        x: an input, read at every call

A substitute object behaves like the array. Its dtype, shape and strides, which are part of a call's
key, and tensors made from it, need no values. Any other access reads the array itself, and the
graph depends on its contents from then on.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any, SupportsIndex, TypeGuard, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.capture.explain_errors import here
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.computations import Computation
from treadle.capture.symbolic.numbers import (
    STAND_INS,
    Key,
    Number,
    Uses,
    is_number,
    is_stand_in,
    plain,
)
from treadle.compat.tracing import held_input, outside_modes
from treadle.util.errors import CaptureError

NdArray = NDArray[np.generic]
CONVERSIONS = frozenset({torch.as_tensor, torch.asarray, torch.tensor})
KIND = frozenset({"shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides"})
SCALARS = (np.float32, np.float64)
"""Functions that code calls with a number to get one of NumPy's."""
_TAKEN = "biufc"
"""Kinds of dtypes that tensors may have."""


def is_numeric(value: object) -> TypeGuard[NdArray]:
    """Whether it is exactly an array, of numbers."""
    return type(value) is np.ndarray and value.dtype.kind in _TAKEN


def array_fact(value: NdArray) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The kind of an array."""
    return value.dtype.str, value.shape, value.strides


def overlaps(values: Sequence[object]) -> tuple[tuple[int, int], ...]:
    """The pairs of positions that share memory: arrays with arrays, and with tensors."""
    if np.ndarray not in map(type, values):
        return ()
    spans = [(at, span) for at, span in enumerate(map(_span, values)) if span is not None]
    return tuple(
        (a, b)
        for nth, (a, (low, high)) in enumerate(spans)
        for b, (begin, end) in spans[nth + 1 :]
        if begin < high and low < end and np.ndarray in (type(values[a]), type(values[b]))
    )


def _span(value: object) -> tuple[int, int] | None:
    """The range of addresses of a value's memory; ``None`` if there is none."""
    if type(value) is np.ndarray:
        return _bounds(value)
    if isinstance(value, Tensor) and value.is_cpu and value.layout is torch.strided:
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return None


def span_of(value: Any) -> tuple[int, int] | None:
    """The range of addresses of the memory of an array or another object with a buffer."""
    if not isinstance(value, np.ndarray):
        try:
            value = np.asarray(memoryview(value))
        except (TypeError, ValueError, BufferError):
            return None
    return _bounds(value)


def _bounds(value: NdArray) -> tuple[int, int] | None:
    if value.size == 0:
        return None
    low = high = value.__array_interface__["data"][0]
    for extent, stride in zip(value.shape, value.strides, strict=True):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + value.itemsize


@final
class ArrayLeaf:
    """An array whose contents at a call ``compute()`` gives."""

    __slots__ = ("_made", "_uses", "compute", "roots", "value")
    __hash__: Any = None  # as that of an array

    def __init__(
        self, value: NdArray, compute: Callable[[], NdArray], roots: frozenset[Key], uses: Uses
    ) -> None:
        self.value = value
        self.compute = compute
        self.roots = roots
        self._uses = uses
        self._made: Tensor | None = None
        uses.is_used = True

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return np.ndarray

    @property
    def uses(self) -> Uses:
        """The record of its uses, shared with others."""
        return self._uses

    def plain(self) -> NdArray:
        """The array, on whose contents the graph depends from now on."""
        if not self._uses.ours:
            self.refuse_written()
            self._uses.needed |= self.roots
        return self.value

    def real(self) -> NdArray:
        """The array, for a function that takes only real numbers."""
        value = self.plain()
        self._uses.note_asked()
        return value

    @property
    def is_written(self) -> bool:
        """Whether the step has written to its tensor."""
        return self._made is not None and self._made._version > 0

    def derived(self, function: Callable[[NdArray], NdArray]) -> "ArrayLeaf":
        """The result of ``function``, whose kind follows from the kind of the array alone."""
        compute = self.compute
        return ArrayLeaf(function(self.value), lambda: function(compute()), self.roots, self._uses)

    def computed(self, function: Callable[..., object], *operands: object) -> object:
        """The result of ``function`` on operands, of which this is one."""
        return computed(function, *operands)

    def refuse_written(self) -> None:
        """TR-112, because a write of the step to a tensor of this memory has not reached the array
        yet."""
        for other in self._uses.arrays.values():
            if other.is_written and overlaps([self.value, other.value]):
                raise CaptureError(
                    "the step reads a NumPy array directly that it wrote to through a tensor",
                    code="TR-112",
                    where=here(),
                    remedy="read the tensor, or write to a copy: torch.tensor(array)",
                )

    def tensor(self) -> Tensor:
        """A tensor of the same memory; its traced counterpart is another input."""
        if self._made is None:
            with outside_modes():
                tensor = torch.from_numpy(self.value)
            self._uses.arrays[id(tensor)] = self
            self._uses.tensors.append(tensor)
            self._made = held_input(tensor)
        return self._made.detach()

    def astype(self, *args: object, **kwargs: object) -> object:
        """The array converted to another dtype."""
        return self.derived(operator.methodcaller("astype", *args, **kwargs))

    def reshape(self, *args: object, **kwargs: object) -> object:
        """The array in another shape."""
        return self.derived(operator.methodcaller("reshape", *args, **kwargs))

    def copy(self, *args: object, **kwargs: object) -> "ArrayLeaf":
        """A copy with its own memory."""
        return self.derived(operator.methodcaller("copy", *args, **kwargs))

    def item(self, *at: object) -> object:
        """One of its numbers, as Python's."""
        return self.computed(lambda value: value.item(*at), self)

    def tolist(self) -> object:
        """Nested lists of its numbers."""
        if not self.value.ndim:
            return self.item()
        return [part.item() if is_number(part) else part.tolist() for part in self]

    def __getitem__(self, at: object) -> object:
        parts: tuple[object, ...] = at if type(at) is tuple else (at,)
        if not all(map(_is_place, parts)):
            return operator.itemgetter(plain(at))(self.plain())
        whole = type(at) is tuple

        def taken(value: NdArray, *parts: object) -> object:
            return operator.itemgetter(parts if whole else parts[0])(value)

        return self.computed(taken, self, *parts)

    def __iter__(self) -> Iterator[Any]:
        if not self.value.ndim:
            return iter(self.value)  # an error of NumPy's
        return iter([self[at] for at in range(len(self.value))])

    def __array_ufunc__(
        self, function: Callable[..., object], how: str, *inputs: object, **options: object
    ) -> object:
        """Elementwise functions of NumPy, and their reductions."""
        call = getattr(function, how)
        simple = how in _UFUNC_FORMS and all(map(_is_option, options.values()))
        if simple and all(map(_is_operand, inputs)):
            return self.computed(functools.partial(_with_options, call, options), *inputs)
        return call(*map(plain, inputs), **plain(options))

    def __len__(self) -> int:
        return len(self.value)

    def __array__(self, *args: object, **kwargs: object) -> NdArray:
        return operator.methodcaller("__array__", *args, **kwargs)(self.real())

    def __copy__(self) -> "ArrayLeaf":
        return self.copy()

    def __deepcopy__(self, memo: object) -> "ArrayLeaf":
        return self.copy()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self.plain().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Makes it an operand instead of a sequence whose items are read."""
        return func(*plain(args), **plain(dict(kwargs or {})))

    def __getattr__(self, name: str) -> object:
        if name in KIND:
            return getattr(self.value, name)
        if name == "T":
            return self.derived(lambda value: value.T)
        if name in METHODS:
            return functools.partial(self._called, name)
        return getattr(self.plain(), name)

    def _called(self, name: str, *args: object, **kwargs: object) -> object:
        if not all(map(_is_option, (*args, *kwargs.values()))):
            return getattr(self.plain(), name)(*plain(args), **plain(kwargs))
        return self.computed(lambda value: getattr(value, name)(*args, **kwargs), self)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ArrayLeaf.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.plain(), name, value)


_UFUNC_FORMS = frozenset({"__call__", "reduce", "accumulate"})
METHODS = frozenset({
    "all", "any", "argmax", "argmin", "argsort", "clip", "cumprod", "cumsum", "diagonal", "dot",
    "flatten", "max", "mean", "min", "prod", "ravel", "repeat", "round", "squeeze", "std", "sum",
    "swapaxes", "trace", "transpose", "var",
})  # fmt: skip
"""Functions whose result's kind follows from kinds alone."""


def computed(function: Callable[..., object], *operands: object) -> object:
    """``function`` of operands, some of them stand-ins, whose kinds determine the kind of the
    result: another stand-in for an array or a number, or a decision."""
    operands = tuple(e.plain() if is_number(e) and not e.scales else e for e in operands)
    stand: list[ArrayLeaf | Number] = [e for e in operands if is_array(e) or is_number(e)]
    if not stand:
        return function(*operands)
    uses, arrays = stand[0].uses, [stand_in for stand_in in stand if is_array(stand_in)]
    roots = frozenset[Key]().union(*(stand_in.roots for stand_in in stand))
    if any(array.roots & uses.whole for array in arrays):
        return function(*map(plain, operands))
    for array in arrays:
        array.refuse_written()
    result = function(*(e.value if is_stand_in(e) else e for e in operands))
    parts = [e.compute if is_stand_in(e) else functools.partial(_same, e) for e in operands]
    compute = Computation(function, parts)
    if is_numeric(result):
        return ArrayLeaf(result, compute, roots, uses)
    uses.looked |= roots
    uses.looked_at += [array.value for array in arrays]
    key = uses.decisions.key_of(compute)
    if is_real(result):
        return Number(result, compute, roots, uses, scales=True, key=key)
    if isinstance(result, bool | np.bool_):
        if not uses.ours:
            uses.decisions.add(key, compute, result, roots)
        return result
    return function(*map(plain, operands))


def _same(value: object) -> object:
    return value


def _with_options(
    function: Callable[..., object], options: Mapping[str, object], *args: object
) -> object:
    return function(*args, **options)


def _is_option(value: object) -> bool:
    """Whether it says how something is computed, and is the same at every call."""
    if type(value) is tuple:
        return all(map(_is_option, value))
    return type(value) in (int, float, bool, str, NoneType, type) or isinstance(value, np.dtype)


def _is_operand(value: object) -> bool:
    return is_array(value) or type(value) in (Number, bool) or is_real(value)


def _is_place(value: object) -> bool:
    """Whether it takes the same number of elements of any array of a kind; a mask does not."""
    if is_array(value):
        return value.value.dtype.kind in "iu"
    return type(value) in (int, slice, NoneType, EllipsisType, Number)


ARITHMETIC = {
    name: getattr(operator, name)
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
}  # fmt: skip
COMPARISONS = {name: getattr(operator, name) for name in ["eq", "ne", "lt", "le", "gt", "ge"]}


def _give_answers() -> None:
    def binary(
        function: Callable[..., object], reflected: bool
    ) -> Callable[[ArrayLeaf, object], object]:
        def call(self: ArrayLeaf, other: object) -> object:
            pair = (other, self) if reflected else (self, other)
            if _is_operand(other):
                return self.computed(function, *pair)
            return function(*map(plain, pair))

        return call

    for name, function in (ARITHMETIC | COMPARISONS).items():
        setattr(ArrayLeaf, f"__{name}__", binary(function, reflected=False))
        if name in ARITHMETIC:
            setattr(ArrayLeaf, f"__r{name}__", binary(function, reflected=True))
    for name, function in {"neg": operator.neg, "pos": operator.pos, "abs": abs}.items():
        setattr(ArrayLeaf, f"__{name}__", lambda self, f=function: self.computed(f, self))
    for name, kind in {"float": float, "int": int}.items():
        setattr(ArrayLeaf, f"__{name}__", lambda self, f=kind: f(self.real()))
    names = (
        "bool", "index", "complex", "str", "repr", "format", "contains", "setitem", "invert",
        "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift", "iadd", "isub", "imul",
        "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "buffer",
    )  # fmt: skip
    for name in names:
        dunder = f"__{name}__"

        def call(self: ArrayLeaf, *args: object, _name: str = dunder, **kwargs: object) -> object:
            plain_args = (arg.plain() if type(arg) is ArrayLeaf else arg for arg in args)
            return getattr(self.plain(), _name)(*plain_args, **kwargs)

        if hasattr(np.ndarray, dunder):
            setattr(ArrayLeaf, dunder, call)


_give_answers()
STAND_INS.add(ArrayLeaf)


def is_array(value: object) -> TypeGuard[ArrayLeaf]:
    """Whether it is a stand-in for an array. (``isinstance`` answers for the array itself.)"""
    return type(value) is ArrayLeaf


def converted(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """``torch.as_tensor(array, ...)`` and its like as a traced tensor; ``None`` where the array
    itself must be asked."""
    if len(args) != 1 or not is_array(args[0]) or kwargs.keys() - {"dtype", "device"}:
        return None
    tensor = args[0].tensor()
    how = {name: value for name, value in kwargs.items() if value is not None}
    moved = tensor.to(**how) if how else tensor
    return tensor.clone() if function is torch.tensor and moved is tensor else moved


def from_numpy(original: Callable[[NdArray], Tensor]) -> Callable[[NdArray], Tensor]:
    """The replacement of ``torch.from_numpy``, which bypasses modes."""

    @functools.wraps(original)
    def call(array: NdArray) -> Tensor:
        return array.tensor() if is_array(array) else original(array)

    return call
