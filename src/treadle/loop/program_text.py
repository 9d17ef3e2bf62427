"""Programs and kernels as texts with every fact, which ``program_parsing.py`` reads.

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
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from treadle.algebra.extents import Size, same_sizes
from treadle.algebra.index import Axis
from treadle.algebra.strides import contiguous_strides
from treadle.loop.expr import Array, Position
from treadle.loop.kernel import Definition, Kernel, KernelSchedule, Store
from treadle.loop.printing import (
    FormulaText,
    dim_lines,
    dtype_name,
    name_text,
    show,
    size_text,
)
from treadle.loop.program import Buffer, Call, Compute, Origin, Program, TensorRef
from treadle.loop.traverse import axes_in, sizes_in
from treadle.util.literals import literal_text, numbers_text

USUAL_DEVICE = "cpu"
"""Where a buffer is of which the text says nothing else."""


def exact_program(program: Program) -> str:
    """Buffers, then the steps in order, then the results."""
    lines = [f"program on {program.device}" if program.device else "program"]
    lines += dim_lines(_sizes_of(program))
    for name, buffer in program.buffers.items():
        constant = program.constants.get(name)
        numbers = "" if constant is None else f" = {numbers_text(constant)}"
        lines.append(f"{buffer.kind} {_buffer(buffer)}{numbers}")
    lines.append(" ".join(("inputs", ", ".join(map(name_text, program.inputs)))).rstrip())
    for step in program.steps:
        lines.append("")
        match step:
            case Compute():
                lines.append(f"compute {_ref(step.output)}{_origin(step.origin)}")
                lines += [f"  {line}" for line in show(step.array, exact=True).splitlines()]
            case Call():
                lines.append(_call(step))
    results = ", ".join(_argument(ref) for ref in program.results)
    return "\n".join((*lines, "", f"return [{results}]")) + "\n"


def _sizes_of(program: Program) -> Iterator[int]:
    for buffer in program.buffers.values():
        yield from (*buffer.shape, *buffer.strides)
    for step in program.steps:
        match step:
            case Compute():
                yield from _sizes_in_tree(step.output)
                yield from sizes_in(step.array)
            case Call():
                yield from _sizes_in_tree([step.args, dict(step.kwargs), step.into])
    yield from _sizes_in_tree(program.results)


def _sizes_in_tree(tree: Any) -> Iterator[int]:
    match tree:
        case TensorRef():
            yield from (*tree.shape, *tree.strides, tree.offset)
        case Size():
            yield tree
        case tuple() | list():
            for each in tree:
                yield from _sizes_in_tree(each)
        case Mapping():
            yield from _sizes_in_tree(list(tree.values()))
        case _:
            pass


def _buffer(buffer: Buffer) -> str:
    device = "" if buffer.device == USUAL_DEVICE else f" on {buffer.device}"
    unsized = " unsized" if buffer.unsized else ""
    return f"{name_text(buffer.name)}: {_type(buffer)}{device}{unsized}"


def _type(given: Buffer | TensorRef) -> str:
    text = f"{dtype_name(given.dtype)}[{_sizes(given.shape)}]"
    if same_sizes(contiguous_strides(given.shape), given.strides):
        return text
    return f"{text} strides [{_sizes(given.strides)}]"


def _sizes(sizes: Iterable[int]) -> str:
    return ", ".join(map(size_text, sizes))


def _ref(ref: TensorRef) -> str:
    is_first = not isinstance(ref.offset, Size) and ref.offset == 0
    offset = "" if is_first else f" at {size_text(ref.offset)}"
    return f"{name_text(ref.buffer)}: {_type(ref)}{offset}"


def _argument(argument: Any) -> str:
    match argument:
        case TensorRef():
            return f"ref {_ref(argument)}"
        case tuple():
            inside = ", ".join(map(_argument, argument))
            return f"({inside},)" if len(argument) == 1 else f"({inside})"
        case list():
            return f"[{', '.join(map(_argument, argument))}]"
        case Size():
            return size_text(argument)
        case _:
            return literal_text(argument)


def _call(call: Call) -> str:
    outputs = ", ".join("_" if name is None else name_text(name) for name in call.outputs)
    arguments = [_argument(argument) for argument in call.args]
    arguments += [f"{name}={_argument(value)}" for name, value in call.kwargs.items()]
    facts = {
        "out": call.out,
        "reason": call.reason,
        "workspace": call.workspace,
        "effects": "|".join(str(each.name) for each in call.effects),
    }
    told = "".join(f", {name} {value!r}" for name, value in facts.items() if value)
    first = f"call {outputs} = {call.op}" if outputs else f"call {call.op}"
    into = "" if call.into is None else f", into {_ref(call.into)}"
    return f"{first}({', '.join(arguments)}){_origin(call.origin)}{told}{into}"


def _origin(origin: Origin) -> str:
    facts = {"where": origin.where, "module": origin.module, "phase": origin.phase}
    told = "".join(f", {name} {value!r}" for name, value in facts.items() if value)
    told += "" if origin.chunk is None else f", chunk {origin.chunk}"
    return f" from {list(origin.nodes)}{told}"


def exact_kernel(kernel: Kernel) -> str:
    """The loop nest, where it came from, and how it runs."""
    text = FormulaText(exact=True)
    axes = text.aged({kernel.rows, kernel.cols, *_axes_of(kernel)})
    lines = [f"{kernel.kind} kernel {name_text(kernel.name)}", *dim_lines(_kernel_sizes(kernel))]
    lines += [axes] if axes else []
    lines.append(f"loops {text.axis(kernel.rows)}, {text.axis(kernel.cols)}")
    for item in kernel.body:
        lines += _item(item, text)
    lines += [_origin(each).strip() for each in kernel.origins]
    if kernel.schedule is not None:
        lines.append(f"schedule {_schedule(kernel.schedule)}")
    if kernel.scratch:
        lines.append(f"scratch {', '.join(map(name_text, kernel.scratch))}")
    return "\n".join(lines)


def _kernel_sizes(kernel: Kernel) -> Iterator[int]:
    for item in kernel.body:
        expr = item.expr if isinstance(item, Definition) else Position(item.index)
        yield from sizes_in(Array((kernel.rows, kernel.cols), expr))


def _axes_of(kernel: Kernel) -> Iterator[Axis]:
    for item in kernel.body:
        yield from axes_in(item.expr) if isinstance(item, Definition) else item.index.axes


def _item(item: Definition | Store, text: FormulaText) -> list[str]:
    axes = ", ".join(map(text.axis, item.axes))
    match item:
        case Definition():
            formula = [f"  {line}" for line in text.lines(item.expr, "$")]
            return [f"define {item.name} ({axes})", *formula]
        case Store():
            value = f"%{item.value.name}:{dtype_name(item.value.dtype)}"
            return [f"store {name_text(item.buffer)}[{text.index(item.index)}] = {value} ({axes})"]


def _schedule(schedule: KernelSchedule) -> str:
    facts = asdict(schedule) | {"form": str(schedule.form)}
    return ", ".join(f"{name} {_argument(value)}" for name, value in facts.items())


__all__ = ["USUAL_DEVICE", "exact_kernel", "exact_program"]
