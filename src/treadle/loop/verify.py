"""Checks that the loop IR satisfies its rules. Each error names the formula or item."""

import math
from collections.abc import Hashable, Mapping, Sequence

import torch

from treadle.algebra.extents import is_zero, size_key
from treadle.algebra.guards import GuardSet
from treadle.algebra.index import Axis, Index
from treadle.loop.expr import (
    Apply,
    Array,
    Expr,
    Load,
    Local,
    Position,
    Reduce,
    ReduceKind,
    values_of,
)
from treadle.loop.interpret import positions
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.nest import after_rows, locals_of
from treadle.loop.printing import show, show_kernel
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Program, TensorRef
from treadle.loop.traverse import axes_of, operands_of, walk
from treadle.util.errors import VerifyError, require

_ENUMERATE = 1 << 22
"""Offsets that are looked at one by one, where their range alone does not show they fit."""


def verify_array(
    array: Array, buffers: Mapping[str, Buffer], guards: GuardSet | None = None
) -> None:
    """Axes are bound once, buffers are known, and unmasked loads stay inside them: for the sizes
    of ``guards``, where the sizes decide it."""
    guards = GuardSet() if guards is None else guards
    try:
        _check_array(array, buffers, guards)
    except VerifyError as error:
        raise VerifyError(f"{error.message}\nin\n{show(array)}") from error


def verify_program(program: Program, guards: GuardSet | None = None) -> None:
    """Every step is valid, reads only what is written before, and writes inside its buffer: for
    the sizes of ``guards``, where the sizes decide it."""
    guards = GuardSet() if guards is None else guards
    written = {
        name for name, buffer in program.buffers.items() if buffer.kind is not BufferKind.TEMPORARY
    }
    for name in program.inputs:
        require(name in program.buffers, VerifyError, f"input {name} is not a buffer")
    checked: set[Hashable] = set()
    for step in program.steps:
        match step:
            case Compute():
                known = step.template, tuple([_room(name, program.buffers) for name in step.reads])
                if known not in checked:
                    verify_array(step.array, program.buffers, guards)
                    checked.add(known)
                _check_ref(step.output, program.buffers, guards)
                shape, dtype = step.template.shape, step.template.dtype
                if shape != step.output.shape or dtype is not step.output.dtype:
                    raise VerifyError(f"{step.output} gets {dtype}{shape}")
                if step.output.numel:
                    _check_written(set(step.reads), written, program)
                written.add(step.output.buffer)
            case Call():
                for ref in step.refs:
                    _check_ref(ref, program.buffers, guards)
                _check_written({ref.buffer for ref in step.refs if ref.numel}, written, program)
                names = set(step.writes)
                require(names <= program.buffers.keys(), VerifyError, f"{step.op} fills {names}")
                if step.into is not None:
                    _check_ref(step.into, program.buffers, guards)
                    known = bool(step.out) and step.outputs == (step.into.buffer,)
                    require(known, VerifyError, f"{step.op} writes {step.into}, not its output")
                written |= names
    for ref in program.results:
        if ref is not None:
            _check_ref(ref, program.buffers, guards)
            _check_written({ref.buffer} if ref.numel else set(), written, program)


def _room(name: str, buffers: Mapping[str, Buffer]) -> Hashable:
    """What decides whether a formula may read a buffer as it does."""
    buffer = buffers.get(name)
    if buffer is None:
        return name
    return buffer.dtype, tuple(map(size_key, buffer.shape)), tuple(map(size_key, buffer.strides))


def verify_kernel(
    kernel: Kernel,
    buffers: Mapping[str, Buffer] | None = None,
    guards: GuardSet | None = None,
) -> None:
    """Definitions come before uses and vary over just their axes; reductions are at the root
    and run over the kernel's inner axis, or over either in a kernel of both, where what is reduced
    over the rows is read by values of columns alone. With ``buffers``, offsets are checked too, for
    the sizes of ``guards`` where the sizes decide it."""
    guards = GuardSet() if guards is None else guards
    try:
        _check_kernel(kernel, buffers, guards)
    except VerifyError as error:
        raise VerifyError(f"{error.message}\nin\n{show_kernel(kernel)}") from error


def _check_array(array: Array, buffers: Mapping[str, Buffer], guards: GuardSet) -> None:
    require(len(set(array.axes)) == len(array.axes), VerifyError, "an axis is bound twice")
    nodes = tuple(walk(array.body))
    reduces = [node for node in nodes if isinstance(node, Reduce)]
    for reduce in reduces:
        _check_reduce(reduce)
        shared = set(reduce.axes) & set(array.axes)
        require(not shared, VerifyError, f"a reduction binds an axis of the array: {shared}")
    free = axes_of(array.body) - set(array.axes)
    require(not free, VerifyError, f"axes are not bound: {set(free)}")
    _check_binding(array.body)
    is_local = any(isinstance(node, Local) for node in nodes)
    require(not is_local, VerifyError, "a local value stands outside a kernel")
    every = [*array.axes, *(axis for reduce in reduces for axis in reduce.axes)]
    is_empty = any(is_zero(axis.extent) for axis in every)
    _check_loads(nodes, buffers, guards, is_empty=is_empty)


def _check_binding(body: Expr) -> None:
    """No reduction binds again an axis that one inside it has already bound."""
    bound: dict[int, frozenset[Axis]] = {}
    for node in walk(body):
        inner = frozenset[Axis]().union(*(bound[id(operand)] for operand in operands_of(node)))
        if isinstance(node, Reduce):
            again = inner & set(node.axes)
            require(not again, VerifyError, f"a reduction binds again {set(again)}")
            inner |= frozenset(node.axes)
        bound[id(node)] = inner


def _check_reduce(reduce: Reduce) -> None:
    require(len(set(reduce.axes)) == len(reduce.axes), VerifyError, "a reduction repeats an axis")
    if reduce.kind in (ReduceKind.ARGMAX, ReduceKind.ARGMIN):
        require(len(reduce.axes) == 1, VerifyError, f"{reduce.kind} runs over one axis")
    if reduce.kind is ReduceKind.ANY:
        is_bool = reduce.body.dtype is torch.bool
        require(is_bool, VerifyError, f"any of {reduce.body.dtype}")


def _check_loads(
    nodes: Sequence[Expr], buffers: Mapping[str, Buffer], guards: GuardSet, *, is_empty: bool
) -> None:
    for node in nodes:
        if isinstance(node, Load):
            require(node.buffer in buffers, VerifyError, f"no buffer is named {node.buffer}")
            buffer = buffers[node.buffer]
            if node.mask is not None:
                is_bool = node.mask.dtype is torch.bool
                require(is_bool, VerifyError, f"the mask of {node.buffer} is not a bool")
            elif not is_empty:
                _check_inside(node.index, node.dtype, buffer, guards)
        if isinstance(node, Apply) and node.fn in ("where", "and", "or", "xor", "not"):
            conditions = node.operands[:1] if node.fn == "where" else node.operands
            is_bool = all(condition.dtype is torch.bool for condition in conditions)
            require(is_bool, VerifyError, f"{node.fn} of something that is not a bool")
        if isinstance(node, Load | Position):
            for value in values_of(node.index):
                is_whole = not value.dtype.is_floating_point and value.dtype is not torch.bool
                require(is_whole, VerifyError, f"an index holds a value of {value.dtype}")


def _check_inside(index: Index, dtype: torch.dtype, buffer: Buffer, guards: GuardSet) -> None:
    """Offsets lie in the buffer: by their range, or else one by one."""
    elements = buffer.elements * buffer.dtype.itemsize // dtype.itemsize
    low, high = index.bounds
    if guards.less(-1, low) and guards.less(high, elements):
        return
    if not index.values and math.prod(axis.extent for axis in index.axes) <= _ENUMERATE:
        every = positions(index)
        low, high = int(every.min()), int(every.max())
    require(
        low >= 0 and high < elements,
        VerifyError,
        f"{buffer.name}[{low}..{high}] reaches outside its {elements} elements",
    )


def _check_ref(ref: TensorRef, buffers: Mapping[str, Buffer], guards: GuardSet) -> None:
    require(ref.buffer in buffers, VerifyError, f"no buffer is named {ref.buffer}")
    if is_zero(ref.numel):
        return
    buffer = buffers[ref.buffer]
    elements = buffer.elements * buffer.dtype.itemsize // ref.dtype.itemsize
    reach = [(n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True)]
    low = ref.offset + sum(guards.smaller_of(distance, 0) for distance in reach)
    high = ref.offset + sum(guards.larger_of(distance, 0) for distance in reach)
    if not (guards.less(-1, low) and guards.less(high, elements)):
        raise VerifyError(f"{ref} reaches outside {buffer}")


def _check_written(read: set[str], written: set[str], program: Program) -> None:
    if read <= written:
        return
    missing = sorted(
        name
        for name in read - written
        if program.buffers[name].elements  # nothing to write
    )
    require(not missing, VerifyError, f"{missing} are read before anything is written to them")


def _check_kernel(kernel: Kernel, buffers: Mapping[str, Buffer] | None, guards: GuardSet) -> None:
    inner = {
        KernelKind.ROWS: (kernel.cols,),
        KernelKind.COLUMNS: (kernel.rows,),
        KernelKind.BOTH: (kernel.cols, kernel.rows),
    }[kernel.kind]
    late = after_rows(kernel)
    is_empty = any(is_zero(axis.extent) for axis in (kernel.rows, kernel.cols))
    defined: dict[str, Definition] = {}
    for item in kernel.body:
        ordered = tuple([axis for axis in (kernel.rows, kernel.cols) if axis in item.axes])
        if ordered != item.axes:
            raise VerifyError(f"axes {item.axes} are not the kernel's")
        match item:
            case Definition():
                require(item.name not in defined, VerifyError, f"%{item.name} is defined twice")
                nodes = _check_definition(item, defined, inner)
                _check_late(item, late, kernel)
                if buffers is not None:
                    _check_loads(nodes, buffers, guards, is_empty=is_empty)
                defined[item.name] = item
            case Store():
                _check_local(item.value, defined, item.axes)
                if free := item.index.axes - set(item.axes):
                    raise VerifyError(f"a store to {item.buffer} varies over {free}")
                if buffers is not None:
                    require(item.buffer in buffers, VerifyError, f"no buffer {item.buffer}")
                    if not is_empty:
                        _check_inside(item.index, item.value.dtype, buffers[item.buffer], guards)


def _check_definition(
    item: Definition, defined: Mapping[str, Definition], inner: tuple[Axis, ...]
) -> tuple[Expr, ...]:
    """Returns the nodes of the formula."""
    nodes = tuple(walk(item.expr))
    scope = item.axes
    for node in nodes:
        if isinstance(node, Reduce):
            is_root = node is item.expr
            require(is_root, VerifyError, f"%{item.name} has a reduction below its root")
            _check_reduce(node)
            is_inner = len(node.axes) == 1 and node.axes[0] in inner
            require(is_inner, VerifyError, f"%{item.name} reduces over something else: {node.axes}")
            require(
                node.axes[0] not in item.axes,
                VerifyError,
                f"%{item.name} varies over what it reduces",
            )
            scope = (*item.axes, *node.axes)
    for node in nodes:
        if isinstance(node, Local):
            _check_local(node, defined, scope)
    if free := axes_of(item.expr) - set(item.axes):
        raise VerifyError(f"%{item.name} varies over {set(free)} as well")
    return nodes


def _check_late(item: Definition, late: frozenset[str], kernel: Kernel) -> None:
    """What is there after the last row is read by nothing that a row needs."""
    read = sorted(late & set(locals_of(item.expr)))
    early = isinstance(item.expr, Reduce) or kernel.rows in item.axes
    if read and early:
        raise VerifyError(f"%{item.name} reads {read}, which are there after the last row only")


def _check_local(local: Local, defined: Mapping[str, Definition], scope: tuple[Axis, ...]) -> None:
    require(local.name in defined, VerifyError, f"%{local.name} is used before its definition")
    definition = defined[local.name]
    is_same = definition.expr.dtype is local.dtype
    require(is_same, VerifyError, f"%{local.name} is {definition.expr.dtype}, not {local.dtype}")
    if extra := set(definition.axes) - set(scope):
        raise VerifyError(f"%{local.name} varies over {extra}, its use does not")
