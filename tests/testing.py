"""How passes are tested: the graph after, as text, and the numbers, bit for bit."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from textwrap import dedent

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.graph.text.printing import show
from treadle.tools import demo
from treadle.util.errors import TreadleError

Program = Callable[..., object]


def forget_progress_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment of the tests says of progress, and of processes beside this one."""
    for name in ("RANK", "LOCAL_RANK", "TREADLE_PROGRESS", "TREADLE_NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)


def small_demo(put: Callable[[object, str, object], None] = setattr) -> None:
    """From now on ``treadle demo`` trains a model of a fraction of the size."""
    original = demo._example

    def example() -> object:
        gpt = original()
        gpt.Config = partial(gpt.Config, layers=2, length=48, width=48, heads=2)
        return gpt

    put(demo, "_example", example)


def trace(
    program: Program,
    *inputs: Tensor,
    writes: Mapping[int, int] | None = None,
    roles: Mapping[str, Role] | None = None,
    backward_from: str = "",
) -> StepGraph:
    """``program`` as a step. ``writes`` maps an output to the input it is written back to;
    nodes from the one named ``backward_from`` on are of the backward phase."""
    module = make_fx(program, tracing_mode="fake")(*inputs)
    names = list(inspect.signature(program).parameters)
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and "val" not in node.meta and not node.users:
            module.graph.erase_node(node)  # a result that is none, which nobody reads
    phase = "forward"
    for node in module.graph.nodes:
        phase = "backward" if node.name == backward_from else phase
        if node.op not in ("placeholder", "output"):
            with_info(node, phase=phase)
    count = _return_tuple(module.graph)
    roles, writes = roles or {}, writes or {}
    signature = Signature(
        tuple(Input(roles.get(name, Role.BATCH), name) for name in names),
        tuple(Output(f"out{i}", writes.get(i)) for i in range(count)),
    )
    return StepGraph(module.graph, signature)


def _return_tuple(graph: fx.Graph) -> int:
    (output,) = graph.find_nodes(op="output")
    result = output.args[0]
    values = tuple(result) if isinstance(result, tuple | list) else (result,)
    output.args = (values,)
    return len(values)


def check_pass(
    each: GraphPass,
    program: Program,
    inputs: tuple[Tensor, ...],
    *,
    after: str,
    exact: bool = True,
    **options: object,
) -> StepGraph:
    """``program`` under ``each`` prints as ``after`` (role comments aside), computes what eager
    computes from the same seed, and has nothing left to change. ``options`` go to ``trace``."""
    step = trace(program, *inputs, **options)
    run_passes(step, [each])
    assert show_plain(step) == dedent(after).strip()
    check_numbers(step, program, inputs, exact=exact)
    assert each.run(step) == 0, "a second run must find nothing to do"
    return step


def check_numbers(
    step: StepGraph, program: Program, inputs: tuple[Tensor, ...], *, exact: bool = True
) -> None:
    torch.manual_seed(0)
    expected = program(*(each.clone() for each in inputs))
    torch.manual_seed(0)
    found = run_step(step, inputs)
    wanted = expected if isinstance(expected, tuple | list) else (expected,)
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    for new, old in zip(found, wanted, strict=True):
        torch.testing.assert_close(new, old, equal_nan=True, **tolerance)
        if exact and old is not None and old.is_floating_point():
            assert torch.equal(new.signbit() & ~new.isnan(), old.signbit() & ~old.isnan())


def show_plain(step: StepGraph) -> str:
    """``show`` without the comments."""
    return "\n".join(line.partition("  #")[0] for line in show(step).splitlines())


def node_of(step: StepGraph, target: object) -> fx.Node:
    """The only call of ``target``."""
    (node,) = step.graph.find_nodes(op="call_function", target=target)
    return node


def refusal(call: Callable[[], object]) -> str:
    """The words of the error that ``call`` raises."""
    try:
        call()
    except TreadleError as error:
        return error.message
    raise AssertionError("nothing was refused")
