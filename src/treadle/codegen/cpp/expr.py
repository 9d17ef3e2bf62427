"""Scalar formulas as C++ text: one statement per operation, equal statements once.

::

    add(load x[64*r + c], 1.0)   ->   const float x0 = b0[c + i0];      // i0 = 64*r, outside
                                      const float x1 = x0 + 1.0f;
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from treadle.algebra.extents import Size, is_zero, same, surely_less
from treadle.algebra.index import Axis, FloorDiv, Index, Mod, Value
from treadle.codegen.contraction import CONTRACTED
from treadle.loop.expr import (
    FLOAT8,
    Apply,
    Const,
    Expr,
    Load,
    Local,
    Position,
    formula_of,
    values_of,
)
from treadle.loop.functions import shift_of
from treadle.loop.traverse import operands_of
from treadle.util.errors import LoweringError, require

VALUE_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
    torch.float8_e4m3fn: "float",
    torch.float8_e5m2: "float",
}
STORED_TYPES: Mapping[torch.dtype, str] = {
    **VALUE_TYPES,
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "uint8_t",
    torch.float8_e4m3fn: "uint8_t",
    torch.float8_e5m2: "uint8_t",
}
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "bitand": "&", "bitor": "|", "bitxor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
_CALLS = {
    "abs": "t_abs", "exp": "t_exp", "expm1": "t_expm1", "log": "t_log", "log1p": "t_log1p",
    "log2": "t_log2", "sqrt": "t_sqrt", "sin": "t_sin", "cos": "t_cos", "tanh": "t_tanh",
    "erf": "t_erf", "erfc": "t_erfc", "sigmoid": "t_sigmoid", "floor": "t_floor", "ceil": "t_ceil",
    "round": "t_round", "trunc": "t_trunc", "sign": "t_sign", "floordiv": "t_floordiv",
    "mod": "t_mod", "pow": "t_pow", "minimum": "t_min", "maximum": "t_max", "fmod": "t_fmod",
    "same": "t_same",
}  # fmt: skip
_UNSIGNED = {torch.int64: "uint64_t", torch.int32: "uint32_t"}
"""Where sums and products may wrap as in PyTorch; signed ones may not in C++."""
_HALF = {
    torch.bfloat16: "to_bf16",
    torch.float16: "to_f16",
    torch.float8_e4m3fn: "to_e4m3",
    torch.float8_e5m2: "to_e5m2",
}


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A C++ constant of the register type of ``dtype``."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if isinstance(value, Size):
        return f"(({VALUE_TYPES[dtype]}){value})"
    if not dtype.is_floating_point:
        return f"(({VALUE_TYPES[dtype]}){int(value)}LL)" if value > -(2**63) else "INT64_MIN"
    number = float(torch.tensor(value, dtype=dtype).item())
    suffix = "" if dtype is torch.float64 else "f"
    if math.isnan(number):
        return "((float)NAN)" if suffix else "((double)NAN)"
    if math.isinf(number):
        word = "(float)INFINITY" if suffix else "(double)INFINITY"
        return f"({'-' if number < 0 else ''}{word})"
    return f"({number!r}{suffix})"


def wide(n: int) -> str:
    """A number of 64 bits; a size of the call is one already."""
    return f"{n}" if isinstance(n, Size) else f"{n}LL"


@dataclass
class Scope:
    """Statements that run at one depth of the nest, and the names they define."""

    lines: list[str] = field(default_factory=list[str])
    names: dict[object, str] = field(default_factory=dict[object, str])


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """Names of its factors, and where these are defined."""

    scope: Scope
    x: str
    y: str


@dataclass
class CppWriter:
    """Writes formulas into scopes, one per depth of the nest: what a loop does not change is
    computed outside it.

    ``depths`` says which loop an axis belongs to, 0 the outermost; ``local`` gives the text of a
    value that the kernel computed before, ``local_depth`` the loop it varies with. ``summed``:
    what is only added to others; a sum takes in such a product before it rounds. One that is used
    otherwise is rounded for all its users: else ``y - y`` would be its rounding error. ``staged``
    and ``lanes``: what was read before, into small arrays as it lies in memory and as values.
    """

    names: Mapping[Axis, str]
    depths: Mapping[Axis, int]
    buffers: Mapping[str, str]
    local: Callable[[str], str]
    local_depth: Callable[[str], int]
    summed: frozenset[Expr] = frozenset()
    staged: Mapping[tuple[str, Index], str] = field(default_factory=dict[tuple[str, Index], str])
    lanes: dict[Load, str] = field(default_factory=dict[Load, str])
    numbers: Iterator[int] = field(default_factory=itertools.count)
    scopes: list[Scope] = field(default_factory=list[Scope])
    _known: dict[int, tuple[Expr, int]] = field(default_factory=dict[int, tuple[Expr, int]])
    _products: dict[Expr, "_Product"] = field(default_factory=dict[Expr, "_Product"])

    def __post_init__(self) -> None:
        self.scopes = [Scope() for _ in range(max(self.depths.values()) + 1)]

    @property
    def inner(self) -> list[str]:
        """The statements of the innermost loop."""
        return self.scopes[-1].lines

    def value(self, expr: Expr) -> str:
        """The name or literal that holds ``expr``."""
        match expr:
            case Const(value, dtype):
                return literal(value, dtype)
            case Local(name, _):
                return self.local(name)
            case Position(index):
                return f"((int64_t)({self.index(index)}))"
            case Load(_, _, dtype, _):
                return self._name(self._load(expr), dtype, self.depth(expr))
            case Apply(fn, operands, dtype):
                values = [self.value(operand) for operand in operands]
                text = self._contracted(expr, values) or _applied(fn, values, expr)
                depth = self.depth(expr)
                if fn == "mul" and expr in self.summed:
                    self._products[expr] = _Product(self.scopes[depth], values[0], values[1])
                return self._name(text, dtype, depth)
            case _:
                raise LoweringError("a reduction inside a formula", code="TR-391")

    def _contracted(self, expr: Apply, values: Sequence[str]) -> str:
        """A sum or difference, rounded once, of which one operand is a product; else nothing."""
        if expr.fn not in ("add", "sub") or expr.dtype not in CONTRACTED:
            return ""
        sign = "-" if expr.fn == "sub" else ""
        one, other = map(self._product, expr.operands)
        if other is not None:  # the later one: where loops are apart, the sum stands in its own
            return f"t_fma({sign}{other.x}, {other.y}, {values[0]})"
        return "" if one is None else f"t_fma({one.x}, {one.y}, {sign}{values[1]})"

    def _product(self, expr: Expr) -> "_Product | None":
        """Of an operand that is one, where its factors still have their names."""
        found = self._products.get(expr)
        is_here = found is not None and any(scope is found.scope for scope in self.scopes)
        return found if is_here else None

    def _load(self, load: Load) -> str:
        if load in self.lanes:
            return self.lanes[load]
        staged = self.staged.get((load.buffer, load.index))
        place = staged or f"{self.buffers[load.buffer]}[{self.index(load.index)}]"
        text = _loaded(place, load.dtype)
        if load.mask is None:
            return text
        zero = literal(False if load.dtype is torch.bool else 0, load.dtype)
        return f"{self.value(load.mask)} ? {text} : {zero}"

    def depth(self, expr: Expr) -> int:
        """The innermost loop that changes ``expr``."""
        known = self._known.get(id(expr))
        if known is not None:
            return known[1]
        match expr:
            case Const():
                depth = 0
            case Local(name, _):
                depth = self.local_depth(name)
            case Position(index):
                depth = self.index_depth(index)
            case _:
                depth = max((self.depth(operand) for operand in operands_of(expr)), default=0)
                if isinstance(expr, Load):
                    depth = max(depth, self.index_depth(expr.index))
        self._known[id(expr)] = (expr, depth)
        return depth

    def index_depth(self, index: Index) -> int:
        """How many loops deep an index changes."""
        axes = [self.depths[axis] for axis in index.axes]
        return max([*axes, *(self.depth(value) for value in values_of(index))], default=0)

    def index(self, index: Index) -> str:
        """``c + i0`` where ``i0 = 64*r + 3`` is computed once per row."""
        parts: list[list[str]] = [[] for _ in self.scopes]
        for atom, k in index.terms:
            text = self._atom(atom)
            depth = self.index_depth(Index(0, ((atom, 1),)))
            parts[depth].append(text if same(k, 1) else f"{wide(k)}*{text}")
        if not is_zero(index.const):
            parts[0].append(wide(index.const))
        outside = ""
        for depth, terms in enumerate(parts[:-1]):
            texts = [*terms, *([outside] if outside else [])]
            if terms:
                outside = " + ".join(texts)
                if len(texts) > 1 or "*" in outside:
                    outside = self._name(outside, torch.int64, depth, "i")
        return " + ".join([*parts[-1], *([outside] if outside else [])]) or "0LL"

    def _atom(self, atom: Axis | FloorDiv | Mod | Value) -> str:
        match atom:
            case Axis():
                return self.names[atom]
            case FloorDiv():
                return self._division(atom.index, atom.n, "/", "t_floordiv")
            case Mod():
                return self._division(atom.index, atom.n, "%", "t_mod")
            case Value():
                return f"(int64_t){self.value(formula_of(atom))}"

    def _division(self, index: Index, n: int, sign: str, signed: str) -> str:
        inside, depth = self.index(index), self.index_depth(index)
        low, high = index.bounds
        text = f"({inside}) {sign} {wide(n)}"
        if not surely_less(-1, low):
            text = f"{signed}((int64_t)({inside}), (int64_t){n})"
        elif surely_less(high, 2**31):
            text = f"(int64_t)((uint32_t)({inside}) {sign} (uint32_t){n})"
        return self._name(text, torch.int64, depth, "i")

    def _name(self, text: str, dtype: torch.dtype, depth: int, letter: str = "x") -> str:
        """The variable for ``text``, defined now if no loop around has it."""
        require(dtype in VALUE_TYPES, LoweringError(f"C++ code of {dtype}", code="TR-392"))
        for scope in self.scopes[: depth + 1]:
            if (text, dtype) in scope.names:
                return scope.names[text, dtype]
        name = f"{letter}{next(self.numbers)}"
        self.scopes[depth].names[text, dtype] = name
        self.scopes[depth].lines.append(f"const {VALUE_TYPES[dtype]} {name} = {text};")
        return name


def _loaded(text: str, dtype: torch.dtype) -> str:
    if dtype is torch.bfloat16:
        return f"bf16_up({text})"
    if dtype is torch.float16:
        return f"(float){text}"
    if dtype in FLOAT8:
        return f"{FLOAT8[dtype]}_up({text})"
    return f"({text} != 0)" if dtype is torch.bool else text


def stored(text: str, dtype: torch.dtype) -> str:
    """A register value as it lies in memory; half values are rounded already."""
    if dtype is torch.bfloat16:
        return f"bf16_down({text})"
    if dtype is torch.float16:
        return f"(f16){text}"
    if dtype in FLOAT8:
        return f"{FLOAT8[dtype]}_down({text})"
    return f"(uint8_t){text}" if dtype is torch.bool else text


def _applied(fn: str, values: list[str], expr: Apply) -> str:
    source = expr.operands[-1].dtype
    if fn == "cast":
        return _cast(values[0], source, expr.dtype)
    text = _text(fn, values, expr)
    if expr.dtype in _HALF and fn not in ("where", "neg", "abs", "minimum", "maximum"):
        return f"{_HALF[expr.dtype]}({text})"
    if expr.dtype in VALUE_TYPES and not expr.dtype.is_floating_point:
        return f"({VALUE_TYPES[expr.dtype]})({text})"
    return text


def _text(fn: str, values: list[str], expr: Apply) -> str:
    kind = VALUE_TYPES[expr.operands[-1].dtype]
    match fn, values:
        case "where", [condition, yes, no]:
            return f"{condition} ? {yes} : {no}"
        case "neg", [x]:
            return f"-{x}"
        case "not", [x]:
            return f"!{x}"
        case "bitnot", [x]:
            return f"!{x}" if expr.dtype is torch.bool else f"~{x}"
        case "isnan", [x]:
            return f"{x} != {x}"
        case "isinf", [x]:
            return (
                f"t_abs({x}) == ({kind})INFINITY" if "o" in kind and "_t" not in kind else "false"
            )
        case "div", [x, y]:
            return f"{x} / {y}"
        case "reciprocal", [x]:
            return f"({kind})1 / {x}"
        case "rsqrt", [x]:
            return f"({kind})1 / t_sqrt({x})"
        case "pow", [x, y]:
            return _power(x, y, expr)
        case "floordiv", [x, _] if (places := shift_of(expr)) is not None:
            return f"{x} >> {places}"
        case "add" | "sub" | "mul", [x, y] if expr.dtype in _UNSIGNED:
            kind = _UNSIGNED[expr.dtype]
            return f"({kind}){x} {_INFIX[fn]} ({kind}){y}"
        case _, [x, y] if fn in _INFIX:
            return f"{x} {_INFIX[fn]} {y}"
        case _ if fn in _CALLS:
            return f"{_CALLS[fn]}({', '.join(values)})"
        case _:
            raise LoweringError(f"C++ code of {fn}", code="TR-392")


def _power(x: str, y: str, expr: Apply) -> str:
    exponent = expr.operands[1]
    if isinstance(exponent, Const) and expr.dtype.is_floating_point:
        match float(exponent.value):
            case 1.0:
                return x
            case 2.0:
                return f"{x} * {x}"
            case 3.0:
                return f"{x} * {x} * {x}"
            case -1.0:
                return f"({VALUE_TYPES[expr.dtype]})1 / {x}"
            case _:
                pass
    return f"t_pow({x}, {y})"


def _cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    if target is torch.bool:
        return text if source is torch.bool else f"{text} != 0"
    if source is torch.bool and target.is_floating_point:  # GCC 12 has no lanes for the cast
        kind = VALUE_TYPES[target]
        return f"{text} ? ({kind})1 : ({kind})0"
    if target in _HALF:
        return text if source is target else f"{_HALF[target]}((float){text})"
    if source.is_floating_point and target in (torch.int32, torch.int64):
        return f"t_{VALUE_TYPES[target]}({text})"
    if source.is_floating_point and target in (torch.uint8, torch.int8, torch.int16):
        return f"({VALUE_TYPES[target]})(int32_t){text}"
    return f"({VALUE_TYPES[target]}){text}"
