"""Build step graphs from plain functions and compare the interpreted program with eager."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from treadle.capture.functionalize import Functionalizer
from treadle.compat.switches import without_onednn
from treadle.graph.core.operators import is_mutable
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.loop.interpret import interpret_program
from treadle.loop.program import Call, Compute, Program
from treadle.loop.verify import verify_program
from treadle.lower import lower


def trace(
    fn: Callable[..., Any], *inputs: torch.Tensor, writes: Sequence[int | None] | None = None
) -> StepGraph:
    """The functional graph of ``fn``: every input is a batch, every output a result or a write."""
    with without_onednn():  # as capture does
        traced = make_fx(fn, tracing_mode="fake")(*inputs)
    (output,) = traced.graph.find_nodes(op="output")
    flat = tuple(pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None))
    output.args = (flat,)
    targets = list(writes) if writes is not None else [None] * len(flat)
    graph = functional(traced) if any(map(_writes, traced.graph.nodes)) else traced.graph
    return StepGraph(graph, _signature(len(inputs), targets))


def _writes(node: fx.Node) -> bool:
    return is_mutable(node)


def functional(traced: fx.GraphModule) -> fx.Graph:
    """The traced graph without writes in place, as capture makes it."""
    (output,) = traced.graph.find_nodes(op="output")
    graph, results, changed = Functionalizer(traced.graph).run(output.args[0])
    assert not changed, "the function writes to an input"
    graph.output(tuple(results))
    return fx.GraphModule(traced, graph).graph


def _signature(count: int, targets: Sequence[int | None]) -> Signature:
    return Signature(
        tuple(Input(Role.BATCH, f"x{i}") for i in range(count)),
        tuple(Output(f"y{i}", target) for i, target in enumerate(targets)),
    )


def run(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The results of the interpreted program; write-backs change ``inputs``."""
    verify_program(program)
    return list(interpret_program(program, dict(zip(program.inputs, inputs, strict=True))))


def program_of(fn: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    return lower(trace(fn, *inputs))


def calls_of(program: Program) -> list[Call]:
    return [step for step in program.steps if isinstance(step, Call)]


def fallbacks(program: Program) -> list[str]:
    return [call.reason for call in calls_of(program) if call.reason]


def check(
    fn: Callable[..., Any],
    *inputs: torch.Tensor,
    rtol: float | None = None,
    atol: float | None = None,
    formulas: bool = True,
) -> Program:
    """The interpreted program gives what eager gives, in eager's dtype, shape and strides."""
    expected = pytree.tree_leaves(fn(*[x.clone() for x in inputs]))
    program = program_of(fn, *inputs)
    actual = run(program, inputs)
    assert len(actual) == len(expected)
    for mine, eager in zip(actual, expected, strict=True):
        assert mine.dtype == eager.dtype
        torch.testing.assert_close(mine, eager, rtol=rtol, atol=atol, equal_nan=True)
    for step in program.steps:
        if isinstance(step, Compute):
            assert step.array.shape == step.output.shape
            assert step.array.dtype == step.output.dtype
    if formulas:
        assert not fallbacks(program), fallbacks(program)
    return program


__all__ = ["calls_of", "check", "fallbacks", "program_of", "run", "trace"]


def run_as_on_gpus(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The results of the program that is made for GPUs, interpreted on the CPU."""
    program = lower(trace(fn, *inputs), device="cuda")
    here = {name: replace(each, device="cpu") for name, each in program.buffers.items()}
    return run(replace(program, buffers=here, device="cpu"), inputs)
