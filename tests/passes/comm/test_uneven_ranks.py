"""Ranks that hold uneven parts: each has a graph of its own, and all of them send the same in the
same order, whatever passes run."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from passes.comm.communicating import all_gather, all_reduce, names, reduce_scatter, wait
from passes.comm.lockstep import run_ranks
from testing import trace
from treadle.compat.distributed.collectives import collective_op
from treadle.compat.tracing import traced_nodes
from treadle.compiler.cleaning import CLEAN
from treadle.graph.core.collectives import collective_of, is_same_on_all_ranks
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Role, Signature
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.comm import communication_passes
from treadle.passes.comm.bucketing.dependence import joined_sequence
from treadle.passes.comm.cost import unmeasured
from treadle.passes.comm.overlap.hoist import HoistCollectives
from treadle.passes.comm.overlap.order import OverlapCommunication
from treadle.passes.comm.sharding.gather_again import GatherAgain
from treadle.targets.registry import model_for

RANKS = 3
GROUPS = {"0": [list(range(RANKS))]}
WIDTH = 3


class Part:
    """What a rank holds of ``rows`` rows."""

    def __init__(self, own, rows, rank):
        self.own, self.rows, self.rank = own, rows, rank
        self.chunk = -(-rows // RANKS)


def rows_of(rows, rank):
    chunk = -(-rows // RANKS)
    begin = min(rank * chunk, rows)
    return begin, min(begin + chunk, rows)


def padded(x, rows):
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros((missing, WIDTH))]) if missing else x


def gather(part):
    found = wait(collective_op("all_gather_into_tensor")(padded(part.own, part.chunk), RANKS, "0"))
    return found.narrow(0, 0, part.rows)


def scatter(whole, rank):
    rows = whole.shape[0]
    chunk = -(-rows // RANKS)
    given = padded(whole, chunk * RANKS)
    found = wait(collective_op("reduce_scatter_tensor")(given, "sum", RANKS, "0"))
    begin, end = rows_of(rows, rank)
    return Part(found.narrow(0, 0, end - begin), rows, rank)


def program_of(instructions, sizes, rank, spans):
    """A step of one rank on its parts, of so many rows in all, and on a batch. ``spans`` gets the
    nodes of each instruction, and the part that they gather, if they do."""

    def program(batch, a, b, c):
        spans.clear()
        parts = [Part(each, rows, rank) for each, rows in zip((a, b, c), sizes, strict=True)]
        wholes = [batch]
        for name, i, j in instructions:
            begin = traced_nodes()
            part, whole = parts[i % len(parts)], wholes[j % len(wholes)]
            match name:
                case "gather":
                    wholes.append(gather(part))
                case "scatter":
                    parts.append(scatter(whole, rank))
                case "product":
                    other = wholes[i % len(wholes)]
                    wholes.append(torch.tanh(whole @ other.t() @ other))
                case "pointwise":
                    wholes.append(whole * 0.5 + 1)
                case "update":
                    parts.append(Part(part.own * 0.5 + 1, part.rows, rank))
                case "norm":
                    wholes.append(whole * torch.tanh(wait(all_reduce(part.own.sum().view(1, 1)))))
                case _:
                    wholes.append(torch.tanh(wait(all_reduce(whole))))
            spans.append((begin, traced_nodes(), i % len(parts) if name == "gather" else None))
        return (*[each.own for each in parts[-3:]], *wholes[-3:])

    return program


def mark(step, spans, forward):
    """Which nodes gather a part that is dropped behind the ``forward`` first instructions, and
    which are behind those."""
    nodes = list(step.graph.nodes)
    for at, (begin, end, part) in enumerate(spans):
        phase = "forward" if at < forward else "backward"
        for node in nodes[begin:end]:
            with_info(node, phase=phase, gathered=part if at < forward else None)


def steps_of(instructions, sizes, forward):
    torch.manual_seed(0)
    wholes = [torch.randn(rows, WIDTH) for rows in sizes]
    inputs, steps = [], []
    for rank in range(RANKS):
        own = [each[slice(*rows_of(each.shape[0], rank))].clone() for each in wholes]
        given = [torch.randn(2, WIDTH), *own]
        inputs.append(given)
        spans = []
        step = trace(program_of(instructions, sizes, rank, spans), *given)
        mark(step, spans, forward)
        entries = step.signature.inputs
        marked = [Input(Role.PARAMETER, each.name, sharded=True) for each in entries[1:]]
        step.signature = Signature((entries[0], *marked), step.signature.outputs)
        steps.append(step)
    return steps, inputs


NAMES = ("gather",) * 3 + ("product",) * 4 + ("scatter", "pointwise", "update", "norm", "sum")
instructions_ = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=16
)
sizes_ = st.tuples(*[st.integers(1, 7)] * 3)
caps_ = st.sampled_from((0, 50, 200, 1 << 20))


def equal(one, other):
    pairs = zip(one.outputs, other.outputs, strict=True)
    return all(
        torch.equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    instructions=instructions_,
    sizes=sizes_,
    first=caps_,
    later=caps_,
    bound=st.sampled_from((None, 100)),
    hides=st.booleans(),
    forward=st.integers(0, 14),
)
def test_all_ranks_send_the_same_in_the_same_order(
    instructions, sizes, first, later, bound, hides, forward
):
    steps, inputs = steps_of(instructions, sizes, forward)
    before = run_ranks(steps, inputs, GROUPS)
    device = model_for("h200")
    costs = unmeasured({"0": RANKS}, device)
    passes = (*CLEAN, GatherAgain(), *communication_passes(first, later, bound))
    passes += (OverlapCommunication(costs, device),) if hides else ()
    for step in steps:
        assert not is_same_on_all_ranks(step)
        run_passes(step, passes)
    after = run_ranks(steps, inputs, GROUPS)
    assert equal(before, after)
    assert len(set(map(tuple, after.started))) == 1, "in one order, also of what is not matched"


def test_where_ranks_hold_parts_collectives_keep_their_order():
    """The second gather reads an input, the first what is computed."""

    def program(x, y):
        late = all_gather(x.t() @ y)
        early = all_gather(y)
        return wait(late) @ wait(early).t()

    step = trace(program, torch.randn(3, 3), torch.randn(3, 3))
    assert HoistCollectives().run(step) == 0
    assert names(step)[2:4] == ["all_gather_into_tensor", "all_gather_into_tensor_1"]


def test_the_order_of_what_is_joined_is_that_of_its_last_members():
    """The scatter stands between the gathers, and needs neither; the sum needs the first."""

    def program(x):
        first = wait(all_gather(x))
        other = wait(reduce_scatter(x))
        total = wait(all_reduce(first.sin()))
        last = wait(all_gather(x.cos()))
        return first, other, total, last

    step = trace(program, torch.randn(4, 3))
    gathers = [each for each in step.graph.nodes if str(each).startswith("all_gather")]
    found = joined_sequence(step.graph, [gathers], {})
    assert [str(each) for each in found] == [
        "reduce_scatter_tensor", "all_gather_into_tensor_1", "all_reduce",
    ]  # fmt: skip
    assert found[1] is gathers[-1]
    assert all(collective_of(each) is not None for each in found)
