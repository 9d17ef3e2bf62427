"""Numbers and texts of Python's that may differ from call to call, while a step is captured.

In the place of such a value stands an object that answers as the value would, and notes when an
answer was needed: then the graph depends on it. One that only scales tensors becomes an input at
run time; one that nothing asked is none of the step's business.
"""

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.compat.tracing import outside_modes

T = TypeVar("T")
Key = Hashable
PlainNumber = bool | int | float
_LARGEST = 1 << 53
"""Up to this every whole number is a float64."""


@dataclass
class Uses:
    """What became of the values that were stood in for. ``needed``: their value is in the graph;
    ``inputs``: by the id of a 0-dim tensor in the trace, how to compute its value at a call."""

    needed: set[Key] = field(default_factory=set[Key])
    inputs: dict[int, "Number"] = field(default_factory=dict[int, "Number"])
    arrays: dict[int, Any] = field(default_factory=dict[int, Any])  # likewise, of NumPy's
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    ours: bool = False  # whether we look ourselves
    is_used: bool = False  # whether anything stands in at all


class Number:
    """A Python number whose value at a call ``compute()`` gives."""

    __slots__ = ("_scales", "_uses", "compute", "roots", "value")

    def __init__(
        self,
        value: PlainNumber,
        compute: Callable[[], Any],
        roots: frozenset[Key],
        uses: Uses,
        *,
        scales: bool,
    ) -> None:
        """``scales``: it may become an input of the graph."""
        self.value = value
        self.compute = compute
        self.roots = roots
        self._uses = uses
        self._scales = scales
        uses.is_used = True

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.value)

    def plain(self) -> Any:
        """The value, on which the graph depends from now on."""
        if not self._uses.ours:
            self._uses.needed |= self.roots
        return self.value

    def derived(
        self, function: Callable[..., PlainNumber], *rest: object, swapped: bool = False
    ) -> "Number":
        """``function(self, *rest)``, or ``function(rest, self)``; a number again."""
        others = [each for each in rest if is_number(each)]
        if any(not isinstance(each, int | float) for each in rest):
            return NotImplemented
        values = [self.value, *(each.value if is_number(each) else each for each in rest)]
        parts = [
            self.compute,
            *(each.compute if is_number(each) else _always(each) for each in rest),
        ]
        if swapped:
            values.reverse()
            parts.reverse()
        roots = self.roots.union(*(each.roots for each in others))
        return Number(
            function(*values),
            lambda: function(*(part() for part in parts)),
            roots,
            self._uses,
            scales=self._scales and all(each._scales for each in others),
        )

    def tensor(self, beside: Tensor, *, copied: bool = False) -> "Tensor | PlainNumber":
        """A 0-dim tensor of this value for arithmetic with ``beside``, so that the result has the
        dtype that the number gives it; where there is none, the number itself. ``copied``: it is
        only written to ``beside``, whatever dims that has."""
        dtype = _dtype_beside(self.value, beside.dtype, has_dims=copied or beside.ndim > 0)
        if not self._scales or dtype is None:
            return self.plain()
        with outside_modes():
            made = torch.tensor(self.value, dtype=torch.float64, device=beside.device)
        self._uses.inputs[id(made)] = self
        self._uses.tensors.append(made)
        return made.to(dtype)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return func(*plain(args), **plain(dict(kwargs or {})))

    # every answer is one that the graph depends on
    def __bool__(self) -> bool:
        return bool(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __hash__(self) -> int:
        return hash(self.plain())

    def __repr__(self) -> str:
        return repr(self.plain())

    def __str__(self) -> str:
        return str(self.plain())

    def __format__(self, spec: str) -> str:
        return format(self.plain(), spec)

    def __round__(self, digits: int | None = None) -> PlainNumber:
        return round(self.plain(), digits)

    def __trunc__(self) -> int:
        return math.trunc(self.plain())

    def __floor__(self) -> int:
        return math.floor(self.plain())

    def __ceil__(self) -> int:
        return math.ceil(self.plain())

    def __divmod__(self, other: object) -> tuple[Any, Any]:
        return divmod(self.plain(), _value(other))

    def __rdivmod__(self, other: object) -> tuple[Any, Any]:
        return divmod(_value(other), self.plain())

    def __array__(self, *args: object, **kwargs: object) -> NDArray[np.generic]:
        return torch.tensor(self.plain()).numpy()

    def __copy__(self) -> "Number":
        return self

    def __deepcopy__(self, memo: object) -> "Number":
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return type(self.plain()), (self.value,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain(), name)


_PAIRS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift,
}  # fmt: skip
_SCALING: dict[object, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
    operator.pow: torch.pow,
}


def _give_arithmetic() -> None:
    """``a + 1``, ``1 + a`` and the others: numbers again, and tensors beside tensors."""

    def both(function: Callable[..., Any], swapped: bool) -> Callable[[Number, object], object]:
        def call(self: Number, other: object) -> object:
            if isinstance(other, Tensor):
                pair = (other, self) if swapped else (self, other)
                if function not in _SCALING:
                    return function(*plain(pair))
                made = tuple(e.tensor(other) if is_number(e) else e for e in pair)
                return _SCALING[function](*made)
            return self.derived(function, other, swapped=swapped)

        return call

    for name, function in _PAIRS.items():
        setattr(Number, f"__{name}__", both(function, swapped=False))
        setattr(Number, f"__r{name}__", both(function, swapped=True))
    for name, function in {"neg": operator.neg, "pos": operator.pos, "abs": abs}.items():
        setattr(Number, f"__{name}__", lambda self, f=function: self.derived(f))


_give_arithmetic()


def _give_comparisons() -> None:
    """``a < 1`` is an answer; ``a < tensor`` is the tensor's own question."""

    def asked(function: Callable[..., object]) -> Callable[[Number, object], object]:
        def call(self: Number, other: object) -> object:
            if isinstance(other, Tensor):
                return NotImplemented
            return function(self.plain(), _value(other))

        return call

    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Number, f"__{name}__", asked(getattr(operator, name)))


_give_comparisons()


class StandIn(Protocol):
    """Stands for a value of Python's, which ``compute`` gives at a call."""

    value: Any
    compute: Callable[[], Any]
    roots: frozenset[Key]

    def plain(self) -> Any:
        """The value, on which the graph depends from now on."""


@final
class Text:
    """A Python text that stands for itself until something is asked of it."""

    __slots__ = ("_uses", "compute", "roots", "value")

    def __init__(
        self, value: str, compute: Callable[[], str], roots: frozenset[Key], uses: Uses
    ) -> None:
        self.value = value
        self.compute = compute
        self.roots = roots
        self._uses = uses
        uses.is_used = True

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return str

    def plain(self) -> str:
        """The value, on which the graph depends from now on."""
        self._uses.needed |= self.roots
        return self.value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain(), name)

    def __copy__(self) -> "Text":
        return self

    def __deepcopy__(self, memo: object) -> "Text":
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return str, (self.plain(),)


def _give_answers() -> None:
    names = (
        "str", "repr", "len", "iter", "hash", "eq", "ne", "lt", "le", "gt", "ge", "contains",
        "getitem", "add", "mul", "rmul", "mod", "format",
    )  # fmt: skip
    for name in names:
        dunder = f"__{name}__"

        def call(self: Text, *args: object, _name: str = dunder) -> object:
            return getattr(self.plain(), _name)(*map(_value, args))

        setattr(Text, dunder, call)
    setattr(Text, "__radd__", lambda self, other: other + self.plain())  # noqa: B010
    setattr(Text, "__fspath__", lambda self: self.plain())  # noqa: B010


_give_answers()


STAND_INS: set[type] = {Number, Text}
"""Classes of what stands in for something of Python's."""


def is_number(value: object) -> TypeGuard[Number]:
    """Is it a number that stands in for another? ``isinstance`` says what that one is."""
    return type(value) is Number


def is_stand_in(value: object) -> TypeGuard[StandIn]:
    """A number, a text or an array that stands in for another."""
    return type(value) in STAND_INS


def is_exact(value: object) -> bool:
    """Whether a float64, as which numbers are given to the graph, is equal to this one."""
    return not isinstance(value, int) or abs(value) <= _LARGEST


def _dtype_beside(value: PlainNumber, beside: torch.dtype, *, has_dims: bool) -> torch.dtype | None:
    """Of a 0-dim tensor that promotes as the number does, at no loss; ``None`` if there is none."""
    if isinstance(value, bool) or beside.is_complex or beside is torch.bool:
        return None
    if not is_exact(value):
        return None
    if not beside.is_floating_point:
        return beside if isinstance(value, int) else None
    if has_dims:
        return torch.float64
    return beside if beside in (torch.float32, torch.float64) else None


def _always(value: T) -> Callable[[], T]:
    return lambda: value


def _value(other: object) -> Any:
    return other.plain() if is_stand_in(other) else other


def plain(tree: Any) -> Any:
    """Lists, tuples and dicts with the values of what stands in for them."""
    if is_stand_in(tree):
        return tree.plain()
    if type(tree) in (list, tuple):
        return type(tree)(map(plain, tree))
    if type(tree) is dict:
        return {key: plain(each) for key, each in tree.items()}
    return tree
