"""What library calls allocate inside, measured and written beside each of them."""

from dataclasses import replace

import torch

from treadle.algebra.extents import dims_in
from treadle.capture.failures import of_torch
from treadle.codegen.host import call_step, spec_of
from treadle.compat.operators.operator_facts import CostClass, facts_of, may_invent
from treadle.graph.core.operators import OpOverload, arguments_of
from treadle.loop.program import Call, Program
from treadle.runtime.execute.library_calls import resolve
from treadle.runtime.store.artifact import call_at, spec_at
from treadle.runtime.workspace import KernelRefuses, Workspaces

_HALVES = (torch.bfloat16, torch.float16)


def with_workspaces(program: Program, workspaces: Workspaces) -> Program:
    """The program with what its calls are measured to allocate: a workspace for each call that
    allocates its own results, and spare bytes for these results. Also a workspace for products of
    16 bits, which a CPU without instructions for them sums in a copy of 32 bits. Of dynamic shapes
    the largest count. TR-132 for a call that PyTorch's kernel refuses: fake tensors mix dtypes that
    kernels do not."""
    every = [size for buffer in program.buffers.values() for size in buffer.shape]
    largest = {dim.name: dim.high for shape in dims_in(every) for dim in shape.formula.dims}
    specs = {name: spec_at(spec_of(b, {}), largest) for name, b in program.buffers.items()}
    calls = {
        at: step
        for at, step in enumerate(program.steps)
        if isinstance(step, Call)
        and (not step.out or (workspaces.on_host and _is_half_product(step)))
        and not _is_unsized(step, program)
        and _may_measure(step)
    }
    measured = [call_at(call_step(call), largest) for call in calls.values()]
    try:
        found = workspaces.of(measured, specs)
    except KernelRefuses as refusal:
        raise of_torch(refusal.error, refusal.step.origin) from refusal
    steps, buffers = list(program.steps), dict(program.buffers)
    for (at, step), memory in zip(calls.items(), found, strict=True):
        steps[at] = replace(step, workspace=memory.workspace)
        if not step.out:  # otherwise the result is ours
            names = [name for name in step.outputs if name]
            for name, spare in zip(names, memory.spare, strict=True):
                buffers[name] = replace(buffers[name], spare=spare) if spare else buffers[name]
    return replace(program, steps=tuple(steps), buffers=buffers)


def _is_unsized(call: Call, program: Program) -> bool:
    """Whether only a run of the step can tell the sizes of a call."""
    named = [*(ref.buffer for ref in call.refs), *filter(None, call.outputs)]
    return any(program.buffers[name].unsized for name in named)


def _is_half_product(call: Call) -> bool:
    """Whether the call is a product of numbers of 16 bits."""
    is_product = facts_of(resolve(call.op)).cost is CostClass.PRODUCT
    return is_product and any(ref.dtype in _HALVES for ref in call.refs)


def _may_measure(call: Call) -> bool:
    """Whether the call may run on invented numbers."""
    op = resolve(call.op)
    if not isinstance(op, OpOverload):
        return False  # it computes sizes
    arguments = arguments_of(op, call.args, call.kwargs)
    return may_invent(op, arguments, (ref.dtype for ref in call.refs))
