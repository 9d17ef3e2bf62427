"""Mutation becomes versions and write-backs at the end: the same numbers, and no writes left."""

import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from treadle.capture.step import capture
from treadle.graph.analysis.alias import analyse
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import value_of
from treadle.graph.core.verify import verify
from treadle.graph.text.printing import show
from treadle.session.bind import read_inputs


def captured(program, *inputs):
    return capture(program, models={}, optimizers={}, args=inputs, kwargs={})


def check(program, *inputs, seed=0):
    """Captured and run, ``program`` gives eager's results and leaves what eager leaves."""
    before = [each.clone() for each in inputs]
    found = captured(program, *inputs)
    verify(found.step)
    assert all(map(torch.equal, before, inputs)), "capture wrote to an input"
    live = read_inputs(found, list(inputs))
    old = [each.clone() for each in live]
    torch.manual_seed(seed)
    values = run_step(found.step, live)
    outputs = found.step.signature.outputs
    results = [each for each, out in zip(values, outputs, strict=True) if out.writes is None]
    torch.manual_seed(seed)
    expected = program(*inputs)
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    memory = {each.untyped_storage().data_ptr() for each in inputs}
    expected = [e for e in expected if e.untyped_storage().data_ptr() not in memory]  # not results
    for each, out in zip(values, outputs, strict=True):
        if out.writes is not None:
            torch.testing.assert_close(each, live[out.writes].detach(), equal_nan=True)
    written = {out.writes for out in outputs}
    for at, each in enumerate(live):
        if at not in written:
            assert each.equal(old[at]), "a write was lost"
    torch.testing.assert_close(results, [each.detach() for each in expected], equal_nan=True)
    return found.step


def x(*shape):
    return torch.randn(shape)


def test_a_write_through_a_view_becomes_one_write_back():
    def program(w, a):
        v = w.view(4)
        v.add_(a)
        return w * 2

    step = check(program, x(2, 2), x(4))
    assert [out.writes for out in step.signature.outputs] == [None, 0]
    assert show(step).splitlines()[2:] == [
        "view: f32[4] = view(arg0_1, [4])",
        "add: f32[4] = add.Tensor(view, arg1_1)",
        "view.1: f32[2, 2] = view(add, [2, 2])",
        "mul: f32[2, 2] = mul.Tensor(view.1, 2)",
        "detach: f32[2, 2] = detach(mul)",
        "return [detach]",
        "arg0_1 <- view.1",
    ]


VIEWS = {
    "select": lambda t: t[1],
    "slice": lambda t: t[1:],
    "every other": lambda t: t[::2],
    "negative": lambda t: t[..., -1],
    "transpose": lambda t: t.transpose(0, 1),
    "t": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(-1, 0),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "view": lambda t: t.view(-1),
    "view twice": lambda t: t.view(2, 6)[1].view(3, 2),
    "reshape": lambda t: t.reshape(6, 2),
    "flatten": lambda t: t.flatten()[5:9],
    "diagonal": lambda t: t.diagonal(),
    "diagonal below": lambda t: t.diagonal(-1),
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "split": lambda t: t.split([1, 2])[1],
    "split of a transpose": lambda t: t.t().split(1)[2],
    "unsafe split": lambda t: t.unsafe_split(2, 1)[1],
    "unsafe split with sizes": lambda t: t.unsafe_split_with_sizes([1, 2])[1],
    "unsafe chunk": lambda t: t.unsafe_chunk(2)[1],
    "unbind": lambda t: t.unbind(1)[2],
    "unbind by default": lambda t: t.unbind()[-1],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "nested": lambda t: t[1:].t()[:2][1],
    "strided": lambda t: t.as_strided((2, 2), (1, 5), 1),
    "unfold": lambda t: t.unfold(1, 2, 2),
    "other dtype": lambda t: t.view(torch.int32),
    "detach": lambda t: t.detach()[0],
    "data": lambda t: t.data[:, 1],
    "ellipsis": lambda t: t[..., None, 1:3],
    "empty": lambda t: t[2:2],
    "contiguous": lambda t: t.contiguous()[2],
    "squeeze": lambda t: t[1:2].squeeze(0),
    "squeeze all": lambda t: t[1:2].squeeze(),
    "expand as it is": lambda t: t.expand(3, 4)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_writes_through_every_kind_of_view(name):
    def program(t):
        first = VIEWS[name](t)
        later = VIEWS[name](t)
        first.mul_(3)
        t.add_(1)
        first.add_(2)
        return t.sum(0), first * 1, later * 1

    check(program, x(3, 4))


@pytest.mark.parametrize("name", [*VIEWS])
def test_writes_through_views_of_a_temporary(name):
    def program(t):
        mine = t * 2
        VIEWS[name](mine).sub_(1)
        return mine

    check(program, x(3, 4))


IN_PLACE = {
    "add": lambda t: t.add_(1).sub_(t, alpha=0.5),
    "power by a number": lambda t: t.abs_().pow_(2),
    "power by a tensor": lambda t: t.abs_().pow_(torch.tensor(1.5)),
    "operators": lambda t: operator.imul(operator.iadd(t, 1), t),
    "fill": lambda t: t.fill_(3.0),
    "fill by a tensor": lambda t: t.fill_(torch.tensor(2.0)),
    "zero": lambda t: t.zero_(),
    "copy": lambda t: t.copy_(torch.arange(4)),
    "copy what is wider": lambda t: t.copy_(torch.ones(4, dtype=torch.float64)),
    "copy alike": lambda t: t.copy_(t.cos()),
    "clamp": lambda t: t.clamp_(-0.1, 0.2).clamp_min_(0.0),
    "activations": lambda t: torch.relu_(t.sigmoid_().tanh_().sub_(0.5)),
    "masked": lambda t: t.masked_fill_(t > 0, 1.0).masked_scatter_(t < 0, t * 2),
    "assigned by mask": lambda t: operator.setitem(t, t > 0, 7.0),
    "assigned by index": lambda t: operator.setitem(t, torch.tensor([2, 0]), t[:2] * 2),
    "assigned by slice": lambda t: operator.setitem(t, (slice(None), 1), t[:, 2]),
    "index": lambda t: t.index_add_(0, torch.tensor([2, 2]), torch.ones(2, 4)).index_fill_(
        1, torch.tensor([3]), 9.0
    ),
    "index copy": lambda t: t.index_copy_(0, torch.tensor([1]), torch.ones(1, 4)),
    "scatter": lambda t: t.scatter_(1, torch.tensor([[0, 2]]), 5.0).scatter_add_(
        0, torch.tensor([[1, 1]]), torch.ones(1, 2)
    ),
    "addcmul": lambda t: t.addcmul_(t, t).addcdiv_(t, t.abs() + 1, value=0.5),
    "lerp": lambda t: t.lerp_(t * 2, 0.3),
    "triangle": lambda t: t.tril_().fill_diagonal_(2.0),
    "sums": lambda t: t.cumsum_(0),
    "logic": lambda t: t.copy_((t > 0).logical_not_().logical_and_(t < 1)),
    "foreach": lambda t: torch._foreach_add_(list(t.unbind()), 1.0),
    "foreach numbers": lambda t: torch._foreach_mul_(list(t.unbind()), [1.0, 2.0, 3.0]),
    "foreach zero": lambda t: torch._foreach_zero_([t]),
    "out": lambda t: torch.add(t, 1, out=t),
    "out of another dtype": lambda t: torch.add(t, t.double(), out=t),
    "foreach clamp": lambda t: torch._foreach_clamp_max_([t], 0.1),
    "strides of a view": lambda t: t.sub_(1).as_strided((3,), (5,)).mul_(2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_every_kind_of_write(name):
    def program(t):
        seen = t[1]
        IN_PLACE[name](t)
        return t * 1, seen * 1

    check(program, x(3, 4))
    check(lambda t: program(t.t()), x(4, 3))
    check(lambda t: program(t[:, 1:, 0]), x(3, 5, 2))


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (7, 4)])
def test_awkward_shapes(shape):
    def program(t, row):
        t[..., 1:].mul_(row)
        t.t()[0].add_(1)
        return t.view(-1)[:0], t

    check(program, x(*shape), x(3))


RANDOM = {
    "bernoulli": lambda t: t.bernoulli_(),
    "bernoulli of p": lambda t: t.bernoulli_(0.3),
    "bernoulli of a tensor": lambda t: t.bernoulli_(torch.full((3, 4), 0.3)),
    "normal": lambda t: t.normal_(1.0, 2.0),
    "uniform": lambda t: t.uniform_(-1, 1),
    "exponential": lambda t: t.exponential_(),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5, inplace=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_writes_take_eagers_numbers(name):
    def program(t):
        RANDOM[name](t)
        return t + torch.rand(4)

    check(program, x(3, 4))


def test_two_results_by_out():
    def program(t):
        values, places = torch.empty(4), torch.empty(4, dtype=torch.int64)
        torch.max(t, 0, out=(values, places))
        return values + 1, places + 1

    check(program, x(3, 4))


def test_changing_the_shape_of_a_temporary():
    def program(t):
        y = t.clone()
        y.t_().unsqueeze_(0)
        y[0, 1].add_(1)
        y.squeeze_(0).transpose_(0, 1)
        return y * 1

    check(program, x(3, 4))


@pytest.mark.parametrize(
    "program",
    [
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(2),
        lambda t: t.set_(torch.ones(3)),
    ],
)
def test_changing_the_shape_of_an_input_is_refused(program):
    given = x(3, 4)
    with pytest.raises(treadle.CaptureError, match="TR-107") as caught:
        captured(program, given)
    assert "lambda" in caught.value.where
    assert given.shape == (3, 4)


def test_writing_to_memory_that_two_inputs_share_in_part_is_refused():
    tokens = x(5, 3)
    with pytest.raises(treadle.CaptureError, match="TR-112") as caught:
        captured(lambda a, b: a.add_(b), tokens[:-1], tokens[1:])
    assert "argument a and argument b" in str(caught.value)
    check(lambda a, b: a * b, tokens[:-1], tokens[1:])  # reading is fine


@pytest.mark.parametrize(
    ("first", "second"), [((0, 6), (6, 12)), ((10, 16), (0, 10)), ((3, 9), (12, 20))]
)
def test_parts_of_one_memory_that_do_not_overlap_are_inputs_of_their_own(first, second):
    def program(a, b):
        a.add_(1).view(2, -1)[0].mul_(2)
        b[1:].copy_(a[:2].sum())
        return a * 2, b.exp()

    flat = x(20)
    check(program, flat[slice(*first)], flat[slice(*second)])


def shared(step):
    """Which pairs of inputs share a storage, for the passes; in two ways of telling."""
    places, aliases = step.placeholders, analyse(step)
    pairs = set(itertools.combinations(range(len(places)), 2))
    found = {(a, b) for a, b in pairs if aliases.share(places[a], places[b])}
    assert {(a, b) for a, b in pairs if aliases.base(places[b]) is places[a]} <= found
    return found


def test_only_inputs_that_overlap_share_a_storage_afterwards():
    flat = x(40)
    given = flat[0:6], flat[6:12], flat[12:20].view(2, 4), flat[16:24], flat[30:40:3], flat[31:37:3]
    read = check(lambda *all: [each.sum() for each in all], *given)
    assert shared(read) == {(2, 3), (4, 5)}  # between the elements of the last two: too careful
    assert [value_of(each).storage_offset() for each in read.placeholders] == [0, 0, 0, 4, 0, 1]

    def program(a, b, c, d, e, f):
        row = b.view(2, 3)[1]
        row.mul_(2)
        return row + a[:3], c[1] * d[:4], e * 1

    step = check(program, *given[:5], x(4))
    assert shared(step) == {(2, 3)}


def test_bytes_decide_which_inputs_overlap():
    """Of two dtypes in one storage; the first double lies over two of the floats."""
    memory = torch.zeros(48, dtype=torch.uint8)
    floats, doubles = memory.view(torch.float32), memory.view(torch.float64)
    given = floats[1:3], doubles[1:3], floats[6:8], doubles[4:6]
    step = check(lambda a, b, c, d: [a * 2, b * 2, c.add_(1) * 2, d * 2], *given)
    assert shared(step) == {(0, 1)}
    a, b = step.placeholders[:2]
    assert value_of(a).storage_offset() * 4 + 4 == value_of(b).storage_offset() * 8


def test_an_input_whose_reader_counts_in_its_storage_stays_in_it():
    flat = x(12)
    step = check(lambda a, b, c: [a.as_strided((2,), (2,), 5) + b[:2], c * 1],
                 flat[4:8], flat[8:12], flat[:4])  # fmt: skip
    assert value_of(step.placeholders[0]).storage_offset() == 4
    assert shared(step) == set()


def test_views_share_the_storage_of_their_own_input_alone():
    flat = x(12)
    step = check(lambda a, b: [a.view(2, 3)[0] * 1, b.view(2, 3)[0] * 1], flat[:6], flat[6:])
    aliases, views = (
        analyse(step),
        step.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int),
    )
    assert [aliases.base(each) for each in views] == step.placeholders


def test_a_view_of_two_inputs_at_once_is_refused():
    flat = x(12)
    with pytest.raises(treadle.CaptureError, match="TR-107"):
        captured(lambda a, b: a.as_strided((12,), (1,)).add_(b.sum()), flat[:6], flat[6:])


def test_an_input_that_is_only_written():
    check(lambda t, u: t.copy_(u).sum() * 0, x(3), x(3))
    check(lambda t: t.fill_(2.0) * 0, x(3))


WRITES = [
    lambda t, k: t.add_(k),
    lambda t, k: t.mul_(1.5),
    lambda t, k: t.copy_(t.flip(0) if t.dim() else t * 2),
    lambda t, k: t.clamp_(min=-1.0),
    lambda t, k: t.zero_() if k == 3 else t.neg_(),
    lambda t, k: t.fill_(float(k)),
]
READS = [
    lambda t: t[0] if t.dim() and t.shape[0] else t,
    lambda t: t[1:] if t.dim() else t,
    lambda t: t.transpose(0, -1) if t.dim() > 1 else t,
    lambda t: t.unsqueeze(0),
    lambda t: t.reshape(-1),
    lambda t: t[..., ::2] if t.dim() else t,
    lambda t: t.diagonal() if t.dim() > 1 else t,
    lambda t: t.detach(),
    lambda t: t.clone(),
    lambda t: t * 2,
    lambda t: t.unbind(0)[-1] if t.dim() and t.shape[0] else t,
    lambda t: t.split(2)[0] if t.dim() else t,
]

moves = st.lists(
    st.tuples(st.booleans(), st.integers(0, 11), st.integers(0, 7), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(moves, st.sampled_from([(3, 4), (2, 3, 5), (1, 1), (7,), (4, 4)]))
def test_random_programs_of_views_and_writes(program, shape):
    """Each move writes to a value made so far, or makes another, maybe a view, from it."""

    def run(a, b):
        values = [a, b, a.t() if a.dim() == 2 else a * 1]
        for writes, what, which, k in program:
            target = values[which % len(values)]
            if writes:
                WRITES[what % len(WRITES)](target, k)
            else:
                values.append(READS[what](target))
        return [each.sum() for each in values]

    check(run, x(*shape), x(*shape))
