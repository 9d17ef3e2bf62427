"""Build step graphs from plain functions and compare the interpreted program with eager."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from treadle.loop.interpret import interpret_program

from treadle.graph.signature import Input, Output, Role, StepGraph
from treadle.loop.program import Call, Compute, Program
from treadle.lower import lower


def trace(
    fn: Callable[..., Any], *inputs: torch.Tensor, writes: Sequence[int | None] | None = None
) -> StepGraph:
    """The functional graph of ``fn``: every input is a batch, every output a result or a write."""
    module = make_fx(fn, tracing_mode="fake")(*inputs)
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    flat = tuple(pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None))
    output.args = (flat,)
    targets = list(writes) if writes is not None else [None] * len(flat)
    signature = Signature_of(len(inputs), targets)
    return StepGraph(graph, signature)


def Signature_of(count: int, targets: Sequence[int | None]):
    from treadle.graph.signature import Signature

    return Signature(
        tuple(Input(Role.BATCH, f"x{i}") for i in range(count)),
        tuple(Output(f"y{i}", target) for i, target in enumerate(targets)),
    )


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
    actual = interpret_program(program, list(inputs))
    assert len(actual) == len(expected)
    for mine, eager in zip(actual, expected, strict=True):
        assert mine.dtype == eager.dtype
        torch.testing.assert_close(mine, eager, rtol=rtol, atol=atol, equal_nan=True)
    for step in program.steps:
        if isinstance(step, Compute):
            assert step.array.shape == step.output.shape
            assert step.array.dtype == step.output.dtype
    if formulas:
        assert not fallbacks(program)
    return program


__all__ = ["calls_of", "check", "fallbacks", "fx", "program_of", "trace"]
