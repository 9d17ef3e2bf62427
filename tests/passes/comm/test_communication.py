"""The passes together: generated programs on several ranks, contracts, a step of training."""

import dataclasses
import importlib
import pkgutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.comm.communicating import (
    GROUPS,
    all_gather,
    all_reduce,
    broadcast,
    calls,
    check_ranks,
    count,
    inputs_like,
    reduce_scatter,
    user_operator,
    wait,
)
from passes.comm.lockstep import run_ranks
from testing import show_plain, trace
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.core.collectives import collectives_in, is_wait
from treadle.graph.core.node_info import with_info
from treadle.graph.core.operators import has_effect, is_in_order
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.passes import comm
from treadle.passes.comm import communication_passes
from treadle.passes.comm.bucketing.bucket import BucketCollectives
from treadle.passes.comm.bucketing.merge import MergeEqualCollectives
from treadle.passes.comm.carry.split_updates import SplitUpdates
from treadle.passes.comm.overlap.hoist import HoistCollectives
from treadle.passes.comm.overlap.in_flight import spans_of
from treadle.passes.comm.overlap.kept_order import communicates, is_fence
from treadle.passes.comm.overlap.order import OverlapCommunication
from treadle.passes.comm.overlap.pipeline import PipelineProducts
from treadle.passes.comm.overlap.sink import SinkWaits
from treadle.passes.comm.sharding.gather_again import GatherAgain
from treadle.passes.comm.sharding.scatter_reductions import ScatterReductions

MEBI = 1 << 20
Instruction = tuple[str, int, int, bool]


class Pool:
    """The values of a program so far, and the results nobody has waited for."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.values = list(inputs)
        self.started: list[Tensor] = []

    def pick(self, at: int) -> Tensor:
        return self.values[at % len(self.values)]

    def begin(self, result: Tensor, later: bool) -> None:
        if later:
            self.started.append(result)
        else:
            self.values.append(wait(result))

    def finish(self) -> None:
        if self.started:
            self.values.append(wait(self.started.pop(0)))


def bounded(x: Tensor) -> Tensor:
    """Sums of sums stay numbers."""
    return x.sin()


def do(pool: Pool, instruction: Instruction) -> None:
    name, i, j, later = instruction
    x = pool.pick(i)
    match name:
        case "all_reduce":
            pool.begin(all_reduce(x, ("sum", "max")[j % 5 == 0], "01"[j % 4 == 0]), later)
        case "reduce_scatter" if x.ndim and x.shape[0] % 2 == 0:
            pool.begin(reduce_scatter(x), later)
        case "all_gather" if x.ndim and x.numel() < 100:
            pool.begin(all_gather(x), later)
        case "broadcast":
            pool.begin(broadcast(x, j % 2), later)
        case "coalesced":
            results = collective_op("all_reduce_coalesced")([x, pool.pick(j)], "sum", "0")
            for each in results:
                pool.begin(each, later)
        case "wait":
            pool.finish()
        case "view":
            pool.values.append(x.t() if x.ndim == 2 else x.reshape(-1))
        case "slice" if x.ndim and x.shape[0] > 2:
            pool.values.append(x[1:])
        case "add":
            y = pool.pick(j)
            pool.values.append(bounded(x + y) if x.shape == y.shape else x * y.mean().tanh())
        case "draw":
            pool.values.append(torch.rand_like(x) if j % 2 else torch.bernoulli(x.sigmoid()))
        case "mine":
            pool.values.append(user_operator(x.sin()))
        case _:
            pool.values.append(bounded(x))


KINDS = (
    "all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
    "coalesced", "wait", "wait", "view", "slice", "add", "add", "sin", "draw", "mine",
)  # fmt: skip
NUMBER = st.integers(0, 11)
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(KINDS), NUMBER, NUMBER, st.booleans()), min_size=2, max_size=22
)
SHAPES = ((4, 3), (6,), (2, 2), (8,))


def step_of(instructions: list[Instruction], returned: int, phases: int) -> StepGraph:
    def program(a, b, c, d):
        pool = Pool((a, b, c, d))
        for each in instructions:
            do(pool, each)
        while pool.started:
            pool.finish()
        made = pool.values[4:]
        results = [each for at, each in enumerate(made) if at % returned == 0]
        return [a + 1, *results, *[each + 1 for each in made]]

    step = trace(program, *map(torch.empty, SHAPES))
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    for node in nodes[: len(nodes) * phases // 4]:
        with_info(node, phase="forward")
    for node in nodes[len(nodes) * phases // 4 :]:
        with_info(node, phase="optimizer")
    return step


def in_flight(step: StepGraph) -> int:
    """The most bytes that are under way at once."""
    spans = spans_of(step.graph).values()
    return max(
        (sum(b.nbytes for b in spans if b.start <= a.start < b.end) for a in spans), default=0
    )


PASSES = st.sampled_from([
    (MergeEqualCollectives(),),
    (HoistCollectives(),),
    (SinkWaits(),),
    communication_passes(64, 200),
    communication_passes(MEBI, MEBI),
])  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, st.integers(1, 6), st.integers(0, 4), PASSES)
def test_any_program_keeps_its_bits_on_every_rank(instructions, returned, phases, passes):
    step = step_of(instructions, returned, phases)
    before, started = step.copy(), count(step)
    pinned = order_of(step)
    for each in passes:
        run_passes(step, [each])
        step.graph.lint()
        text = show_plain(step)
        assert each.run(step) == 0
        assert show_plain(step) == text
    check_ranks(before, step, [torch.empty(shape) for shape in SHAPES])
    assert count(step) <= started
    assert order_of(step) == pinned


def order_of(step: StepGraph) -> list[str]:
    """What draws, checks or is a user's, in order."""
    kept = [node for node in step.graph.nodes if is_in_order(node) or has_effect(node)]
    return [node.name for node in kept if not communicates(node)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, st.integers(0, 300))
def test_what_is_under_way_is_bounded(instructions, bound):
    step = step_of(instructions, 3, 0)
    for each in (HoistCollectives(bound), SinkWaits(bound)):
        before, most = step.copy(), in_flight(step)
        run_passes(step, [each])
        check_ranks(before, step, [torch.empty(shape) for shape in SHAPES])
        assert in_flight(step) <= max(most, bound)
        assert each.run(step) == 0


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_users_operators_see_the_same_collectives_before_and_behind_them(instructions):
    step = step_of(instructions, 3, 0)
    run_passes(step, [MergeEqualCollectives()])
    sides = sides_of(step)
    run_passes(step, [HoistCollectives(), SinkWaits()])
    assert sides_of(step) == sides


def sides_of(step: StepGraph) -> dict[str, int]:
    """For each collective and wait: how many users' operators stand ahead of it."""
    found, seen = {}, 0
    for node in step.graph.nodes:
        if communicates(node):
            found[node.name] = seen
        seen += is_fence(node)
    return found


def training_step(x, w1, w2, w3):
    """Three layers; gradients averaged over two ranks, clipped by their norm; the update."""
    a = x @ w1
    b = a.tanh()
    c = b @ w2
    d = c.tanh()
    e = d @ w3
    loss = (e * e).mean()
    ge = e * (2 / e.numel())
    r3 = wait(all_reduce((d.t() @ ge) * 0.5))
    gc = (ge @ w3.t()) * (1 - d * d)
    r2 = wait(all_reduce((b.t() @ gc) * 0.5))
    ga = (gc @ w2.t()) * (1 - b * b)
    r1 = wait(all_reduce((x.t() @ ga) * 0.5))
    norm = ((r1 * r1).sum() + (r2 * r2).sum() + (r3 * r3).sum()).sqrt()
    scale = 1 / (norm + 1).clamp(min=1)
    return loss, w1 - r1 * scale, w2 - r2 * scale, w3 - r3 * scale


LAYERS = tuple(torch.randn(shape) for shape in ((4, 6), (6, 6), (6, 5), (5, 3)))


def test_a_step_of_training():
    step = trace(training_step, *LAYERS, writes={1: 1, 2: 2, 3: 3})
    before = step.copy()
    run_passes(step, communication_passes(100, MEBI))
    assert count(step) == 2  # r3 alone (60 bytes, and r2 would be too much), r2 with r1
    order = calls(step)
    assert order.count("wait_tensor") == 2
    assert order.index("wait_tensor") > len(order) - 1 - order[::-1].index("all_reduce")
    check_ranks(before, step, LAYERS)


def test_ranks_stay_equal_over_several_steps():
    """Parameters that begin equal are equal, bit for bit, whatever the data of each rank."""
    step = trace(training_step, *LAYERS, writes={1: 1, 2: 2, 3: 3})
    plain = step.copy()
    run_passes(step, communication_passes(100, MEBI))
    data = inputs_like(LAYERS[:1])
    state = {name: [list(LAYERS[1:]) for _ in range(2)] for name in ("plain", "joined")}
    for _ in range(3):
        for name, each in (("plain", plain), ("joined", step)):
            inputs = [[*x, *w] for x, w in zip(data, state[name], strict=True)]
            state[name] = [outs[1:] for outs in run_ranks(each, inputs, GROUPS).outputs]
    first, second = state["joined"]
    for a, b, c in zip(first, second, state["plain"][0], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def all_passes() -> list[type[GraphPass]]:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(comm.__path__, f"{comm.__name__}.")
    ]
    found = {value for each in modules for value in vars(each).values() if isinstance(value, type)}
    ours = {each for each in found if each.__module__.startswith(comm.__name__)}
    return sorted(ours.intersection(GraphPass.__subclasses__()), key=repr)


@pytest.mark.parametrize("kind", all_passes())
def test_passes_are_frozen_and_show_before_and_after(kind):
    assert kind.__dataclass_params__.frozen
    assert "before:" in kind.__doc__
    assert "after:" in kind.__doc__
    assert "Memory:" in kind.__doc__


def test_all_passes_are_among_those_that_run():
    order = communication_passes(1, 2, 3)
    elsewhere = {
        GatherAgain, OverlapCommunication, PipelineProducts, ScatterReductions, SplitUpdates,
    }  # fmt: skip
    assert {type(each) for each in order} == set(all_passes()) - elsewhere
    assert order[2] == BucketCollectives(bucket_bytes=2, first_bucket_bytes=1)
    assert [each.in_flight_bytes for each in (order[1], order[3])] == [3, 3]
    assert dataclasses.replace(order[2]).first_bucket_bytes == 1
    assert BucketCollectives(5).first_bucket_bytes == MEBI


def test_they_may_run_again():
    step = trace(training_step, *LAYERS)
    first = communication_passes(MEBI, MEBI)
    run_passes(step, first)
    assert [each.matches for each in run_passes(step, first)] == [0, 0, 0, 0]
    assert any(map(is_wait, step.graph.nodes))
    assert collectives_in(step.graph)
