"""The loop IR as text.

::

    show(array):    [i<4, j<8] -> f32
                      %0 = x[8*i + j]
                      %0 / sum{k<8} x[8*i + k]

A node that is used more than once gets a line of its own. Axes are named ``i j k ...`` in the
order in which they appear.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from treadle.algebra.index import Axis, Index, Value
from treadle.algebra.index_walks import index_text
from treadle.algebra.strides import is_contiguous
from treadle.loop.expr import Apply, Array, Const, Expr, Load, Local, Position, Reduce, formula_of
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.program import Buffer, Call, Compute, Program, TensorRef
from treadle.loop.traverse import buffers_in, operands_of, walk
from treadle.targets.registry import target_for

_NAMES = "ijklmnpqrstuvwxyzabcdefgh"
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "and",
    "or": "or",
}


def show(array: Array) -> str:
    """Axes and dtype, shared nodes, then the element."""
    text = FormulaText()
    header = f"[{text.ranges(array.axes)}] -> {dtype_name(array.dtype)}"
    return "\n".join((header, *(f"  {line}" for line in text.lines(array.body))))


def show_expr(expr: Expr) -> str:
    """A formula on its own; axes are named as they appear."""
    return "\n".join(FormulaText().lines(expr))


def show_index(index: Index) -> str:
    """``8*i + j``."""
    return FormulaText().index(index)


def show_program(program: Program) -> str:
    """Buffers, then the steps in order, then the results."""
    lines = [f"{buffer.kind} {_buffer(buffer)}" for buffer in program.buffers.values()]
    known: dict[Array, list[str]] = {}
    for step in program.steps:
        match step:
            case Compute():
                if step.template not in known:
                    known[step.template] = _template_text(step.template)
                pieces = list(known[step.template])
                pieces[1::2] = [step.reads[int(place)] for place in pieces[1::2]]
                lines.extend(("", f"{_ref(step.output)}{_origin(step)} <-", "".join(pieces)))
            case Call():
                lines.extend(("", show_call(step)))
    lines.extend(("", f"return {', '.join(_argument(ref) for ref in program.results)}"))
    return "\n".join(lines) + "\n"


def _template_text(template: Array) -> list[str]:
    """The text of a formula in pieces: every second one is the place of a buffer among those that
    the formula reads, and stands for its name."""
    places = {name: f"\0{at}\0" for at, name in enumerate(buffers_in(template.body))}
    text = FormulaText(buffers=places)
    lines = [f"[{text.ranges(template.axes)}] -> {dtype_name(template.dtype)}"]
    lines += [f"  {line}" for line in text.lines(template.body)]
    return "\n".join(f"  {line}" for line in lines).split("\0")


def show_kernel(kernel: Kernel) -> str:
    """The loop nest: ``%name (axes) = formula`` and ``buffer[index] = %name``."""
    text = FormulaText()
    lines = [f"{kernel.kind} kernel {kernel.name}: for {text.ranges((kernel.rows, kernel.cols))}"]
    for item in kernel.body:
        axes = ", ".join(text.axis(axis) for axis in item.axes)
        match item:
            case Definition():
                *shared, last = text.lines(item.expr, f"%{item.name}.")
                lines.extend(f"  {line}" for line in shared)
                lines.append(f"  %{item.name} ({axes}) = {last}")
            case Store():
                lines.append(f"  {item.buffer}[{text.index(item.index)}] = %{item.value.name}")
    return "\n".join(lines)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bf16``, ``torch.int64`` -> ``i64``."""
    name = str(dtype).removeprefix("torch.")
    short = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
    return re.sub(r"^(bfloat|float|uint|int|complex)(?=\d)", lambda m: short[m[1]], name)


@dataclass
class FormulaText:
    """Names of the axes, and of the nodes that have a line of their own. ``buffers``: what is
    written in place of the names of buffers."""

    names: dict[Axis, str] = field(default_factory=dict[Axis, str])
    buffers: Mapping[str, str] = field(default_factory=dict[str, str])

    def axis(self, axis: Axis) -> str:
        """The name of an axis; a new one where it is met first."""
        count = len(self.names)
        round_ = str(count // len(_NAMES) or "")
        return self.names.setdefault(axis, _NAMES[count % len(_NAMES)] + round_)

    def ranges(self, axes: Sequence[Axis]) -> str:
        """``i<4, j<8``"""
        return ", ".join(f"{self.axis(axis)}<{axis.extent}" for axis in axes)

    def lines(self, expr: Expr, prefix: str = "%") -> list[str]:
        """A line for each shared node, then one for ``expr``."""
        nodes = tuple(walk(expr))
        uses = Counter(id(inner) for node in nodes for inner in operands_of(node))
        text: dict[int, str] = {}
        lines: list[str] = []
        for node in nodes:
            text[id(node)] = self._node(node, text)
            if uses[id(node)] > 1 and not isinstance(node, Const | Local | Position):
                name = f"{prefix}{len(lines)}"
                lines.append(f"{name} = {_bare(text[id(node)])}")
                text[id(node)] = name
        return [*lines, _bare(text[id(expr)])]

    def index(self, index: Index, text: Mapping[int, str] | None = None) -> str:
        """``8*i + j``; ``text``: of the values of formulas in it."""

        def name(atom: Axis | Value) -> str:
            return self.axis(atom) if isinstance(atom, Axis) else self._value(atom, text)

        return index_text(index, name, self._size)

    def _size(self, size: int) -> str:
        return str(size).replace("+ -", "- ")

    def _value(self, atom: Value, text: Mapping[int, str] | None) -> str:
        if text is None:
            text = self._inner(formula_of(atom))
        return f"value({_bare(text[id(atom.formula)])})"

    def _inner(self, expr: Expr) -> Mapping[int, str]:
        text: dict[int, str] = {}
        for node in walk(expr):
            text[id(node)] = self._node(node, text)
        return text

    def _node(self, node: Expr, text: Mapping[int, str]) -> str:
        match node:
            case Const():
                return str(node.value)
            case Position():
                return f"<{self.index(node.index, text)}>"
            case Load():
                mask = "" if node.mask is None else f" if {_bare(text[id(node.mask)])}"
                return f"{self._buffer(node.buffer)}[{self.index(node.index, text)}{mask}]"
            case Local():
                return f"%{node.name}"
            case Apply():
                return _apply(node, [text[id(inner)] for inner in node.operands])
            case Reduce():
                return f"({node.kind}{{{self.ranges(node.axes)}}} {text[id(node.body)]})"

    def _buffer(self, name: str) -> str:
        return self.buffers.get(name, name)


def _apply(node: Apply, operands: Sequence[str]) -> str:
    if node.fn == "cast":
        return f"{dtype_name(node.dtype)}({_bare(operands[0])})"
    if node.fn in INFIX and len(operands) == 2:
        return f"({operands[0]} {INFIX[node.fn]} {operands[1]})"
    return f"{node.fn}({', '.join(_bare(operand) for operand in operands)})"


def _bare(text: str) -> str:
    """Without parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and at < len(text) - 1:
            return text
    return text[1:-1]


def _buffer(buffer: Buffer) -> str:
    strides = "" if is_contiguous(buffer.shape, buffer.strides) else f" strides {buffer.strides}"
    shape = ", ".join(map(str, buffer.shape))
    place = "" if target_for(buffer.device).on_host else f" on {buffer.device}"
    return f"{buffer.name}: {dtype_name(buffer.dtype)}[{shape}]{strides}{place}"


def _ref(ref: TensorRef) -> str:
    shape = ", ".join(map(str, ref.shape))
    strides = "" if is_contiguous(ref.shape, ref.strides) else f" strides {ref.strides}"
    offset = f" at {ref.offset}" if ref.offset else ""
    return f"{ref.buffer}: {dtype_name(ref.dtype)}[{shape}]{strides}{offset}"


def _origin(step: Compute | Call) -> str:
    return f"  # {step.origin.where}" if step.origin.where else ""


def _argument(argument: object) -> str:
    match argument:
        case TensorRef():
            return f"({_ref(argument)})"
        case tuple() | list():
            return f"[{', '.join(_argument(item) for item in argument)}]"
        case torch.dtype():
            return dtype_name(argument)
        case _:
            return repr(argument)


def show_call(call: Call) -> str:
    """``mm = aten.mm.default((x), (w))``, and why it is a call."""
    outputs = ", ".join(name or "_" for name in call.outputs)
    arguments = [_argument(argument) for argument in call.args]
    arguments += [f"{name}={_argument(value)}" for name, value in call.kwargs.items()]
    reason = f"  # {call.reason}" if call.reason else _origin(call)
    into = "" if call.into is None else f" into {_ref(call.into)}"
    return f"{outputs} = {call.op}({', '.join(arguments)}){into}{reason}"
