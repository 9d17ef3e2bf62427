import pytest
import torch

from passes.comm.communicating import (
    all_gather,
    all_reduce,
    broadcast,
    calls,
    check_comm,
    count,
    needed_before,
    reduce_scatter,
    user_operator,
    wait,
)
from testing import node_of, refusal, show_plain, trace
from treadle.algebra.extents import Size
from treadle.compat.distributed.collectives import collective_op
from treadle.compat.fake import symbolic_mode
from treadle.graph.analysis.alias import analyse
from treadle.graph.analysis.dynamic import SampleMode, Symbols, pair
from treadle.graph.core.collectives import collectives_in, is_wait
from treadle.graph.core.node_info import set_value, value_of, with_info
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.comm.bucketing.bucket import BucketCollectives

aten = torch.ops.aten
X, Y, Z = torch.randn(4, 3), torch.randn(6), torch.randn(2, 2)
MEBI = 1 << 20
BUCKET = BucketCollectives(MEBI)


def test_gradients_are_one_collective_with_views_of_its_result():
    def program(g, h):
        u = wait(all_reduce(g * 0.5))
        x = u.relu()
        v = wait(all_reduce(h * 0.5))
        return x, v.relu()

    check_comm(
        BUCKET,
        program,
        (X, Y),
        after="""
            g: f32[4, 3]
            h: f32[6]
            mul: f32[4, 3] = mul.Tensor(g, 0.5)
            mul.1: f32[6] = mul.Tensor(h, 0.5)
            view: f32[12] = view(mul, [12])
            cat: f32[18] = cat([view, mul.1], 0)
            all_reduce: f32[18] = all_reduce(cat, sum, 0)
            wait_tensor: f32[18] = wait_tensor(all_reduce)
            slice: f32[12] = slice.Tensor(wait_tensor, 0, 0, 12)
            view.1: f32[4, 3] = view(slice, [4, 3])
            slice.1: f32[6] = slice.Tensor(wait_tensor, 0, 12, 18)
            relu: f32[4, 3] = relu(view.1)
            relu.1: f32[6] = relu(slice.1)
            return [relu, relu.1]
        """,
    )


def test_scattered_sums():
    check_comm(
        BUCKET,
        lambda g, h: (wait(reduce_scatter(g)).relu(), wait(reduce_scatter(h)).relu()),
        (X, Y),
        after="""
            g: f32[4, 3]
            h: f32[6]
            view: f32[2, 6] = view(g, [2, 6])
            view.1: f32[2, 3] = view(h, [2, 3])
            cat: f32[2, 9] = cat([view, view.1], 1)
            view.2: f32[18] = view(cat, [18])
            reduce_scatter_tensor: f32[9] = reduce_scatter_tensor(view.2, sum, 2, 0)
            wait_tensor: f32[9] = wait_tensor(reduce_scatter_tensor)
            slice: f32[6] = slice.Tensor(wait_tensor, 0, 0, 6)
            view.3: f32[2, 3] = view(slice, [2, 3])
            slice.1: f32[3] = slice.Tensor(wait_tensor, 0, 6, 9)
            relu: f32[2, 3] = relu(view.3)
            relu.1: f32[3] = relu(slice.1)
            return [relu, relu.1]
        """,
    )


def test_gathered_values_are_copied_together():
    check_comm(
        BUCKET,
        lambda g, h: (wait(all_gather(g)).relu(), wait(all_gather(h)).relu()),
        (X, Y),
        after="""
            g: f32[4, 3]
            h: f32[6]
            view: f32[12] = view(g, [12])
            cat: f32[18] = cat([view, h], 0)
            all_gather_into_tensor: f32[36] = all_gather_into_tensor(cat, 2, 0)
            wait_tensor: f32[36] = wait_tensor(all_gather_into_tensor)
            view.1: f32[2, 18] = view(wait_tensor, [2, 18])
            slice: f32[2, 12] = slice.Tensor(view.1, 1, 0, 12)
            clone: f32[2, 12] = clone(slice, memory_format=torch.contiguous_format)
            view.2: f32[8, 3] = view(clone, [8, 3])
            slice.1: f32[2, 6] = slice.Tensor(view.1, 1, 12, 18)
            clone.1: f32[2, 6] = clone(slice.1, memory_format=torch.contiguous_format)
            view.3: f32[12] = view(clone.1, [12])
            relu: f32[8, 3] = relu(view.2)
            relu.1: f32[12] = relu(view.3)
            return [relu, relu.1]
        """,
    )


def test_a_group_of_one_needs_no_copy_of_what_it_gathers():
    gather = collective_op("all_gather_into_tensor")
    step = trace(lambda x, y: (wait(gather(x, 1, "0")) + 1, wait(gather(y, 1, "0")) + 1), X, Y)
    run_passes(step, [*needed_before(BUCKET), BUCKET])
    assert count(step) == 1
    assert "clone" not in calls(step)


def test_results_of_one_row():
    """Their first stride is of no consequence to anybody, and is what it was."""

    def program(x, y):
        return (
            *[wait(reduce_scatter(each)).sin() for each in (x[:2], y[:2])],
            *[wait(all_gather(each)).sin() for each in (x[:1], y.view(1, 6))],
        )

    step = check_comm(BUCKET, program, (X, Y))
    assert count(step) == 2


def test_inputs_in_any_layout():
    """A transposed gradient is laid out row by row in the buffer; a number has one element."""

    def program(x, y):
        return (
            wait(all_reduce(x.t())).relu(),
            wait(all_reduce(y.sum())).relu(),
            wait(all_reduce(y[::2])).relu(),
            wait(all_reduce(x[:0])).relu(),
        )

    step = check_comm(BUCKET, program, (X, Y))
    assert count(step) == 1


def test_buffers_of_each_dtype_are_one_broadcast():
    def program(a, b, c, d):
        whole = wait(broadcast(c.long())), wait(broadcast(d.long()))
        return wait(broadcast(a)).sin(), wait(broadcast(b)).sin(), *[each + 1 for each in whole]

    step = check_comm(BUCKET, program, (X, Y, torch.randn(3), torch.randn(5)))
    assert count(step) == 2


def test_one_alone_is_left_as_it_is():
    assert BUCKET.run(trace(lambda x: wait(all_reduce(x)), X)) == 0


def buckets(each, program, *inputs):
    step = trace(program, *inputs)
    return [len(members) for members in each.choose(step).buckets]


def gradients(*counts):
    """As many bytes each."""

    def program(x):
        return [wait(all_reduce(x[:n] * 2)) + 1 for n in counts]

    return program


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [(200, 0, [5]), (199, 200, [4, 1]), (40, 200, [1, 4]), (80, 120, [2, 3]), (0, 80, [1, 2, 2])],
)
def test_real_bytes_up_to_the_caps(first, later, expected):
    each = BucketCollectives(later, first)
    assert buckets(each, gradients(10, 10, 10, 10, 10), torch.randn(50)) == expected


def test_bytes_are_those_of_the_dtype_and_of_the_larger_side():
    each = BucketCollectives(80, 80)
    x = torch.randn(20)
    assert buckets(each, lambda x: [wait(all_reduce(x[:n].half())) for n in (20, 20)], x) == [2]
    assert buckets(each, lambda x: [wait(all_gather(x[:n])) for n in (5, 5)], x) == [2]
    assert buckets(each, lambda x: [wait(all_gather(x[:n])) for n in (5, 6)], x) == [1, 1]
    assert buckets(each, lambda x: [wait(reduce_scatter(x[:n])) for n in (10, 12)], x) == [1, 1]


def test_what_is_larger_than_the_cap_is_alone():
    each = BucketCollectives(80, 40)
    assert buckets(each, gradients(10, 50, 10, 10), torch.randn(50)) == [1, 1, 2]


DIFFERENT = {
    "kind": lambda x, y: (wait(all_reduce(x)), wait(broadcast(y))),
    "group": lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y, group="1"))),
    "reduction": lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y, "max"))),
    "root": lambda x, y: (wait(broadcast(x)), wait(broadcast(y, 1))),
    "dtype": lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y.double()))),
    "number of ranks": lambda x, y: (
        wait(all_gather(x)),
        wait(collective_op("all_gather_into_tensor")(y, 3, "0")),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_only_what_agrees_is_joined(name):
    step = trace(DIFFERENT[name], X, Y)
    assert BUCKET.run(step) == 0
    reasons = BUCKET.choose(step).reasons.values()
    assert all("is the first of its kind" in each for each in reasons)


@pytest.mark.parametrize(
    "mark", [{"phase": "backward"}, {"region": 1}, {"checkpoint": 1}, {"asked": "must_save"}]
)
def test_phases_and_regions_stay_apart(mark):
    step = trace(lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y))), X, Y)
    with_info(collectives_in(step.graph)[1].node, **mark)
    assert BUCKET.run(step) == 0


def test_what_the_backward_pass_goes_on_with_does_not_wait_for_gradients():
    """Statistics of a normalisation over all ranks, and a gradient beside them."""

    def program(x, y):
        return wait(all_reduce(x)).sin(), wait(all_reduce(y)).cos()

    step = trace(program, X, Y)
    with_info(node_of(step, aten.cos.default), phase="optimizer")
    assert BUCKET.run(step) == 0
    with_info(node_of(step, aten.sin.default), phase="optimizer")
    assert BUCKET.run(step) == 2


def test_a_copy_is_not_what_a_result_is_for():
    """Whoever reads the copy is. Else a second run would take the two for what the third is."""

    def program(x, y):
        first, second = wait(all_gather(x)).sin(), wait(all_gather(y)).sin()
        return first, second, wait(all_gather(x * 2)).cos()

    step = trace(program, X, Y)
    for node in step.graph.find_nodes(op="call_function", target=aten.sin.default):
        with_info(node, phase="optimizer")
    assert BUCKET.run(step) == 2
    assert "clone" in calls(step)
    assert BUCKET.run(step) == 0


def test_views_of_results_share_the_memory_of_the_bucket():
    """Their values say so: an analysis of memory sees one buffer."""

    def program(x, y):
        u = wait(all_reduce(x)).t()
        return u.sin(), wait(all_reduce(y)).sin()

    step = check_comm(BUCKET, program, (X, Y))
    (waited,) = [node for node in step.graph.nodes if is_wait(node)]
    assert analyse(step).share(node_of(step, aten.t.default), waited)


def unread(x, y):
    all_reduce(x)
    return wait(all_reduce(y))


def early(x, y):
    result = all_reduce(x)
    return result.t() + wait(result).t()


def several(x, y):
    both = collective_op("all_reduce_coalesced")([x, y], "sum", "0")
    return [wait(each) for each in both]


ALONE = {
    "2 nodes wait for all_reduce": lambda x, y: (wait(r := all_reduce(x)), wait(r) + y.sum()),
    "0 nodes wait for all_reduce": unread,
    "all_reduce is read before it is waited for": lambda x, y: (
        (r := all_reduce(x)).t() + wait(r).t()
    ),
    "all_reduce_coalesced is a bucket already": several,
    "all_to_all_single sends each rank a different part": lambda x, y: wait(
        collective_op("all_to_all_single")(x, [2, 2], [2, 2], "0")
    ),
}


@pytest.mark.parametrize("reason", ALONE)
def test_says_why_one_cannot_be_joined(reason):
    step = trace(ALONE[reason], X, Y)
    assert reason in BUCKET.choose(step).reasons.values()
    assert BUCKET.run(step) == 0


def retyped(change):
    """Two all-reduces, the first of something else by what is noted of its values."""
    step = trace(lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y))), X, Y)
    first = collectives_in(step.graph)[0]
    for node in (*first.inputs, first.node, *first.waits):
        value = value_of(node)
        with value.fake_mode:
            set_value(node, change(value))
    return step


def test_other_devices_stay_apart():
    step = retyped(lambda value: torch.empty(value.shape, device="meta"))
    assert BUCKET.run(step) == 0


def test_a_result_in_another_layout_stays():
    step = retyped(lambda value: torch.empty(value.shape[::-1]).t())
    reasons = BUCKET.choose(step).reasons.values()
    assert "wait_tensor is not in row-major order" in reasons
    assert BUCKET.run(step) == 0


def test_says_why_one_begins_a_bucket():
    def program(x):
        first = wait(all_reduce(x))
        second = wait(all_reduce(first.sin()))
        third, fourth = wait(all_reduce(second * 2)), wait(all_reduce(x[:5] * 3))
        return second.sin(), third.sin(), fourth.sin()

    x = torch.randn(10)
    choice = BucketCollectives(79, 400).choose(trace(program, x))
    assert list(choice.reasons.values()) == [
        "all_reduce is the first of its kind",
        "all_reduce_1 and the bucket of all_reduce depend on each other",
        "all_reduce_2 would make the bucket of all_reduce_1 larger than 79 bytes",
    ]


def test_two_buckets_never_wait_for_each_other():
    """One of each reads one of the other, crosswise: one of the two is possible."""

    def program(x, y):
        a = wait(all_reduce(x))
        b = wait(all_gather(y))
        c = wait(all_gather(a.sin()))
        d = wait(all_reduce(b.cos()))
        return c.sin(), d.sin()

    step = check_comm(BUCKET, program, (X, Y))
    assert count(step) == 3


def test_a_result_that_another_bucket_sends_on():
    def program(x, y):
        one, other = wait(reduce_scatter(x)), wait(reduce_scatter(y))
        return wait(all_reduce(one, group="1")).sin(), wait(all_reduce(other, group="1")).sin()

    step = check_comm(BUCKET, program, (X, Y))
    assert count(step) == 2


def test_readers_that_stood_ahead_move_behind_and_draws_keep_their_order():
    def program(x, y):
        u = wait(all_reduce(x))
        a = torch.bernoulli(u.sigmoid())
        b = a.sin()
        c = torch.rand_like(y)
        v = wait(all_reduce(y.sin()))
        return b, c + v

    step = check_comm(BUCKET, program, (X, Y))
    order = calls(step)
    assert order.index("all_reduce") < order.index("bernoulli") < order.index("rand_like")


def test_a_draw_that_one_needs_does_not_pass_one_that_needs_another():
    """The second gradient is drawn behind what reads the first."""

    def program(x, y):
        u = wait(all_reduce(x))
        a = torch.bernoulli(u.sigmoid())
        v = wait(all_reduce(torch.rand_like(y)))
        return a, v.sin()

    step = trace(program, X, Y)
    assert BUCKET.run(step) == 0
    assert "depend on each other" in list(BUCKET.choose(step).reasons.values())[1]


PASSES = {
    "starts": lambda x, y: (
        (r := all_reduce(x), a := user_operator(y), s := all_reduce(y)) and (wait(r), wait(s), a)
    ),
    "waits": lambda x, y: (
        (r := all_reduce(x), s := all_reduce(y), w := wait(r), a := user_operator(y))
        and (w, wait(s), a)
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_none_passes_a_users_operator(name):
    assert BUCKET.run(trace(PASSES[name], X, Y)) == 0


def test_what_the_caller_gets_is_a_copy_and_what_is_written_back_is_not():
    def program(x, y):
        u, v = wait(all_reduce(x)), wait(all_reduce(y))
        return u, v, u.sin(), v.cos()

    step = check_comm(BUCKET, program, (X, Y), given=trace(program, X, Y, writes={1: 1}))
    assert calls(step)[-5:] == ["view", "slice", "clone", "sin", "cos"]
    first, second, *_ = step.returned
    assert not analyse(step).share(first, second)


def test_the_copy_is_made_where_it_is_read_first():
    """So that the wait can still be late."""

    def program(x, y):
        u, v = wait(all_reduce(x)), wait(all_reduce(y))
        a = y.sin().cos()
        return u, a + v, u * 2

    order = calls(check_comm(BUCKET, program, (X, Y)))
    assert order.index("cos") < order.index("clone") < order.index("mul")


OWN = {
    "a view of it is returned": lambda x, y: (
        (u := wait(all_reduce(x))).t(),
        u + 1,
        wait(all_reduce(y)) + 1,
    ),
    "read by its strides": lambda x, y: (
        wait(all_reduce(y)) + 1,
        wait(all_reduce(x)).as_strided((2,), (5,), 1) + 1,
    ),
    "read as bytes": lambda x, y: (
        wait(all_reduce(x[:1])) + 1,
        wait(all_reduce(y)).view(torch.int64) + 1,
        wait(all_reduce(y * 2)).view(3, 2).t().view(torch.int32) + 1,
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_has_to_begin_a_storage_is_copied(name):
    step = check_comm(BUCKET, OWN[name], (X, Y))
    assert count(step) == 1
    assert "clone" in calls(step)


def test_the_order_depends_on_the_graph_alone():
    def program(x, y, z):
        values = [wait(all_reduce(each * n)) for n in range(1, 4) for each in (x, y, z)]
        return [each.sin() for each in values]

    first, second = (trace(program, X, Y, Z) for _ in range(2))
    for each in second.graph.nodes:  # another rank: other names
        if each.op == "call_function":
            each.name = f"other_{each.name}"
    for step in (first, second):
        run_passes(step, [*needed_before(BUCKET), BucketCollectives(100, 50)])
    assert show_plain(first) == show_plain(second)
    assert count(first) == 4


def test_sizes_that_each_call_decides_stay():
    """Another rank may have other samples of them, and fill its buckets otherwise."""
    step = trace(lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y))), X, Y)
    size = Size.dim("t", 2, 40, 6)
    symbols = Symbols(*symbolic_mode([size]))
    with symbols.mode:
        twin = torch.empty(symbols.symint(size))
    with SampleMode(symbols):
        sample = torch.empty(6)
    pair(sample, twin)
    set_value(step.placeholders[1], sample)
    reasons = list(BUCKET.choose(step).reasons.values())
    assert reasons[0] == "all_reduce_1 has dynamic sizes"
    assert BUCKET.run(step) == 0


def test_it_needs_one_wait_each():
    step = trace(lambda x: wait(all_reduce(x)), X)
    assert "requires MergeEqualCollectives" in refusal(lambda: run_passes(step, [BUCKET]))
