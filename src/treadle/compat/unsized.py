"""Sizes while a trace runs: symbols; those that depend on values have no number yet."""

import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeGuard, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from treadle.compat.fake import is_of_values
from treadle.util.package import folder_of

Symbol = SymInt | SymFloat | SymBool
_SAMPLE = 64
ASKING_FILES = frozenset(str(sys.modules[name].__file__) for name in (SymNode.__module__, "torch"))
"""Where conditions on sizes, and numbers that are sizes, are asked for by Python's code."""
Decide = Callable[[SymBool, bool, FrameType | None], bool | None]
"""The answer of a condition on sizes, if there may be one. Given also: the one that is likely, and
the frame that asks, where that is not an operation of PyTorch's."""
MadeOfSizes = Callable[
    [FrameType, Callable[..., Any], tuple[object, ...], Callable[[], object]], object
]
"""What Python's function of sizes gives in a frame; given also: what it gives otherwise."""


def size_decisions(
    decide: Decide, number: Callable[[SymInt], int], asked: Callable[[FrameType | None], None]
) -> Iterator[tuple[type, str, Callable[..., object]]]:
    """What to put where (owner, name, value) while a step is traced: asked for a condition on
    sizes that values decide, a trace goes on by what ``decide`` says; where such a size must be a
    number, by the ``number`` that it is. Not where an operation asks whose result is not in the
    graph yet. ``asked``: is told of a frame that needs the number of a size which arguments
    have."""
    answer_now: Callable[..., bool] = vars(SymNode)["guard_bool"]
    number_now: Callable[..., int] = vars(SymNode)["guard_int"]
    float_now: Callable[..., float] = vars(SymNode)["guard_float"]

    def guard_bool(node: SymNode, file: str, line: int) -> bool:
        condition = SymBool(node)
        if not _asks(node) or _is_known(condition):
            return answer_now(node, file, line)
        answer = decide(condition, _likely(condition), None if file else _asking())
        if answer is None:
            return answer_now(node, file, line)
        torch._check(condition if answer else torch.sym_not(condition))
        return answer

    def guard_int(node: SymNode, file: str, line: int) -> int:
        if not file and get_proxy_mode() is not None and node.expr.free_symbols:
            if _is_of_values(node):
                size = SymInt(node)
                found = number(size)
                torch._check(size == found)
                return found
            asked(_asking())
        return number_now(node, file, line)

    def guard_float(node: SymNode, file: str, line: int) -> float:
        if not file and get_proxy_mode() is not None and node.expr.free_symbols:
            asked(_asking())
        return float_now(node, file, line)

    yield SymNode, "guard_bool", guard_bool
    yield SymNode, "guard_float", guard_float
    yield SymNode, "guard_int", guard_int


def size_arithmetic(
    made: MadeOfSizes,
    asks: Callable[[FrameType], bool],
    alone: Callable[[Any], Any],
    as_number: Callable[[object], object],
) -> Iterator[tuple[type, str, Callable[..., object]]]:
    """Likewise: Python's arithmetic with sizes gives what ``made`` does; a text or a hash is of the
    number that a size is ``alone``, where ``asks`` says so of the frame that asks; NumPy's
    functions are given what ``as_number`` does."""

    def of_python(
        original: Callable[..., object], function: Callable[..., object], *, reflected: bool
    ) -> Callable[..., object]:
        def call(size: Symbol, *others: object) -> object:
            operands = (*others, size) if reflected else (size, *others)
            return made(_asker(), function, operands, lambda: original(size, *others))

        return call

    def text(function: Callable[..., str], original: Callable[..., str]) -> Callable[..., str]:
        def call(size: Symbol, *rest: object) -> str:
            return function(alone(size), *rest) if asks(_asker()) else original(size, *rest)

        return call

    def hashed(size: SymInt) -> int:
        frame = _asker()
        if frame.f_code.co_filename.startswith(_TORCH) and size.node.expr.free_symbols:
            return hash_now(size)
        asks(frame)
        return hash(alone(size))

    hash_now: Callable[..., int] = vars(SymInt)["__hash__"]

    def of_numpy(
        _: Symbol, function: Callable[..., object], how: str, *inputs: object, **options: Any
    ) -> object:
        return getattr(function, how)(*map(as_number, inputs), **options)

    for owner in (SymInt, SymFloat):
        for name, function in _ARITHMETIC.items():
            for reflected in (False, True):
                method = f"__{'r' * reflected}{name}__"
                if method in vars(owner):
                    yield (
                        owner,
                        method,
                        of_python(vars(owner)[method], function, reflected=reflected),
                    )
        yield owner, "__array_ufunc__", of_numpy
    for owner in (SymInt, SymFloat, SymBool):
        for name, function in {"str": str, "repr": repr, "format": format}.items():
            yield owner, f"__{name}__", text(function, getattr(owner, f"__{name}__"))
    yield SymInt, "__hash__", hashed


_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
    "neg": operator.neg, "abs": abs, "floor": math.floor, "ceil": math.ceil,
    "trunc": math.trunc, "round": round, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


_TORCH = folder_of(torch)


def is_symbol(value: object) -> TypeGuard[Symbol]:
    """Whether it is a number, or an answer, that sizes decide."""
    return isinstance(value, SymInt | SymFloat | SymBool)


def trace_of(symbol: Symbol) -> object:
    """The environment of the symbols that it is made of."""
    return symbol.node.shape_env


def is_unsized(value: object) -> TypeGuard[Symbol]:
    """Whether it is a number, or an answer, that sizes decide which values decide."""
    return is_symbol(value) and _is_of_values(value.node)


def tensor_of_number(number: Symbol) -> Tensor:
    """It in the graph."""
    kind = {SymInt: torch.int64, SymFloat: torch.float64, SymBool: torch.bool}[type(number)]
    given: Any = number
    return torch.scalar_tensor(given, dtype=kind)


def squeezed(tensor: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """``tensor.squeeze(dim)``, of which it is decided whether sizes that values decide are one:
    PyTorch takes them for others."""
    given = range(tensor.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = sorted(each % tensor.ndim for each in given if -tensor.ndim <= each < tensor.ndim)
    ones = [each for each in dims if is_unsized(tensor.shape[each]) and tensor.shape[each] == 1]
    if not ones:
        return tensor.squeeze() if dim is None else tensor.squeeze(dim)  # type: ignore[arg-type]
    for each in reversed(ones):
        tensor = tensor.select(each, 0)
    left = [each - sum(one < each for one in ones) for each in dims if each not in ones]
    return tensor.squeeze(tuple(left))


_LISTED: Mapping[Callable[..., object], int] = {
    torch.unbind: 1, Tensor.unbind: 1, torch.chunk: 2, Tensor.chunk: 2, torch.split: 2,
    Tensor.split: 2, torch.tensor_split: 2, Tensor.tensor_split: 2,
}  # fmt: skip
"""What gives a list of parts along a dim, with the place of the dim among the arguments."""


def ask_length(
    function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, object]
) -> None:
    """Ask how long the dim is along which ``function`` would give a list, where values decide that:
    the trace cannot be asked within it."""
    place = _LISTED.get(function)
    if place is None or not args:
        return
    tensor, dim = args[0], kwargs.get("dim", args[place] if len(args) > place else 0)
    if tensor.ndim and isinstance(dim, int) and -tensor.ndim <= dim < tensor.ndim:
        length = tensor.shape[dim]
        if is_unsized(length):
            operator.index(cast("SymInt", length))


def length_of(tensor: Tensor) -> int | SymInt:
    """``len(tensor)``, of which Python makes a number."""
    return tensor.shape[0] if tensor.ndim else len(tensor)


def _asks(node: SymNode) -> bool:
    return get_proxy_mode() is not None and _is_of_values(node)


def _is_of_values(node: Any) -> bool:
    return any(map(is_of_values, node.expr.free_symbols))


def _is_known(condition: SymBool) -> bool:
    """Whether one answer holds for all sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # late: imports sympy

    either = (condition, torch.sym_not(condition))
    return any(map(statically_known_true, either))


def _likely(condition: SymBool) -> bool:
    """Of sizes that are neither none nor many."""
    expression: Any = condition.node.expr
    return bool(expression.xreplace(dict.fromkeys(expression.free_symbols, _SAMPLE)))


def _asker() -> FrameType:
    """The frame that asks a method of a size: behind it and what knows whose thread it is."""
    frame = inspect.currentframe()
    for _ in range(3):
        assert frame is not None
        frame = frame.f_back
    assert frame is not None
    return frame


def _asking() -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename not in ASKING_FILES:
        frame = frame.f_back  # what stands around this
    while frame is not None and frame.f_code.co_filename in ASKING_FILES:
        frame = frame.f_back
    return frame
