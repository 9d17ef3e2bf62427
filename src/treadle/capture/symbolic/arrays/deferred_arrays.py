"""NumPy arrays that a step makes from tensors: known after the launch, like numbers.

::

    predictions.append(y.detach().cpu().numpy())     one more output of the graph, as an array
    hits += (y.argmax(1).numpy() == labels).sum()    and what NumPy makes of it, after the launch

The substitute for such an array has a known shape and dtype. Code that needs its values during
capture raises TR-102.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, final

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from treadle.capture.python_state.plain_values import is_plain, is_real
from treadle.capture.symbolic.arrays.array_functions import FUNCTIONS_OF_KINDS
from treadle.capture.symbolic.arrays.arrays import (
    ARITHMETIC,
    COMPARISONS,
    KIND,
    METHODS,
    NdArray,
    is_numeric,
)
from treadle.capture.symbolic.deferred import (
    LATER,
    DeferredNumber,
    DeferredNumbers,
    asks_number,
    is_deferred,
    is_known_later,
)
from treadle.capture.symbolic.numbers import (
    STAND_INS,
    computation,
    is_number,
    is_stand_in,
    value_now,
)
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import outside_modes


@final
class DeferredArray:
    """An array that ``compute()`` returns after the launch. ``value``: an array of the same kind;
    ``tensor``: the tensor whose memory it has, if any."""

    __slots__ = ("compute", "deferred", "parts", "roots", "tensor", "value")
    __hash__: Any = None  # as that of an array

    def __init__(
        self,
        value: NdArray,
        compute: Callable[[], object],
        deferred: DeferredNumbers,
        parts: tuple[int, ...],
        tensor: Tensor | None = None,
    ) -> None:
        self.value = _of_kind(value.shape, value.dtype)
        self.compute = compute
        self.deferred = deferred
        self.parts = parts
        self.tensor = tensor
        self.roots: frozenset[object] = frozenset()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return np.ndarray

    def plain(self) -> NoReturn:
        """TR-102: there is no array yet."""
        raise self.deferred.refuse()

    def computed(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """``function`` of operands, of which this is one, and whose kinds determine the kind of the
        result: an array or a number that is known later."""
        with np.errstate(all="ignore"):
            result = function(*map(value_now, operands))
        compute = computation(function, operands)
        parts = [at for operand in operands if is_known_later(operand) for at in operand.parts]
        known = tuple(dict.fromkeys(parts))
        if is_numeric(result):
            return DeferredArray(result, compute, self.deferred, known)
        if is_real(result) or isinstance(result, bool | np.bool_):
            return DeferredNumber(type(result), compute, self.deferred, known, None)
        return self.plain()

    def tolist(self) -> object:
        """Nested lists of its numbers."""
        if self.value.ndim < 2:
            items = [self.item(at) for at in range(self.value.size)]
            return items if self.value.ndim else items[0]
        return [part.tolist() for part in self]

    def item(self, *at: int) -> object:
        """One of its numbers, as Python's. If it is the only one, the graph has it as well."""
        if self.tensor is not None and self.value.size == 1 and not at:
            return self.tensor.item()
        return self.computed(lambda value: value.item(*at), (self,))

    def __getitem__(self, at: object) -> object:
        parts: tuple[object, ...] = at if type(at) is tuple else (at,)
        if not all(type(part) in _PLACES for part in parts):
            return self.plain()
        return self.computed(lambda value: value[at], (self,))

    def __iter__(self) -> Iterator[Any]:
        if not self.value.ndim:
            return iter(self.value)  # an error of NumPy's
        return iter([self[at] for at in range(len(self.value))])

    def __len__(self) -> int:
        return len(self.value)

    def __array_ufunc__(
        self, function: Callable[..., object], how: str, *inputs: object, **options: object
    ) -> object:
        """Elementwise functions of NumPy."""
        if how != "__call__" or options or not all(map(_is_operand, inputs)):
            return self.plain()
        return self.computed(function, inputs)

    def __array_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        """Other functions of NumPy's."""
        simple = function in FUNCTIONS_OF_KINDS and not any(map(is_stand_in, kwargs.values()))
        if not simple or not all(_is_operand(arg) or is_plain(arg) for arg in args):
            return self.plain()
        return self.computed(functools.partial(function, **kwargs), args)

    def __array__(self, *_: object, **__: object) -> object:
        return self.plain()

    def __copy__(self) -> object:
        return self.computed(np.copy, (self,))

    def __deepcopy__(self, memo: object) -> object:
        return self.computed(np.copy, (self,))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        return self.plain()

    def __getattr__(self, name: str) -> object:
        if name in KIND:
            return getattr(self.value, name)
        if name == "T":
            return self.computed(np.transpose, (self,))
        if name in METHODS or name in _OF_KINDS:
            return functools.partial(self._called, name)
        if hasattr(np.ndarray, name):
            return self.plain()
        raise AttributeError(name)

    def _called(self, name: str, *args: object, **named: object) -> object:
        if any(map(is_stand_in, (*args, *named.values()))):
            return self.plain()
        return self.computed(lambda value: getattr(value, name)(*args, **named), (self,))


_PLACES = (int, slice, type(None), type(...))
_OF_KINDS = frozenset({"astype", "copy", "reshape"})


def _of_kind(shape: Sequence[int], dtype: DTypeLike) -> NdArray:
    """An array of its kind without memory."""
    return np.broadcast_to(np.ones((), dtype), tuple(shape))


def _is_operand(value: object) -> bool:
    if type(value) is DeferredArray or is_deferred(value):
        return True
    plain = value_now(value)
    return is_real(plain) or type(plain) is np.ndarray


def converted(kind: Callable[..., object], value: DeferredArray) -> object:
    """``float`` or ``int`` of an array of one number."""
    kind(value.value)  # of several numbers an error of NumPy's
    number = value.item()
    return number.derived(kind) if is_number(number) else kind(number)


def _give_operators() -> None:
    def binary(function: Callable[..., object], reflected: bool) -> Callable[..., object]:
        def call(self: DeferredArray, other: object) -> object:
            if not _is_operand(other):
                return self.plain()
            return self.computed(function, (other, self) if reflected else (self, other))

        return call

    for name, function in (ARITHMETIC | COMPARISONS).items():
        setattr(DeferredArray, f"__{name}__", binary(function, reflected=False))
        if name in ARITHMETIC:
            setattr(DeferredArray, f"__r{name}__", binary(function, reflected=True))
    for name, function in {"neg": operator.neg, "pos": operator.pos, "abs": abs}.items():
        setattr(DeferredArray, f"__{name}__", lambda self, f=function: self.computed(f, (self,)))
    names = (
        "str", "repr", "format", "bool", "float", "int", "index", "complex", "contains", "setitem",
        "invert", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift", "divmod", "iadd",
        "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    )  # fmt: skip
    for name in names:
        setattr(DeferredArray, f"__{name}__", _asked)


def _asked(self: DeferredArray, *_: object) -> NoReturn:
    return self.plain()


_give_operators()
LATER.add(DeferredArray)
STAND_INS.add(DeferredArray)


def array_of(
    deferred: DeferredNumbers,
    tensor: Tensor,
    memory: frozenset[int | None],
    find: Callable[[Tensor], Callable[[], Any] | None],
) -> object:
    """``tensor.numpy()``: of the memory of a tensor of this run, as it is when the step is done; of
    an argument's, which ``find`` finds at a call, if the step does not write to it. TR-102 where
    somebody else may write to the memory, of which ``memory`` are the keys."""
    shape = tuple(tensor.shape)
    if not all(type(size) is int for size in shape):
        raise deferred.refuse()
    with outside_modes():  # what PyTorch refuses of a tensor of this kind is its error
        kind = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        like = _of_kind(shape, kind.numpy().dtype)
    if storage_key(tensor) in memory:
        found = find(tensor)
        if found is None:
            raise deferred.refuse()
        deferred.unwritten.append((tensor, tensor._version, asks_number()))
        return DeferredArray(like, lambda: found().numpy(), deferred, (), tensor)
    number, known = deferred.keep(tensor), deferred.known
    return DeferredArray(like, lambda: known[number].numpy(), deferred, (number,), tensor)
