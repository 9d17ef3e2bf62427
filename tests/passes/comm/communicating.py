"""Programs that communicate, and how a pass over them is tested: text, numbers on two ranks, a
second run."""

from collections.abc import Callable, Sequence
from textwrap import dedent

import torch
from torch import Tensor

from passes.comm.lockstep import LockstepRun, run_ranks
from testing import show_plain, trace
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.core.collectives import collectives_in
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import operation_name
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.passes.comm.bucketing.bucket import BucketCollectives
from treadle.passes.comm.bucketing.merge import MergeEqualCollectives
from treadle.passes.comm.overlap.hoist import HoistCollectives

GROUPS = {"0": [[0, 1]], "1": [[0, 1]]}

wait = collective_op("wait_tensor")


def all_reduce(x: Tensor, reduction: str = "sum", group: str = "0") -> Tensor:
    return collective_op("all_reduce")(x, reduction, group)


def reduce_scatter(x: Tensor, group: str = "0") -> Tensor:
    return collective_op("reduce_scatter_tensor")(x, "sum", 2, group)


def all_gather(x: Tensor, group: str = "0") -> Tensor:
    return collective_op("all_gather_into_tensor")(x, 2, group)


def broadcast(x: Tensor, root: int = 0, group: str = "0") -> Tensor:
    return collective_op("broadcast")(x, root, group)


@torch.library.custom_op("treadle_comm_tests::mine", mutates_args=())
def mine(x: Tensor) -> Tensor:
    """A user's operator, with anything inside."""
    return x * 2


@mine.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def user_operator(x: Tensor) -> Tensor:
    return torch.ops.treadle_comm_tests.mine(x)


def needed_before(each: GraphPass) -> tuple[GraphPass, ...]:
    if isinstance(each, BucketCollectives):
        return MergeEqualCollectives(), HoistCollectives()
    return ()


def inputs_like(given: Sequence[Tensor], ranks: int = 2) -> list[tuple[Tensor, ...]]:
    """Inputs of each rank, all of them random, in the layouts of ``given``."""
    torch.manual_seed(len(given))
    return [tuple(torch.randn_like(each) for each in given) for _ in range(ranks)]


def check_comm(
    each: GraphPass,
    program: Callable[..., object],
    inputs: Sequence[Tensor],
    *,
    after: str | None = None,
    given: StepGraph | None = None,
) -> StepGraph:
    """``program`` (or the step ``given``, traced of it) after ``each``: prints as ``after``, gives
    the same bits on both ranks, and a second run finds nothing."""
    step = given or trace(program, *inputs)
    before = step.copy()
    run_passes(step, [*needed_before(each), each])
    step.graph.lint()
    if after is not None:
        assert show_plain(step) == dedent(after).strip()
    check_ranks(before, step, inputs)
    assert each.run(step) == 0, "a second run must find nothing to do"
    return step


def check_ranks(before: StepGraph, after: StepGraph, inputs: Sequence[Tensor]) -> LockstepRun:
    """Bitwise the same outputs on each rank, of the types that the graphs say."""
    per_rank = inputs_like(inputs)
    wanted, found = (run_ranks(each, per_rank, GROUPS) for each in (before, after))
    for new, old in zip(found.outputs, wanted.outputs, strict=True):
        for left, right, node in zip(new, old, after.returned, strict=True):
            assert torch.equal(left, right)
            assert torch.isfinite(left).all()
            assert strides(left) == strides(right) == strides(value_of(node))
    return found


def strides(value: Tensor) -> list[int]:
    """Of dims that have more than one index: fake tensors and true ones differ in the others."""
    return [n for n, size in zip(value.stride(), value.shape, strict=True) if size != 1]


def count(step: StepGraph) -> int:
    return len(collectives_in(step.graph))


def names(step: StepGraph) -> list[str]:
    """The nodes that are no inputs, in order."""
    return [node.name for node in step.graph.nodes if node.op == "call_function"]


def calls(step: StepGraph) -> list[str]:
    """What is called, in order: ``["mul", "all_reduce", "wait_tensor"]``."""
    called = [node.target for node in step.graph.nodes if node.op == "call_function"]
    return [operation_name(each).partition(".")[0] for each in called]
