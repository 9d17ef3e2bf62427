"""Python numbers and strings that may change from call to call, during capture.

A substitute object behaves like the value, and records when the value itself was needed: then the
graph depends on it. A number that only scales tensors becomes an input at run time; a number that
nothing used does not matter. A comparison is a branch: the graph depends on its outcome, which is
checked before each call.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeGuard, TypeVar, cast, final, overload

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import SymInt, Tensor

from treadle.capture.explain_errors import users_frames
from treadle.capture.python_state.plain_values import RealNumber, is_real, is_whole
from treadle.capture.symbolic.computations import Computation, Decisions, Key
from treadle.compat.tracing import outside_modes
from treadle.compat.unsized import Symbol, is_symbol

T = TypeVar("T")
PlainNumber = bool | RealNumber
SourcePosition = tuple[str, int | None, int | None, int | None, int | None]
"""Where an expression stands: its file, first and last line, first and last column."""


def position(frame: FrameType) -> SourcePosition:
    """The position of the expression that ``frame`` evaluates now."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return (frame.f_code.co_filename, *positions)


_LARGEST = 1 << 53
"""Up to this magnitude every integer is exactly a float64."""


def no_size(number: "Number") -> SymInt | None:
    """No number is a size."""
    return None


@final
@dataclass(slots=True)
class _AskedIndex:
    """The function that ``frame`` called at ``at`` has asked for the values of numbers that are
    sizes."""

    frame: FrameType
    at: int
    codes: tuple[CodeType, ...]
    roots: set[Key]

    def is_running(self) -> bool:
        """Whether that call is still running."""
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None and frame.f_lasti == self.at


@dataclass
class Uses:
    """The uses of values with stand-ins. ``needed``: their value is in the graph; ``inputs``: by
    the id of a 0-dim tensor in the trace, how to compute its value at a call. ``decisions``: what
    was decided by them."""

    needed: set[Key] = field(default_factory=set[Key])
    decisions: Decisions = field(default_factory=Decisions)
    inputs: dict[int, "Number"] = field(default_factory=dict[int, "Number"])
    # likewise, of NumPy's
    arrays: dict[int, Any] = field(default_factory=dict[int, Any])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    entries: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict[tuple[int, torch.device], Tensor]
    )  # those inputs, by the keys of numbers
    asked: dict[CodeType, tuple[CodeType, ...]] = field(
        default_factory=dict[CodeType, tuple[CodeType, ...]]
    )  # by code that asked for a real number, the codes of the frames that ran, innermost first
    # where an entry was looked for, and where a frame looks for one
    places: set[SourcePosition] = field(default_factory=set[SourcePosition])
    place_asked: Callable[[FrameType], SourcePosition | None] = lambda _: None
    extreme_asked: Callable[[FrameType], bool] = lambda _: False  # whether it calls min or max
    # where it calls what may be one of them by another name
    call_asked: Callable[[FrameType], SourcePosition | None] = lambda _: None
    only_warns: Callable[[FrameType], bool] = lambda _: False
    # whether it compares for a warning that it has no reason to give
    looked: set[Key] = field(default_factory=set[Key])  # arrays whose numbers stand in
    looked_at: list[NDArray[np.generic]] = field(
        default_factory=list[NDArray[np.generic]]
    )  # those arrays
    whole: set[Key] = field(default_factory=set[Key])  # arrays whose numbers may not
    ours: bool = False  # whether we look ourselves
    is_used: bool = False  # whether anything stands in at all
    of_size: Callable[[Symbol], object] | None = None  # what stands in for a size
    as_size: Callable[["Number"], SymInt | None] = no_size  # the inverse, if it is one
    mode: Callable[[], AbstractContextManager[object]] | None = None  # in which tensors are traced
    _asked_index: _AskedIndex | None = None
    membership_asked: Callable[[FrameType, object], Callable[[object], bool] | None] = lambda *_: (
        None
    )  # whether a frame asks if a number is in a set

    def note_asked(self, asking: FrameType | None = None) -> None:
        """Python asks for a real number, which no other object can be: ``asking``, or the innermost
        frame."""
        if not self.ours:
            frames = list(users_frames())
            first = frames.index(asking) if asking in frames else 0
            codes = tuple(frame.f_code for frame in frames[first:])
            self.asked.setdefault(codes[0], codes)

    def ask_index(self, number: "Number", frame: FrameType) -> None:
        """Something in C, which ``frame`` calls, asks for the number that a size is. PyTorch asks
        before it calls the mode, which then gives the size instead."""
        if self.ours:
            return
        asked = self._asked_index
        if asked is None or asked.frame is not frame or asked.at != frame.f_lasti:
            self.settle_index()
            codes = tuple(each.f_code for each in users_frames())
            self._asked_index = asked = _AskedIndex(frame, frame.f_lasti, codes, set())
        asked.roots |= number.roots

    def answer_index(self) -> None:
        """Note that a function of PyTorch's is given a size."""
        if self._asked_index is not None and self._asked_index.is_running():
            self._asked_index = None

    def settle_index(self) -> None:
        """What asked last has taken the numbers, on which the graph then depends."""
        asked, self._asked_index = self._asked_index, None
        if asked is not None:
            self.needed |= asked.roots
            self.asked.setdefault(asked.codes[0], asked.codes)

    def note_place(self, frame: FrameType) -> None:
        """Note that Python asks for the number itself, in ``frame``."""
        place = None if self.ours else self.place_asked(frame)
        if place is not None:
            self.places.add(place)
            self.note_asked()

    def note_extreme(self, frame: FrameType) -> None:
        """Note that Python compares a number, in ``frame``."""
        if not self.ours and (self.note_call(frame) or self.extreme_asked(frame)):
            self.note_asked()

    def note_call(self, frame: FrameType) -> bool:
        """Whether ``frame`` calls by another name what asks for numbers: its code may be rewritten
        to call ours there."""
        place = self.call_asked(frame)
        if place is not None:
            self.places.add(place)
        return place is not None

    def written_late(self) -> set[Key]:
        """The arrays that were written to after a number of theirs was looked at: at a call it
        would be asked for when they are written."""
        written = [array.roots for array in self.arrays.values() if array.is_written]
        return (self.looked & set[Key]().union(*written)) - self.whole

    def is_in_graph(self, roots: frozenset[Key]) -> bool:
        """Whether values of ``roots`` are in the graph without any decision on them."""
        return bool((roots & self.needed) - self.decisions.roots())


class Number:
    """A number of Python's or NumPy's whose value at a call ``compute()`` returns. ``key``: equal
    for numbers with equal computations."""

    __slots__ = ("_fixed", "_uses", "compute", "key", "roots", "value")

    def __init__(
        self,
        value: PlainNumber,
        compute: Callable[[], object],
        roots: frozenset[Key],
        uses: Uses,
        *,
        scales: bool,
        key: int | None = None,
        fixed: frozenset[Key] = frozenset(),
    ) -> None:
        """``scales``: it may become an input of the graph. ``key``: of one that is computed of
        others; ``fixed``: of the ``roots`` of such a one those that may not."""
        self.key = uses.decisions.key_of(roots) if key is None else key
        self.value = value
        self.compute = compute
        self.roots = roots
        self._uses = uses
        self._fixed = fixed if scales else roots
        uses.is_used = True

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.value)

    @property
    def uses(self) -> Uses:
        """What becomes of it and of others."""
        return self._uses

    @property
    def scales(self) -> bool:
        """Whether it may become an input of the graph, which then depends on nothing of it."""
        return not self._fixed

    @property
    def _varies(self) -> bool:
        """Whether it may become an input: the graph then depends on those of its roots that may
        not, which are expected to stay."""
        return not self._fixed or not self.roots <= self._fixed

    def plain(self) -> PlainNumber:
        """The value, on which the graph depends from now on."""
        if not self._uses.ours:
            self._uses.needed |= self.roots
        return self.value

    def sized(self) -> PlainNumber | SymInt:
        """The value, or the size that it is: for a function of tensors that takes sizes."""
        size = self._uses.as_size(self)
        if size is None:
            return self.plain()
        self._uses.answer_index()
        return size

    def real(self) -> PlainNumber:
        """The value, for a function that takes only real numbers."""
        value = self.plain()
        if self._varies:
            self._uses.note_asked()
        return value

    def shown(self) -> PlainNumber:
        """The value, for a function that only returns a string."""
        value = self.plain()
        self._uses.note_asked()
        return value

    def derived(
        self, function: Callable[..., Any], *rest: object, reflected: bool = False
    ) -> "Number":
        """``function(self, *rest)``, or ``function(rest, self)``; a number again."""
        return Number.of(function, (*rest, self) if reflected else (self, *rest))

    @staticmethod
    def of(function: Callable[..., Any], operands: Sequence[object]) -> Any:
        """``function`` of numbers: a number that stands in if one of them does."""
        numbers = [operand for operand in operands if is_number(operand)]
        if not numbers:
            return function(*operands)
        of_size = numbers[0].uses.of_size
        if of_size is not None:
            operands = [of_size(operand) if is_symbol(operand) else operand for operand in operands]
            numbers = [operand for operand in operands if is_number(operand)]
        if not all(
            is_number(operand) or isinstance(operand, bool) or is_real(operand)
            for operand in operands
        ):
            return NotImplemented
        return lead_of(numbers).combined(function, operands)

    def combined(
        self, function: Callable[..., PlainNumber], operands: Sequence[object]
    ) -> "Number":
        """``function`` of numbers, of which this is one."""
        numbers = [operand for operand in operands if is_number(operand)]
        return Number(
            function(*map(value_now, operands)),
            computation(function, operands),
            frozenset[Key]().union(*(number.roots for number in numbers)),
            self._uses,
            scales=True,
            key=self._uses.decisions.key_of(function, *map(operand_key, operands)),
            fixed=frozenset[Key]().union(*(number._fixed for number in numbers)),
        )

    def applied(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """``function``, which may give anything, of numbers, of which this is one."""
        result = function(*map(value_now, operands))
        if is_real(result):
            return self.combined(cast(Callable[..., PlainNumber], function), operands)
        if isinstance(result, bool | np.bool_):
            return self.decided(function, operands)
        return function(*map(_value, operands))

    def decided(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """The result of ``function`` of such numbers as a decision, which is the same at every call
        that the graph serves."""
        outcome = function(*map(value_now, operands))
        if not self._uses.ours:
            numbers = [operand for operand in operands if is_number(operand)]
            roots = frozenset[Key]().union(*(number.roots for number in numbers))
            key = self._uses.decisions.key_of(function, *map(operand_key, operands))
            compute = computation(function, operands)
            self._uses.decisions.add(key, compute, outcome, roots)
        return outcome

    def tensor(self, beside: Tensor, *, copied: bool = False) -> "Tensor | PlainNumber":
        """A 0-dim tensor of this value for arithmetic with ``beside``, so that the result has the
        dtype that the number gives it; where there is none, the number itself. ``copied``: it is
        only written to ``beside``, whatever dims that has."""
        dtype = dtype_beside(self.value, beside.dtype, has_dims=copied or beside.ndim > 0)
        if not self._varies or dtype is None:
            return self.plain()
        if not self._uses.ours:
            self._uses.needed |= self._fixed
        return self.entry(beside.device).to(dtype)

    def entry(self, device: torch.device) -> Tensor:
        """An input of the graph: the number as a float64 without dims; one for all that are
        computed alike."""
        known = self._uses.entries.get((self.key, device))
        if known is not None:
            return known
        with outside_modes():
            tensor = torch.tensor(self.value, dtype=torch.float64, device=device)
        self._uses.inputs[id(tensor)] = self
        self._uses.entries[self.key, device] = tensor
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Where no mode is, as in a custom function's backward, what is done where one is."""
        number = _first((args, dict(kwargs or {})))
        mode = None if number is None else number.uses.mode
        if mode is None or isinstance(func, FunctionType):
            return func(*plain(args), **plain(dict(kwargs or {})))
        with mode():
            return func(*args, **(kwargs or {}))

    # every answer is one that the graph depends on
    def __bool__(self) -> bool:
        return bool(self.decided(bool, (self,)))

    def __float__(self) -> float:
        return float(self.real())

    def __int__(self) -> int:
        return int(self.real())

    def __index__(self) -> int:
        frame = sys._getframe(1)  # pyright: ignore
        if self._uses.as_size(self) is not None and self._uses.place_asked(frame) is None:
            self._uses.ask_index(self, frame)
            return operator.index(cast("int", self.value))
        self._uses.note_place(frame)
        value: Any = self.real()  # of one that is not an integer, an error of Python's
        return operator.index(value)

    def __hash__(self) -> int:
        frame = sys._getframe(1)  # pyright: ignore
        asked = self._uses.membership_asked(frame, self)
        if asked is None:
            self._uses.note_place(frame)
            return hash(self.plain())
        self.decided(asked, (self,))
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.shown())

    def __str__(self) -> str:
        return str(self.shown())

    def __format__(self, spec: str) -> str:
        return format(self.shown(), spec)

    def is_integer(self) -> object:
        """Whether it is an integer: a decision."""
        if not isinstance(self.value, float):
            return operator.methodcaller("is_integer")(self.plain())
        return self.applied(float.is_integer, (self,))

    def __round__(self, *digits: object) -> "Number":
        return self.derived(round, *map(_value, digits))

    def __trunc__(self) -> "Number":
        return self.derived(math.trunc)

    def __floor__(self) -> "Number":
        return self.derived(math.floor)

    def __ceil__(self) -> "Number":
        return self.derived(math.ceil)

    def __divmod__(self, other: Any) -> tuple[object, object]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[object, object]:
        return other // self, other % self

    def __array_ufunc__(
        self, function: Callable[..., object], how: str, *inputs: object, **options: object
    ) -> object:
        """NumPy's functions of numbers: numbers again, where nothing else is asked for."""
        if how == "__call__" and not options and all(is_number(e) or is_real(e) for e in inputs):
            return lead_of(inputs).applied(function, inputs)
        return getattr(function, how)(*map(_value, inputs), **plain(options))

    def __array__(self, *args: object, **kwargs: object) -> NDArray[np.generic]:
        return torch.tensor(self.plain()).numpy()

    def __copy__(self) -> "Number":
        return self

    def __deepcopy__(self, memo: object) -> "Number":
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return type(self.plain()), (self.value,)

    def _cast(self, dtype: DTypeLike) -> object:
        return self.applied(np.dtype(plain(dtype)).type, (self,))

    def __getattr__(self, name: str) -> Any:
        if name in ("item", "tolist") and isinstance(self.value, np.generic):
            return functools.partial(self.derived, _item)
        if name == "astype" and isinstance(self.value, np.generic):
            return self._cast
        return getattr(self.plain(), name)


def _item(value: np.generic) -> object:
    """Python's number."""
    return value.item()


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

    def both(
        function: Callable[..., PlainNumber], reflected: bool
    ) -> Callable[[Number, object], object]:
        def call(self: Number, other: object) -> object:
            if isinstance(other, Tensor):
                pair = (other, self) if reflected else (self, other)
                if function not in _SCALING:
                    return function(*plain(pair))
                return _SCALING[function](*pair)
            if isinstance(other, complex):
                return function(*plain((other, self) if reflected else (self, other)))
            return self.derived(function, other, reflected=reflected)

        return call

    for name, function in _PAIRS.items():
        setattr(Number, f"__{name}__", both(function, reflected=False))
        setattr(Number, f"__r{name}__", both(function, reflected=True))
    for name, function in {"neg": operator.neg, "pos": operator.pos, "abs": abs}.items():
        setattr(Number, f"__{name}__", lambda self, f=function: self.derived(f))


_give_arithmetic()


def _give_comparisons() -> None:
    """``a < 1`` is a decision; ``a < tensor`` is the tensor's own question."""

    def asked(function: Callable[..., object]) -> Callable[[Number, object], object]:
        def call(self: Number, other: object) -> object:
            of_size = self._uses.of_size
            if of_size is not None and is_symbol(other):
                other = of_size(other)
            is_later = is_number(other) and type(other) is not Number
            if isinstance(other, Tensor) or is_later:
                return NotImplemented
            if is_number(other) or isinstance(other, bool) or is_real(other):
                frame = sys._getframe(1)  # pyright: ignore
                if self._uses.only_warns(frame):
                    return False
                self._uses.note_extreme(frame)
                return self.decided(function, (self, other))
            return function(self.plain(), _value(other))

        return call

    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Number, f"__{name}__", asked(getattr(operator, name)))


_give_comparisons()


class StandIn(Protocol):
    """Stands for a value of Python's, which ``compute`` gives at a call."""

    value: object
    compute: Callable[[], object]
    roots: frozenset[Key]

    def plain(self) -> object:
        """The value, on which the graph depends from now on."""


class Text:
    """A Python text that stands for itself until something is asked of it. ``combined`` makes
    texts of texts and numbers."""

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

    @property
    def uses(self) -> Uses:
        """What becomes of it and of others."""
        return self._uses

    def plain(self) -> str:
        """The value, on which the graph depends from now on."""
        if not self._uses.ours:
            self._uses.needed |= self.roots
            self._uses.note_asked()
        return self.value

    def combined(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """``function`` of values, of which this text is one: a text again, if it is one."""
        return combined_text(function, operands, self._uses)

    def __add__(self, other: object) -> object:
        return self.combined(operator.add, (self, other))

    def __radd__(self, other: object) -> object:
        return self.combined(operator.add, (other, self))

    def __mul__(self, times: object) -> object:
        return self.combined(operator.mul, (self, times))

    __rmul__ = __mul__

    def __getitem__(self, at: object) -> object:
        parts = (at.start, at.stop, at.step) if isinstance(at, slice) else (at,)
        return self.combined(_entry, (self, isinstance(at, slice), *parts))

    def __getattr__(self, name: str) -> object:
        method = getattr(str, name, None)
        if method is None or name.startswith("__"):
            return getattr(self.plain(), name)
        return lambda *args: self.combined(method, (self, *args))

    def __copy__(self) -> "Text":
        return self

    def __deepcopy__(self, memo: object) -> "Text":
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return str, (self.plain(),)


def combined_text(
    function: Callable[..., object], operands: Sequence[object], uses: Uses
) -> object:
    """``function`` of values, of which some stand in: a text that stands in, if it gives one."""
    text = made_now(function, operands)
    if type(text) is not str:
        return function(*map(_value, operands))
    stand_ins = [operand for operand in operands if is_stand_in(operand)]
    roots = frozenset[Key]().union(*(stand_in.roots for stand_in in stand_ins))
    return Text(text, computation(function, operands), roots, uses)


def made_now(function: Callable[..., object], operands: Sequence[object]) -> object:
    """``function`` of what stands in this run. What it raises, eager raises as well."""
    return function(*map(value_now, operands))


def _entry(text: str, is_slice: bool, *parts: object) -> str:
    return operator.itemgetter(slice(*parts) if is_slice else parts[0])(text)


def _give_answers() -> None:
    names = (
        "str", "repr", "len", "iter", "hash", "eq", "ne", "lt", "le", "gt", "ge", "contains",
        "mod", "format",
    )  # fmt: skip
    for name in names:
        dunder = f"__{name}__"

        def call(self: Text, *args: object, _name: str = dunder) -> object:
            return getattr(self.plain(), _name)(*map(_value, args))

        setattr(Text, dunder, call)
    setattr(Text, "__fspath__", lambda self: self.plain())  # noqa: B010


_give_answers()


STAND_INS: set[type] = {Number, Text}
"""Classes of what stands in for something of Python's."""


def is_number(value: object) -> TypeGuard[Number]:
    """Whether it is a stand-in for a number. (``isinstance`` answers for the number itself.)"""
    return issubclass(type(value), Number)


def lead_of(operands: Sequence[object]) -> Number:
    """The number that decides for several: a deferred one, if there is any."""
    numbers = [operand for operand in operands if is_number(operand)]
    return next((number for number in numbers if type(number) is not Number), numbers[0])


def is_stand_in(value: object) -> TypeGuard[StandIn]:
    """Whether it is a stand-in for a number, a string or an array."""
    return type(value) in STAND_INS


def is_exact(value: object) -> bool:
    """Whether a float64, as which numbers are given to the graph, is equal to this one."""
    return not is_whole(value) or abs(int(value)) <= _LARGEST


def dtype_beside(value: PlainNumber, beside: torch.dtype, *, has_dims: bool) -> torch.dtype | None:
    """Of a 0-dim tensor that promotes as the number does, at no loss; ``None`` if there is none."""
    if not is_real(value) or beside.is_complex or beside is torch.bool:
        return None
    if not is_exact(value):
        return None
    if not beside.is_floating_point:
        return beside if is_whole(value) else None
    if has_dims:
        return torch.float64
    return beside if beside in (torch.float32, torch.float64) else None


def value_now(operand: object) -> object:
    """The value of a stand-in in this run; reading it here makes no dependency of the graph."""
    return operand.value if is_stand_in(operand) else operand


def computation(function: Callable[..., object], operands: Sequence[object]) -> Computation:
    """``function`` of the values of operands at a call."""
    parts = [operand.compute if is_stand_in(operand) else _always(operand) for operand in operands]
    return Computation(function, parts)


def operand_key(operand: object) -> Key:
    """A key that is equal for numbers with equal computations."""
    return operand.key if is_number(operand) else (type(operand), repr(operand))


def constant_of(part: Callable[[], object]) -> object:
    """The constant value of a part of a computation; ``None`` if it is computed."""
    if not isinstance(part, functools.partial):
        return None
    always = cast("functools.partial[object]", part)
    return always.args[0] if always.func is _itself else None


def _always(value: T) -> Callable[[], T]:
    return functools.partial(_itself, value)


def _itself(value: T) -> T:
    return value


def _value(other: object) -> object:
    return other.plain() if is_stand_in(other) else other


@overload
def plain(tree: Number) -> PlainNumber: ...
@overload
def plain(tree: T) -> T: ...
def plain(tree: object) -> object:
    """Lists, tuples and dicts with values in place of their stand-ins."""
    if is_stand_in(tree):
        return tree.plain()
    if type(tree) is list:
        return list(map(plain, tree))
    if type(tree) is tuple:
        return tuple(map(plain, tree))
    if type(tree) is dict:
        return {key: plain(value) for key, value in tree.items()}
    return tree


def sized(tree: object) -> Any:
    """Likewise, with sizes in the places of numbers that are some."""
    if is_number(tree):
        return tree.sized()
    if type(tree) is list or type(tree) is tuple:
        return type(tree)(map(sized, tree))
    if type(tree) is dict:
        return {key: sized(value) for key, value in tree.items()}
    return plain(tree)


def _first(tree: object) -> Number | None:
    """The first number that stands in, in lists, tuples and dicts."""
    if is_number(tree):
        return tree
    if type(tree) is dict:
        return _first(list(tree.values()))
    if type(tree) is not list and type(tree) is not tuple:
        return None
    return next((number for part in tree if (number := _first(part)) is not None), None)


def as_key(key: object) -> object:
    """A key of a dict without what stands in, on which the graph depends since it was hashed; the
    very key where nothing does."""
    inside = type(key) is tuple and any(as_key(part) is not part for part in key)
    return plain(key) if inside or is_stand_in(key) else key
