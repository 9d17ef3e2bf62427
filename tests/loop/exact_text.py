"""Formulas, programs and kernels as texts with every fact, from which ``formula_parsing.py`` and
``program_parsing.py`` make the same ones.

::

    program on cuda:0                         rows kernel k0
    input x: f32[4, 4] strides [1, 4]         axes i<4, j<8
    temporary y: f32[4] on cuda:0             loops i, j
    inputs x                                  define a (i, j)
                                                x[8*i + j]:f32
    compute y: f32[4] from ['n']              define m (i)
      axes i<4                                  max{j} %a:f32
      [i] -> f32                              store y[i] = %m:f32 (i)
        x[5*i]:f32                            from ['n'], phase 'forward'
                                              schedule form 'persistent', rows 4, warps 2
    call z = aten.mm.default(ref y: f32[2, 2], 2) from ['mm']
    return ref y: f32[4], None

Axes are named by their age. What has a default and is another value stands by its name.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from treadle.algebra.extents import Size, dims_in, same_sizes
from treadle.algebra.index import Axis, Value
from treadle.algebra.strides import contiguous_strides
from treadle.compat.operators.operator_facts import Effect
from treadle.loop.expr import Array, Const, Expr, Load, Local, Position, Reduce
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.printing import FormulaText, dtype_name
from treadle.loop.program import Buffer, Call, Compute, Origin, Program, TensorRef
from treadle.loop.traverse import walk
from treadle.util.literals import literal_text, numbers_text

USUAL_DEVICE = "cpu"
"""Where a buffer is of which the text says nothing else."""
_NAME = re.compile(r"[^\W\d]\w*(?:\.\w+)*")


def exact_array(array: Array) -> str:
    """Dims, axes, shared nodes, the element."""
    writer = _Writer()
    lines = writer.array(array)
    return "\n".join([*writer.dims(), *lines])


def exact_program(program: Program) -> str:
    """Buffers, then the steps in order, then the results."""
    writer = _Writer()
    lines = writer.program(program)
    head = f"program on {program.device}" if program.device else "program"
    return "\n".join([head, *writer.dims(), *lines]) + "\n"


def exact_kernel(kernel: Kernel) -> str:
    """The loop nest, where it came from, and how it runs."""
    writer = _Writer()
    lines = writer.kernel(kernel)
    head = f"{kernel.kind} kernel {_name(kernel.name)}"
    return "\n".join([head, *writer.dims(), *lines])


def optional_fields(kind: Any) -> list[str]:
    """The fields of a record that may be left out."""
    return [
        each.name
        for each in fields(kind)
        if each.default is not MISSING or each.default_factory is not MISSING
    ]


@dataclass
class _ExactFormula(FormulaText):
    """Dtypes, bounds of values, and quotes where the name of a buffer could be misread. ``sizes``:
    those that were written."""

    sizes: list[int] = field(default_factory=list[int])

    def ranges(self, axes: Iterable[Axis]) -> str:
        return ", ".join(map(self.axis, axes))

    def _size(self, size: int) -> str:
        self.sizes.append(size)
        return f"{{{size}}}" if isinstance(size, Size) else str(size)

    def _value(self, atom: Value, text: Any) -> str:
        shown = super()._value(atom, text)
        return f"{shown[:-1]}, {self._size(atom.lo)}, {self._size(atom.hi)})"

    def _node(self, node: Expr, text: Any) -> str:
        shown = super()._node(node, text)
        typed = isinstance(node, Const | Load | Local)
        return f"{shown}:{dtype_name(node.dtype)}" if typed else shown

    def _buffer(self, name: str) -> str:
        return _name(name)

    def aged(self, axes: Iterable[Axis]) -> list[str]:
        """``axes i<4, j<8``; nothing without axes."""
        ordered = sorted(axes, key=lambda axis: axis.serial)
        ranges = [f"{self.axis(axis)}<{self._size(axis.extent)}" for axis in ordered]
        return [f"axes {', '.join(ranges)}"] if ranges else []


class _Writer:
    """Lines of what programs and kernels are made of."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def dims(self) -> list[str]:
        """Those of the sizes that were written, each with its bounds and its sample."""
        dims = [dim for size in dims_in(self._sizes) for dim in size.formula.dims]
        return [f"dim {dim.name} {dim.low}..{dim.high} sample {dim.sample}" for dim in dims]

    def array(self, array: Array) -> list[str]:
        text = _ExactFormula(sizes=self._sizes)
        axes = text.aged({*array.axes, *_axes_in(array.body)})
        head = f"[{text.ranges(array.axes)}] -> {dtype_name(array.dtype)}"
        return [*axes, head, *(f"  {line}" for line in text.lines(array.body, "$"))]

    def program(self, program: Program) -> list[str]:
        lines: list[str] = []
        for name, buffer in program.buffers.items():
            constant = program.constants.get(name)
            numbers = "" if constant is None else f" = {numbers_text(constant)}"
            lines.append(f"{buffer.kind} {self._buffer(buffer)}{numbers}")
        lines.append(f"inputs {', '.join(map(_name, program.inputs))}".rstrip())
        for step in program.steps:
            lines.append("")
            match step:
                case Compute():
                    lines.append(f"compute {self._ref(step.output)}{self._origin(step.origin)}")
                    lines += [f"  {line}" for line in self.array(step.array)]
                case Call():
                    lines.append(self._call(step))
        results = ", ".join(map(self._argument, program.results))
        return [*lines, "", f"return [{results}]"]

    def kernel(self, kernel: Kernel) -> list[str]:
        text = _ExactFormula(sizes=self._sizes)
        lines = text.aged({kernel.rows, kernel.cols, *_axes_of(kernel)})
        lines.append(f"loops {text.ranges((kernel.rows, kernel.cols))}")
        for item in kernel.body:
            axes = text.ranges(item.axes)
            match item:
                case Definition():
                    lines.append(f"define {item.name} ({axes})")
                    lines += [f"  {line}" for line in text.lines(item.expr, "$")]
                case Store():
                    place = f"{_name(item.buffer)}[{text.index(item.index)}]"
                    value = f"%{item.value.name}:{dtype_name(item.value.dtype)}"
                    lines.append(f"store {place} = {value} ({axes})")
        lines += [self._origin(each).strip() for each in kernel.origins]
        if kernel.schedule is not None:
            facts = asdict(kernel.schedule) | {"form": str(kernel.schedule.form)}
            shown = [f"{name} {self._argument(value)}" for name, value in facts.items()]
            lines.append(f"schedule {', '.join(shown)}")
        if kernel.scratch:
            lines.append(f"scratch {', '.join(map(_name, kernel.scratch))}")
        return lines

    def _buffer(self, buffer: Buffer) -> str:
        device = "" if buffer.device == USUAL_DEVICE else f" on {buffer.device}"
        unsized = " unsized" if buffer.unsized else ""
        return f"{_name(buffer.name)}: {self._type(buffer)}{device}{unsized}"

    def _type(self, given: Buffer | TensorRef) -> str:
        text = f"{dtype_name(given.dtype)}[{self._listed(given.shape)}]"
        if same_sizes(contiguous_strides(given.shape), given.strides):
            return text
        return f"{text} strides [{self._listed(given.strides)}]"

    def _listed(self, sizes: Iterable[int]) -> str:
        return ", ".join(map(self._size, sizes))

    def _size(self, size: int) -> str:
        return _ExactFormula(sizes=self._sizes)._size(size)

    def _ref(self, ref: TensorRef) -> str:
        is_first = not isinstance(ref.offset, Size) and ref.offset == 0
        offset = "" if is_first else f" at {self._size(ref.offset)}"
        return f"{_name(ref.buffer)}: {self._type(ref)}{offset}"

    def _argument(self, argument: Any) -> str:
        match argument:
            case TensorRef():
                return f"ref {self._ref(argument)}"
            case tuple():
                inside = ", ".join(map(self._argument, argument))
                return f"({inside},)" if len(argument) == 1 else f"({inside})"
            case list():
                return f"[{', '.join(map(self._argument, argument))}]"
            case Size():
                return self._size(argument)
            case _:
                return literal_text(argument)

    def _call(self, call: Call) -> str:
        outputs = ", ".join("_" if name is None else _name(name) for name in call.outputs)
        arguments = [self._argument(argument) for argument in call.args]
        arguments += [f"{name}={self._argument(value)}" for name, value in call.kwargs.items()]
        first = f"call {outputs} = {call.op}" if outputs else f"call {call.op}"
        origin, facts = self._origin(call.origin), self._facts(call)
        return f"{first}({', '.join(arguments)}){origin}{facts}"

    def _origin(self, origin: Origin) -> str:
        return f" from {list(origin.nodes)}{self._facts(origin)}"

    def _facts(self, record: Origin | Call) -> str:
        """Those that are not the usual ones, by name."""
        shown = ""
        for each in fields(record):
            value = getattr(record, each.name)
            if each.name in optional_fields(record) and value != each.default:
                match value:
                    case TensorRef():
                        text = self._ref(value)
                    case Effect():
                        text = repr("|".join(str(flag.name) for flag in value))
                    case _:
                        text = repr(value)
                shown += f", {each.name} {text}"
        return shown


def _axes_of(kernel: Kernel) -> Iterator[Axis]:
    for item in kernel.body:
        yield from _axes_in(item.expr) if isinstance(item, Definition) else item.index.axes


def _axes_in(expr: Expr) -> frozenset[Axis]:
    """Every axis that occurs, those that a reduce binds as well."""
    bound = (axis for node in walk(expr) if isinstance(node, Reduce) for axis in node.axes)
    every = (node.index.axes for node in walk(expr) if isinstance(node, Position | Load))
    return frozenset(bound).union(*every)


def _name(name: str) -> str:
    """The name of a buffer, quoted if it could be misread."""
    return name if _NAME.fullmatch(name) else repr(name)


__all__ = ["USUAL_DEVICE", "exact_array", "exact_kernel", "exact_program", "optional_fields"]
