"""Numbers that a step reads from tensors: known after the launch.

::

    total += loss.item()        one more output of the graph; the sum is Python's, after the launch
    y = y * loss.item()         y = y * (a 0-dim tensor in the graph)

``Tensor.item`` returns a substitute for the later number. Python arithmetic with it gives another
substitute: an expression, which is computed on the host after the launch, or in the graph if a
tensor is made from it. Code that needs the number itself during capture raises TR-102.
"""

import builtins
import functools
import itertools
import math
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, NoReturn, TypeGuard, final

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.overrides import handle_torch_function

from treadle.capture.explain_errors import (
    BETWEEN,
    here,
    looks_at_value,
    show_line,
    users_frames,
)
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.arrays.array_functions import are_nests, of_nests
from treadle.capture.symbolic.arrays.arrays import SCALARS, ArrayLeaf
from treadle.capture.symbolic.branches.decisions import MOST_DECISIONS
from treadle.capture.symbolic.conversion_warnings import warn_of_float
from treadle.capture.symbolic.functions.index_ranges import calls_range
from treadle.capture.symbolic.functions.number_lists import NEEDS_ALL, caller_of_library
from treadle.capture.symbolic.number_forms import (
    COMPARISONS,
    GraphForm,
    graph_form,
    is_apart,
    is_close,
)
from treadle.capture.symbolic.numbers import (
    STAND_INS,
    Number,
    PlainNumber,
    Text,
    Uses,
    combined_text,
    computation,
    dtype_beside,
    is_number,
    lead_of,
    made_now,
)
from treadle.capture.symbolic.size_numbers import ROUND, as_number, is_size, made_of_sizes
from treadle.capture.symbolic.texts.text_code import makes_text
from treadle.compat.unsized import tensor_of_number
from treadle.util.errors import CaptureError
from treadle.util.frames.branch_analysis import called_name

_STDLIB = sysconfig.get_path("stdlib")


class AsksNumber(CaptureError):
    """TR-102, where code that calls a function of real numbers could be rewritten (see
    ``capture/symbolic/number_calls``). ``codes``: of the frames that run, innermost first."""

    codes: tuple[CodeType, ...]


def asks_number() -> CaptureError:
    """For code that needs a number now which is known after the launch."""
    frames = list(users_frames())
    error = looks_at_value(_where(frames))
    return _asks(frames, error) or error


def asks_size(frame: FrameType) -> AsksNumber | None:
    """For code in ``frame`` that needs the number of a size; ``None`` if it could not be
    rewritten."""
    frames = list(users_frames())
    if not frames or frames[0] is not frame:
        return None
    return _asks(frames, looks_at_value(_where(frames)))


def _asks(frames: Sequence[FrameType], error: CaptureError) -> AsksNumber | None:
    asking = caller_of_library(frames[0]) if frames else None
    frames = [*itertools.dropwhile(lambda frame: frame is not asking, frames)]
    if not frames or not (calls_real(frames[0]) or _makes_text(frames[0])):
        return None
    asks = AsksNumber(error.message, code=error.code, where=error.where, remedy=error.remedy)
    asks.codes = tuple(frame.f_code for frame in frames)
    return asks


def calls_real(frame: FrameType) -> bool:
    """Whether it calls a function of real numbers just now, by a global name, or what it calls may
    do so by ``map``."""
    name = called_name(frame)
    if "map" in frame.f_code.co_names:
        return True
    function = frame.f_globals.get(name, vars(builtins).get(name))
    makers = (*CONVERSIONS, *OF_NUMBERS, *MAKE_TEXTS, *NEEDS_ALL)
    return any(function is other for other in makers) or calls_range(frame)


def _makes_text(frame: FrameType) -> bool:
    return makes_text(frame.f_code, frame.f_lasti)


def _where(frames: Sequence[FrameType]) -> str:
    """The line that runs, below the user's where that is one of Python's own library."""
    inner = here()
    for frame in frames:
        if not frame.f_code.co_filename.startswith((*BETWEEN, _STDLIB)):
            own = show_line((frame.f_code.co_filename, frame.f_lineno))
            return inner if own == inner else f"{own}\n     in {inner}"
    return inner


@final
@dataclass(frozen=True, slots=True)
class NumbersOfCall:
    """What Python needs of a call's tensors: ``places`` are those numbers, in the order in which
    the graph returns them; ``known`` has their values once the launch is over. ``whole``: those
    that are tensors themselves."""

    places: tuple[int, ...]
    known: dict[int, Any]
    whole: frozenset[int] = frozenset()

    def read(self, tensors: Iterator[Tensor | None]) -> None:
        """``tensors`` begin with those that the graph returns for them, which are taken: one read
        for each dtype and device, or of each in the memory of the host, which takes no memory."""
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for place in self.places:
            returned = next(tensors)
            assert returned is not None
            if place in self.whole:
                self.known[place] = returned
                continue
            if returned.is_cpu:
                self.known[place] = returned.tolist()
                continue
            groups.setdefault((returned.dtype, returned.device), []).append((place, returned))
        for group in groups.values():
            values = torch.stack([tensor for _, tensor in group]).tolist()
            self.known.update(zip((place for place, _ in group), values, strict=True))


@final
@dataclass(eq=False)
class DeferredNumbers:
    """What a run reads from its tensors. ``read``: a copy of each, as it was when it was read;
    ``fetched``: which of them Python needs after the launch, in order. ``decide``: what a frame
    that asks whether a value is true is told; ``decide_numbers``: what 0-dim tensors are, which
    Python needs as whole numbers. ``require``: takes for granted that a 0-dim tensor is true; a
    call of which that is wrong is eager's."""

    decide: Callable[[Tensor, FrameType], bool | None]
    decide_numbers: Callable[[Sequence[Tensor]], Sequence[int] | None]
    require: Callable[[Tensor], None]
    is_rewritten: Callable[[CodeType], bool] = lambda _: True  # so that it needs no number
    known: dict[int, Any] = field(default_factory=dict[int, Any])
    read: list[Tensor] = field(default_factory=list[Tensor])
    fetched: list[int] = field(default_factory=list[int])
    whole: set[int] = field(default_factory=set[int])  # those that are tensors themselves
    uses: Uses = field(default_factory=Uses)
    refused: CaptureError | None = None
    # arguments of which arrays were made, in which version, and what is said if they are written
    unwritten: list[tuple[Tensor, int, CaptureError]] = field(
        default_factory=list[tuple[Tensor, int, CaptureError]]
    )

    def refuse(self) -> CaptureError:
        """For code that needs a number now: the first refusal of a run is kept."""
        return self._kept(self._asks())

    def _asks(self) -> CaptureError:
        asking = next(map(caller_of_library, users_frames()), None)
        if asking is not None and self.uses.note_call(asking):
            self.uses.note_asked(asking)
        return asks_number()

    def _kept(self, error: CaptureError) -> CaptureError:
        self.refused = self.refused or error
        return error

    def on_path(self, numbers: Sequence["DeferredNumber"]) -> Sequence[int]:
        """What these are along the path of this run (see ``branches/decisions``), for code that
        needs one of them now; TR-102 where that is not known."""
        error, answers = self._asks(), None
        tensors = [number.exactly() for number in numbers]
        if not (isinstance(error, AsksNumber) and self.is_rewritten(error.codes[0])):
            known = [tensor for tensor in tensors if tensor is not None]
            answers = self.decide_numbers(known) if len(known) == len(tensors) else None
        if answers is None:
            raise self._kept(error)
        return answers

    def check(self) -> None:
        """After the step: a refusal that somebody's ``except`` has caught is raised all the same.
        Eager raises nothing there, so what ran in its place is not the step."""
        if self.refused is not None:
            raise self.refused
        unwritten, self.unwritten = self.unwritten, []
        for tensor, version, error in unwritten:
            if tensor._version != version:
                raise error

    def item(self, tensor: Tensor) -> "DeferredNumber":
        """``tensor.item()`` of one element; TR-102 of a complex one."""
        if tensor.is_complex():
            raise looks_at_value(here())
        with torch.no_grad():
            kept = tensor.detach().reshape(()).clone()
        number = len(self.read)
        self.read.append(kept)
        known = self.known
        return DeferredNumber(
            _kind(kept.dtype),
            functools.partial(operator.getitem, known, number),
            self,
            (number,),
            lambda: _widened(kept),
        )

    def tensor(self, tensor: Tensor) -> "DeferredTensor":
        """The tensor as it is now, for a text of it."""
        with torch.no_grad():
            number, known = self.keep(tensor.clone()), self.known
        compute = functools.partial(operator.getitem, known, number)
        return DeferredTensor(tensor, compute, self, (number,))

    def keep(self, tensor: Tensor) -> int:
        """One that Python has when the step is done, as it is then."""
        self.read.append(tensor.detach())
        self.whole.add(len(self.read) - 1)
        return len(self.read) - 1

    def of_size(self, size: SymInt | SymFloat | SymBool) -> "DeferredNumber":
        """A number that sizes decide which values decide."""
        return self.item(tensor_of_number(size))

    def tolist(self, tensor: Tensor) -> object:
        """``tensor.tolist()``: nested lists of numbers."""
        numbers: list[DeferredNumber] = []

        def listed(part: Tensor) -> object:
            if part.ndim:
                return [listed(part.select(0, at)) for at in range(part.shape[0])]
            numbers.append(self.item(part))
            return numbers[-1]

        nested = listed(tensor)
        for number in numbers:
            number.listed = numbers
        return nested

    def fetch(self, number: "Deferred") -> None:
        """Python needs this one after the launch."""
        self.fetched += [part for part in number.parts if part not in self.fetched]

    def of_call(self) -> NumbersOfCall:
        """Those that Python needs, at any call."""
        return NumbersOfCall(tuple(self.fetched), self.known, frozenset(self.whole))

    def fetched_tensors(self) -> list[Tensor]:
        """What the graph returns for them."""
        return [self.read[at] for at in self.fetched]


class DeferredNumber(Number):
    """A number that ``compute()`` knows once the launch is over. ``parts``: of what was read those
    numbers that it is made of; ``in_graph()``: it as a tensor of float64, int64 or bool. A whole
    number is ``base`` and ``ahead`` more. ``is_exact``: the graph has it to the last bit.
    ``listed``: those of one list of a tensor's, and ``answer``: what it is along the path of the
    run, once Python has needed one of them."""

    __slots__ = ("ahead", "answer", "base", "deferred", "in_graph", "is_exact", "listed", "parts")

    def __init__(
        self,
        kind: type,
        compute: Callable[[], object],
        deferred: DeferredNumbers,
        parts: tuple[int, ...],
        in_graph: Callable[[], Tensor] | None,
    ) -> None:
        super().__init__(kind(0), compute, frozenset(), deferred.uses, scales=True)
        self.deferred = deferred
        self.parts = parts
        self.in_graph = in_graph
        self.is_exact = True
        self.base: DeferredNumber = self
        self.ahead = 0
        self.listed: Sequence[DeferredNumber] = (self,)
        self.answer: int | None = None

    def plain(self) -> PlainNumber:
        """What it is along the path of the run, if it is whole; TR-102 of another one: there is no
        number yet."""
        base = self.base
        if base.answer is None:
            together = base.listed if len(base.listed) <= MOST_DECISIONS else (base,)
            answers = self.deferred.on_path(together)
            for number, answer in zip(together, answers, strict=True):
                number.answer = answer
        assert base.answer is not None
        return type(self.value)(base.answer + self.ahead)

    def exactly(self) -> Tensor | None:
        """``in_graph()`` of a whole number that the graph has to the last bit."""
        is_whole = isinstance(self.value, int) and self.is_exact
        return self.in_graph() if is_whole and self.in_graph is not None else None

    def combined(self, function: Callable[..., object], operands: Sequence[object]) -> Number:
        """``function`` of numbers, of which one at least is deferred; so is the result."""
        if function is type(self.value) and len(operands) == 1:  # ``float`` of a float
            return self
        known = [operand for operand in operands if is_deferred(operand)]
        form = _usable_graph_form(function, operands)
        result = DeferredNumber(
            _kind_of_result(function, operands),
            computation(function, operands),
            self.deferred,
            tuple(dict.fromkeys(at for number in known for at in number.parts)),
            None if form is None else _graph_form(function, operands, self.deferred, form),
        )
        result.is_exact = (form is None or form.is_exact) and all(
            number.is_exact for number in known
        )
        distance = _distance(function, operands)
        if distance is not None:
            result.base, result.ahead = known[0].base, known[0].ahead + distance
        return result

    def applied(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """A number again, whatever it is."""
        return self.combined(function, operands)

    def decided(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """A number again, until somebody asks whether it is true."""
        return self.combined(function, operands)

    def tensor(self, beside: Tensor, *, copied: bool = False) -> "Tensor | PlainNumber":
        """A 0-dim tensor of it for arithmetic with ``beside``; TR-102 where there is none."""
        dtype = dtype_beside(self.value, beside.dtype, has_dims=copied or beside.ndim > 0)
        if dtype is None or self.in_graph is None:
            return self.plain()
        return self.in_graph().to(device=beside.device, dtype=dtype)

    def __bool__(self) -> bool:
        """The answer that does not only raise; TR-102 where both go on."""
        answer, frame = None, sys._getframe(1)
        self.uses.note_extreme(frame)
        if self.in_graph is not None:
            answer = self.deferred.decide(self.in_graph(), frame)
        return bool(self.plain()) if answer is None else answer

    def __getattr__(self, name: str) -> object:
        if hasattr(type(self.value), name):
            return getattr(self.plain(), name)
        kind = type(self.value).__name__
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return type(self.value), (self.plain(),)


@final
class DeferredText(Text):
    """A text that ``compute()`` knows once the launch is over. ``value``: one like it."""

    __slots__ = ("deferred", "parts")

    def __init__(
        self,
        like: str,
        compute: Callable[[], str],
        deferred: DeferredNumbers,
        parts: tuple[int, ...],
    ) -> None:
        super().__init__(like, compute, frozenset(), deferred.uses)
        self.deferred = deferred
        self.parts = parts

    def plain(self) -> NoReturn:
        """TR-102: there is no text yet."""
        raise self.deferred.refuse()

    def combined(self, function: Callable[..., object], operands: Sequence[object]) -> object:
        """``function`` of values, of which this text is one: known later, if it is a text.
        Another text than this one may raise nothing, where this one does."""
        try:
            return text_of(function, operands)
        except (ArithmeticError, LookupError, ValueError):
            return self.plain()


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeferredTensor:
    """A tensor that Python has once the launch is over. ``value``: the traced one."""

    value: Tensor
    compute: Callable[[], Tensor]
    deferred: DeferredNumbers
    parts: tuple[int, ...]
    roots: frozenset[object] = frozenset()

    def plain(self) -> NoReturn:
        """TR-102: there is no tensor yet."""
        raise self.deferred.refuse()


LATER: set[type] = {DeferredNumber, DeferredText, DeferredTensor}
"""Classes of what is known after the launch."""
STAND_INS.update(LATER)
Deferred = DeferredNumber | DeferredText | DeferredTensor


def text_of(function: Callable[..., object], operands: Sequence[object]) -> object:
    """``function`` of values, some of which stand in: a text that stands in, if it gives one."""
    later = [operand for operand in operands if is_known_later(operand)]
    if not later:
        return combined_text(function, operands, _uses_of(operands))
    like = "" if any(map(_is_tensor, later)) else made_now(function, operands)
    if type(like) is not str:
        return later[0].plain()
    parts = tuple(dict.fromkeys(at for operand in later for at in operand.parts))
    return DeferredText(like, computation(function, operands), later[0].deferred, parts)


def number_of(function: Callable[[str], PlainNumber], text: Text) -> Number:
    """``len``, ``float`` or ``int`` of a text that stands in: a number that does so."""
    compute = computation(function, (text,))
    if type(text) is not DeferredText:
        return Number(function(text.value), compute, text.roots, text.uses, scales=True)
    try:
        kind = type(function(text.value))
    except ValueError:  # of another text it may be a number
        return text.plain()
    return DeferredNumber(kind, compute, text.deferred, text.parts, None)


def whole_tensor(tensor: Tensor) -> object:
    """What stands in for it until the launch is over."""
    return handle_torch_function(whole_tensor, (tensor,), tensor)


def _uses_of(operands: Sequence[object]) -> Uses:
    return next(
        operand.uses for operand in operands if isinstance(operand, Number | Text | ArrayLeaf)
    )


def _is_tensor(value: Deferred) -> bool:
    return type(value) is DeferredTensor


def is_known_later(value: object) -> TypeGuard[Deferred]:
    """Is it known after the launch?"""
    return type(value) in LATER


def _graph_form(
    function: Callable[..., object],
    operands: Sequence[object],
    deferred: DeferredNumbers,
    form: GraphForm,
) -> Callable[[], Tensor]:
    """``function`` of 0-dim tensors. What it takes for granted is required where it is computed."""
    known = [operand for operand in operands if is_deferred(operand)]
    device = deferred.read[known[0].parts[0]].device
    is_float = form.of_floats or any(isinstance(operand, float) for operand in operands)
    dtype = torch.float64 if is_float else torch.int64
    is_close = function in COMPARISONS and not all(number.is_exact for number in known)

    def compute() -> Tensor:
        with torch.no_grad():
            tensors = [_as_tensor(operand, dtype, device) for operand in operands]
            result = form.compute(*tensors)
            if form.holds is not None:
                deferred.require(form.holds(result, *tensors))
            if is_close:
                deferred.require(is_apart(*tensors))
            return result

    return compute


def _usable_graph_form(
    function: Callable[..., object], operands: Sequence[object]
) -> GraphForm | None:
    """The form of ``function``, if the operands are in the graph, to the last bit where that may
    decide."""
    form = graph_form(function, operands)
    known = [operand for operand in operands if is_deferred(operand)]
    if form is None or any(number.in_graph is None for number in known):
        return None
    return None if form.is_stepped and not all(number.is_exact for number in known) else form


def number_in(tensor: Tensor) -> object:
    """The number that a tensor is; the tensor, where Python says that it is none."""
    return tensor.item() if tensor.numel() == 1 else tensor


def _of_numbers(function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        for arg in args:
            warn_of_float(arg)
        args = tuple(number_in(arg) if isinstance(arg, Tensor) else arg for arg in args)
        if function in ROUND and any(map(is_size, args)):
            return made_of_sizes(function, args, lambda: function(*args))
        args = tuple(map(as_number, args))
        numbers = all(is_number(arg) or is_real(arg) for arg in (*args, *kwargs.values()))
        if numbers and any(map(is_number, args)):
            if function is _ISCLOSE and len(args) == 2:
                return lead_of(args).applied(is_close, (*args, *_tolerances(**kwargs)))
            if not kwargs:
                return lead_of(args).applied(function, args)
        if are_nests(args, kwargs):
            return of_nests(function, args, kwargs)
        return function(*args, **kwargs)

    return call


_ISCLOSE = math.isclose


def _tolerances(*, rel_tol: object = 1e-9, abs_tol: object = 0.0) -> tuple[object, object]:
    """Those of ``math.isclose``."""
    return rel_tol, abs_tol


MAKE_TEXTS: tuple[Callable[..., object], ...] = (str, repr, ascii, format, print)
CONVERSIONS: tuple[Callable[..., PlainNumber], ...] = (float, int, len, *SCALARS)
"""What takes or gives no number but a real one, of tensors too."""
OF_NUMBERS: Mapping[Callable[..., object], Callable[..., object]] = {
    function: _of_numbers(function)
    for function in vars(math).values()
    if isinstance(function, BuiltinFunctionType)
}
"""The functions of ``math``, which take real numbers alone, and what gives numbers that stand in of
such numbers."""


def functions_of_numbers() -> list[tuple[ModuleType, str, Callable[..., object]]]:
    """In the places of those of ``math``."""
    return [(math, function.__name__, instead) for function, instead in OF_NUMBERS.items()]


def is_deferred(value: object) -> TypeGuard[DeferredNumber]:
    """Is it a number that is known after the launch?"""
    return type(value) is DeferredNumber


def _distance(function: Callable[..., object], operands: Sequence[object]) -> int | None:
    """By how much ``function`` moves the one number among whole ones that is deferred, if it does
    no more."""
    whole = [operand for operand in operands if isinstance(operand, int)]
    plain = [number for number in whole if not is_number(number)]
    if len(operands) != 2 or len(whole) != 2 or len(plain) != 1:
        return None
    if function is operator.add:
        return int(plain[0])
    return -int(plain[0]) if function is operator.sub and plain[0] is operands[1] else None


def _kind(dtype: torch.dtype) -> type:
    """Python's type of an element."""
    if dtype is torch.bool:
        return bool
    return float if dtype.is_floating_point else int


def _kind_of_result(function: Callable[..., object], operands: Sequence[object]) -> type:
    """By samples in the place of numbers that are not known."""
    error: Exception | None = None
    for sample in (1, 2, 0.5, 0):
        try:
            values = [type(e.value)(sample) if is_number(e) else e for e in operands]
            return type(function(*values))
        except (ArithmeticError, ValueError) as failed:
            error = failed
    assert error is not None
    raise error


def _widened(tensor: Tensor) -> Tensor:
    """As exact as Python has it."""
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)


def _as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim tensor of a number: one that is known later, one of this call's, or any other."""
    if is_deferred(value):
        assert value.in_graph is not None
        return value.in_graph().to(device=device, dtype=dtype)
    if is_number(value):
        value = value.tensor(torch.empty((), dtype=dtype, device=device))
    if isinstance(value, Tensor):
        return value.to(dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _give_comparisons() -> None:
    def compared(
        function: Callable[..., PlainNumber],
    ) -> Callable[[DeferredNumber, object], object]:
        def call(self: DeferredNumber, other: object) -> object:
            return self.derived(function, other)

        return call

    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(DeferredNumber, f"__{name}__", compared(getattr(operator, name)))


_give_comparisons()
