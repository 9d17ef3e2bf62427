"""Scalar formulas as Triton text: one statement per operation, equal statements once.

::

    add(load x[64*r + c], 1.0)   ->   x0 = tl.load(b0 + (c + 64*r), mask=cm, other=0)
                                      x1 = tl.full((), 1.0, tl.float32)
                                      x2 = x0 + x1
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from treadle.algebra.extents import same, surely_less
from treadle.algebra.index import Atom, Axis, FloorDiv, Index, Mod, Value
from treadle.codegen.contraction import CONTRACTED
from treadle.codegen.triton.prelude import HELPERS
from treadle.loop.expr import FLOAT8, Apply, Const, Expr, Load, Local, Position, Reduce
from treadle.loop.functions import shift_of
from treadle.loop.traverse import axes_of, operands_of
from treadle.util.errors import LoweringError, VerifyError, require

TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
    torch.float8_e4m3fn: "tl.uint8",
    torch.float8_e5m2: "tl.uint8",
}
"""What programs hold. Numbers of float8 are their bits, which every GPU moves: Triton has their
types for some only."""

_ANY = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "bitand": "{0} & {1}",
    "bitor": "{0} | {1}",
    "bitxor": "{0} ^ {1}",
    "bitnot": "~{0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
}
_FLOAT = {
    "neg": "{0} * -1.0",  # Triton's minus is a difference from 0, and has no -0.0
    "exp": "tl.exp({0})",
    "expm1": "_expm1({0})",
    "log": "tl.log({0})",
    "log1p": "_log1p({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "_rsqrt({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sin": "_sin({0})",
    "cos": "tl.cos({0})",
    "tanh": "_tanh({0})",
    "erf": "_erf({0})",
    "erfc": "_erfc({0})",
    "sigmoid": "_sigmoid({0})",
    "floor": "_floor({0})",
    "ceil": "_ceil({0})",
    "round": "_round({0})",
    "trunc": "_trunc({0})",
    "sign": "({0} > 0).to({type}) - ({0} < 0).to({type})",
    "div": "tl.div_rn({0}, {1})",
    "floordiv": "_floordiv_float({0}, {1})",
    "mod": "_mod_float({0}, {1})",
    "fmod": "_fmod({0}, {1})",
    "pow": "_pow_float({0}, {1})",
    "minimum": "_bottom({0}, {1})",
    "maximum": "_top({0}, {1})",
    "isnan": "{0} != {0}",
    "same": "({0} == {1}) | (({0} != {0}) & ({1} != {1}))",
    "isinf": 'tl.abs({0}) == float("inf")',
}
_DOUBLE = {
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "reciprocal": "1.0 / {0}",
    "div": "{0} / {1}",
}
"""Where float64 has another form: its least numbers are never taken for zeros."""
_INTEGER = {
    "floor": "{0}",
    "ceil": "{0}",
    "round": "{0}",
    "trunc": "{0}",
    "sign": "({0} > 0).to({type}) - ({0} < 0).to({type})",
    "floordiv": "_floordiv_int({0}, {1})",
    "mod": "_mod_int({0}, {1})",
    "fmod": "{0} % {1}",
    "pow": "_pow_int({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "maximum": "tl.maximum({0}, {1})",
    "isnan": "{0} != {0}",
    "same": "{0} == {1}",
    "isinf": "{0} != {0}",
}
_BOOL = {"minimum": "{0} & {1}", "maximum": "{0} | {1}", "mul": "{0} & {1}", "add": "{0} | {1}"}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Named:
    """A name in the generated text, and which of the loop axes ``r`` and ``c`` it varies over.
    ``factors``: of a product that a sum may take in, those of which it was made."""

    text: str
    axes: frozenset[str] = frozenset()
    factors: tuple[str, ...] = ()


@dataclass
class TritonWriter:
    """Lines of one device function, with the values that are in scope.

    ``names`` maps the kernel's axes to ``r`` and ``c``; ``masks`` says which lanes of an axis
    exist (absent: all); ``blocks`` holds the axes whose variable is a block and not a scalar.
    ``summed``: what is only added to others (``contraction``).
    """

    names: Mapping[Axis, str]
    buffers: Mapping[str, str]
    masks: dict[str, str]
    blocks: frozenset[str]
    wide: bool = False
    summed: frozenset[Expr] = frozenset()
    lines: list[str] = field(default_factory=list[str])
    indent: int = 1
    locals: dict[str, Named] = field(default_factory=dict[str, Named])
    known: dict[str, str] = field(default_factory=dict[str, str])
    count: int = 0

    def line(self, text: str) -> None:
        """Add a line at the present indent."""
        self.lines.append("    " * self.indent + text)

    def name(self, text: str) -> str:
        """A variable that holds ``text``; the same one when the text was seen in this scope."""
        if text not in self.known:
            self.known[text] = f"x{self.count}"
            self.count += 1
            self.line(f"{self.known[text]} = {text}")
        return self.known[text]

    def lanes(self, axes: frozenset[str]) -> list[str]:
        """Masks of the axes, in a fixed order."""
        return [self.masks[axis] for axis in ("r", "c") if axis in axes and axis in self.masks]

    def evaluate(self, expr: Expr) -> Named:
        """``expr`` as a variable; operands first, each object once."""
        done: dict[int, Named] = {}
        stack = [expr]
        while stack:
            node = stack[-1]
            waiting = [child for child in _evaluated(node) if id(child) not in done]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if id(node) not in done:
                done[id(node)] = self._node(node, done)
        return done[id(expr)]

    def _node(self, expr: Expr, done: Mapping[int, Named]) -> Named:
        match expr:
            case Const():
                return Named(self.name(constant(expr.value, expr.dtype)))
            case Position():
                index = self.index(expr.index, done)
                return Named(self.name(_as_type(index.text, "tl.int64")), index.axes)
            case Local():
                require(expr.name in self.locals, VerifyError, f"%{expr.name} is not defined here")
                return self.locals[expr.name]
            case Load():
                mask = None if expr.mask is None else done[id(expr.mask)]
                return self._load(expr, self.index(expr.index, done), mask)
            case Apply(fn="eq") if (place := _place_of(expr)) is not None:
                return self._is_at(place, expr, done)
            case Apply():
                values = [done[id(operand)] for operand in expr.operands]
                axes = frozenset[str]().union(*(value.axes for value in values))
                texts = [value.text for value in values]
                contracted = _contracted(expr, values)
                text = self.name(contracted) if contracted else self._apply(expr, texts)
                is_factored = expr.fn == "mul" and expr in self.summed
                return Named(text, axes, tuple(texts) if is_factored else ())
            case Reduce():
                raise VerifyError("a reduction stands inside a formula")

    def define(self, name: str, expr: Expr) -> Named:
        """``evaluate`` of what the kernel calls ``name``."""
        value = self.locals[name] = self.evaluate(expr)
        return value

    def _is_at(self, place: Index, expr: Apply, done: Mapping[int, Named]) -> Named:
        """``<j> == n``: in 32 bits, since ``n`` is one number for many places."""
        (n,) = (factor for factor in expr.operands if factor != Position(place))
        at, value = self.index(place, done), done[id(n)]
        text = value.text
        known = f"({text} >= 0) & ({text} <= {2**31 - 1})"
        narrow = self.name(f"tl.where({known}, {text}, -1).to(tl.int32)")
        here = _as_type(at.text, "tl.int32") if self.wide else f"({at.text})"
        return Named(self.name(f"{here} == {narrow}"), at.axes | value.axes)

    def _load(self, load: Load, index: Named, mask: Named | None) -> Named:
        axes = index.axes | (mask.axes if mask else frozenset())
        lanes = self.lanes(axes) + ([mask.text] if mask else [])
        offset = index.text
        for axis in ("r", "c"):
            if axis in axes - index.axes and axis in self.blocks:
                offset = f"{offset} + 0 * {axis}"
        guard = f", mask={' & '.join(lanes)}, other=0" if lanes else ""
        text = self.name(f"tl.load({self.buffers[load.buffer]} + ({offset}){guard})")
        return Named(text, axes)

    def _apply(self, expr: Apply, texts: list[str]) -> str:
        source = expr.operands[-1].dtype
        if expr.fn == "cast":
            return self._cast(texts[0], source, expr.dtype)
        if source in _HALF and expr.fn not in ("where", "neg", "abs"):
            wide = [self.name(f"{text}.to(tl.float32)") for text in texts]
            result = self.name(self._call(expr.fn, wide, torch.float32))
            return self.name(f"{result}.to({TYPES[source]})") if expr.dtype is source else result
        places = shift_of(expr)
        if places is not None:
            return self.name(f"{texts[0]} >> {places}")
        return self.name(self._call(expr.fn, texts, source))

    def _call(self, fn: str, texts: list[str], dtype: torch.dtype) -> str:
        table = _ANY | (_FLOAT if dtype.is_floating_point else _INTEGER)
        if dtype is torch.float64:
            table = table | _DOUBLE
        if dtype is torch.bool:
            table = table | _BOOL
        reason = f"{fn} of {dtype} has no Triton form"
        require(fn in table, LoweringError(reason, code="TR-330"))
        return table[fn].format(*texts, type=TYPES[dtype])

    def _cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        if source is target:
            return text
        if source in FLOAT8:
            text, source = self.name(f"_from_{FLOAT8[source]}({text})"), torch.float32
            return self._cast(text, source, target)
        if target in FLOAT8:
            return self.name(f"_to_{FLOAT8[target]}({self._cast(text, source, torch.float32)})")
        if target is torch.bool:
            return self.name(f"{text} != 0")
        return self.name(f"{text}.to({TYPES[target]})")

    def index(self, index: Index, done: Mapping[int, Named]) -> Named:
        """The offset as text. Every part is non-negative, or divided as Python divides."""
        axes: set[str] = set()
        parts: list[str] = []
        for atom, scale in index.terms:
            value = self._atom(atom, done)
            axes |= value.axes
            parts.append(value.text if same(scale, 1) else f"{number(scale)} * {value.text}")
        if not same(index.const, 0) or not parts:
            parts.append(number(index.const))
        return Named(" + ".join(parts), frozenset(axes))

    def _atom(self, atom: Atom, done: Mapping[int, Named]) -> Named:
        match atom:
            case Axis():
                reason = "an index uses an axis that is not the kernel's"
                require(atom in self.names, VerifyError, reason)
                axis = self.names[atom]
                return Named(axis, frozenset({axis} & self.blocks))
            case FloorDiv(index=inner, n=size) | Mod(index=inner, n=size):
                value, n = self.index(inner, done), number(size)
                sign = "//" if isinstance(atom, FloorDiv) else "%"
                if surely_less(-1, inner.bounds[0]):
                    return Named(self.name(f"({value.text}) {sign} {n}"), value.axes)
                rest = self.name(f"((({value.text}) % {n}) + {n}) % {n}")
                if isinstance(atom, Mod):
                    return Named(rest, value.axes)
                return Named(self.name(f"(({value.text}) - {rest}) // {n}"), value.axes)
            case Value():
                value = done[id(atom.formula)]
                kind = "tl.int64" if self.wide else "tl.int32"
                return Named(self.name(f"{value.text}.to({kind})"), value.axes)


def _contracted(expr: Apply, values: Sequence[Named]) -> str:
    """A sum or difference, rounded once, of which one operand is a product; else nothing."""
    if expr.fn not in ("add", "sub") or expr.dtype not in CONTRACTED:
        return ""
    one, other = values
    sign = " * -1.0" if expr.fn == "sub" else ""
    if other.factors:  # as in C++
        return f"tl.fma({other.factors[0]}{sign}, {other.factors[1]}, {one.text})"
    return f"tl.fma({one.factors[0]}, {one.factors[1]}, {other.text}{sign})" if one.factors else ""


def _place_of(expr: Apply) -> Index | None:
    """The place that is compared with a number that does not know it, if it fits into 31 bits."""
    for this, other in (expr.operands, expr.operands[::-1]):
        if isinstance(this, Position) and not isinstance(other, Position):
            low, high = this.index.bounds
            apart = not this.index.axes & axes_of(other)
            fits = surely_less(-1, low) and surely_less(high, 2**31)
            return this.index if apart and fits and not this.index.values else None
    return None


def _evaluated(node: Expr) -> Iterable[Expr]:
    """What has to be a variable before ``node`` can be one."""
    if isinstance(node, Apply) and node.fn == "eq" and _place_of(node) is not None:
        return [operand for operand in node.operands if not isinstance(operand, Position)]
    return operands_of(node)


def _as_type(place: str, kind: str) -> str:
    """An offset as a tensor; one that is a number alone has no dtype to convert."""
    is_variable = re.search("[A-Za-z]", place)
    return f"({place}).to({kind})" if is_variable else f"tl.full((), {place}, {kind})"


def number(size: int) -> str:
    """A number, or the formula of one that each call says, as Python writes it."""
    return str(size).replace(" / ", " // ")


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """The number alone, as Triton reads it."""
    if dtype in FLOAT8:
        return str(torch.tensor(value).to(dtype).view(torch.uint8).item())
    if dtype is torch.uint8:
        return str(int(value) % 256)  # Triton takes no other one
    if not dtype.is_floating_point:
        return str(int(value))
    exact = float(value)
    return repr(exact) if math.isfinite(exact) else f'float("{exact}")'


def constant(value: float | int | bool, dtype: torch.dtype) -> str:
    """``tl.full((), 0.5, tl.float32)``: a literal that keeps its dtype."""
    is_float = dtype.is_floating_point and dtype not in FLOAT8
    if is_float and value == 0 and math.copysign(1.0, value) < 0:
        return f"tl.full((), 0.0, {TYPES[dtype]}) * -1.0"  # Triton fills with 0.0 for -0.0
    return f"tl.full((), {literal(value, dtype)}, {TYPES[dtype]})"


def helpers_text(lines: list[str]) -> str:
    """The helpers that the lines call, and those that these call, in the prelude's order."""
    called = "\n".join(lines)
    kept: set[str] = set()
    for name, text in reversed(HELPERS.items()):
        if re.search(rf"\b{name}\b", called):
            kept.add(name)
            called += text
    return "".join(text for name, text in HELPERS.items() if name in kept)
