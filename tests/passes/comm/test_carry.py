"""A step as three: their text, their numbers, and every move that is refused."""

import itertools
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from counted import batch, reduced, stack
from testing import node_of, refusal, show_plain, trace
from treadle.capture.step import capture
from treadle.compiler.carrying import carried_steps
from treadle.graph.analysis.execute import run_step
from treadle.graph.analysis.update_blocks import update_blocks
from treadle.graph.core.collectives import collectives_in, is_wait
from treadle.graph.core.node_info import value_of, with_info
from treadle.graph.core.signature import Role
from treadle.graph.core.values import inherit
from treadle.graph.core.verify import verify
from treadle.graph.rewrite.order import restore_order
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Carry, Options
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.comm.carry.carried_nodes import carried
from treadle.passes.comm.carry.moves import Move, update_moves
from treadle.util.errors import TreadleError

ops = torch.ops.test
aten = torch.ops.aten


def program(w, m, x, lr):
    h = torch.relu(x @ w.t())
    g = (h.t() @ x) * 2.0
    s = ops.counted_all_reduce(g)
    m2 = m * 0.9 + s
    return h.sum(), w - m2 * lr, m2


def traced():
    given = torch.randn(5, 4), torch.zeros(5, 4), torch.randn(6, 4), torch.tensor(0.1).double()
    roles = {"w": Role.PARAMETER, "m": Role.STATE, "lr": Role.SCALAR}
    return trace(program, *given, writes={1: 0, 2: 1}, roles=roles), given


def set_from(step, first):
    """All that is computed of the only call of ``first``, and the momentum."""
    decayed = [each for each in step.placeholders[1].users if each.target is aten.mul.Tensor]
    found = {node_of(step, first), *decayed}
    for node in step.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


REDUCE = ops.counted_all_reduce.default


def test_three_steps_as_text():
    step, _ = traced()
    steps = carried(step, [Move(set_from(step, REDUCE))])
    assert show_plain(steps.first) == show_plain_text(FIRST)
    assert show_plain(steps.steady) == show_plain_text(STEADY)
    assert show_plain(steps.flush) == show_plain_text(FLUSH)
    assert steps.flushed == (0, 1)
    assert steps.results == 1


def show_plain_text(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


FIRST = """
    w: f32[5, 4]
    m: f32[5, 4]
    x: f32[6, 4]
    lr: f64[]
    t: f32[4, 5] = t(w)
    mm: f32[6, 5] = mm(x, t)
    relu: f32[6, 5] = relu(mm)
    t.1: f32[5, 6] = t(relu)
    mm.1: f32[5, 4] = mm(t.1, x)
    mul: f32[5, 4] = mul.Tensor(mm.1, 2.0)
    sum: f32[] = sum(relu)
    return [sum, lr, mul]
"""
STEADY = """
    w: f32[5, 4]
    m: f32[5, 4]
    x: f32[6, 4]
    lr: f64[]
    lr_carried: f64[]
    mul_carried: f32[5, 4]
    test: f32[5, 4] = test.counted_all_reduce(mul_carried)
    mul: f32[5, 4] = mul.Tensor(m, 0.9)
    add: f32[5, 4] = add.Tensor(mul, test)
    mul.1: f32[5, 4] = mul.Tensor(add, lr_carried)
    sub: f32[5, 4] = sub.Tensor(w, mul.1)
    t: f32[4, 5] = t(sub)
    mm: f32[6, 5] = mm(x, t)
    relu: f32[6, 5] = relu(mm)
    t.1: f32[5, 6] = t(relu)
    mm.1: f32[5, 4] = mm(t.1, x)
    mul.2: f32[5, 4] = mul.Tensor(mm.1, 2.0)
    sum: f32[] = sum(relu)
    return [sum]
    m <- add
    w <- sub
    lr_carried <- lr
    mul_carried <- mul.2
"""
FLUSH = """
    w: f32[5, 4]
    m: f32[5, 4]
    lr_carried: f64[]
    mul_carried: f32[5, 4]
    test: f32[5, 4] = test.counted_all_reduce(mul_carried)
    mul: f32[5, 4] = mul.Tensor(m, 0.9)
    add: f32[5, 4] = add.Tensor(mul, test)
    mul.1: f32[5, 4] = mul.Tensor(add, lr_carried)
    sub: f32[5, 4] = sub.Tensor(w, mul.1)
    return []
    m <- add
    w <- sub
"""


class Machine:
    """Runs a step, or the three of it, on named tensors, by PyTorch."""

    def __init__(self, step, values, steps=None):
        self.step, self.steps = step, steps
        self.values = [each.clone() for each in values]
        self.kept = None

    def call(self, changes):
        for at, value in changes.items():
            self.values[at] = value
        if self.steps is None:
            return self._run(self.step, self.values)
        if self.kept is None:
            made = self._run(self.steps.first, self.values)
            self.kept = [each.clone() for each in made[self.steps.results :]]
            return made[: self.steps.results]
        return self._run(self.steps.steady, [*self.values, *self.kept])

    def flush(self):
        if self.kept is not None:
            own = [self.values[at] for at in self.steps.flushed]
            self._run(self.steps.flush, [*own, *self.kept])
            self.kept = None

    def _run(self, step, inputs):
        made = [None if each is None else each.clone() for each in run_step(step, inputs)]
        for output, value in zip(step.signature.outputs, made, strict=True):
            if output.writes is not None:
                inputs[output.writes].copy_(value)
        pairs = zip(step.signature.outputs, made, strict=True)
        return [value for output, value in pairs if output.writes is None]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def check_equal(step, steps, values, changing, calls=100, flushes=(1, 2, 50)):
    """``changing``: inputs that are another tensor at each call."""
    plain, moved = Machine(step, values), Machine(step, values, steps)
    for number in range(1, calls + 1):
        changes = {at: torch.randn_like(values[at]).abs() * 0.1 for at in changing}
        assert same(plain.call(changes), moved.call(changes)), f"a result of call {number}"
        if number in flushes:
            moved.flush()
            assert same(plain.values, moved.values), f"state after a flush at call {number}"
    moved.flush()
    assert same(plain.values, moved.values)


def test_results_and_state_are_those_of_the_step():
    step, given = traced()
    steps = carried(step, [Move(set_from(step, REDUCE))])
    check_equal(step, steps, given, changing=(2, 3))


def two_parameters(v, w, x, scale):
    h = x @ w
    y = torch.tanh(h) @ v
    gv = torch.tanh(h).t() @ y
    gw = x.t() @ (y @ v.t())
    a = v - ops.counted_all_reduce(gv) * scale
    b = w - ops.counted_all_reduce(gw) * v.sum()
    return y.sum(), a, b


def two_sets():
    given = torch.randn(5, 3) * 0.1, torch.randn(4, 5) * 0.1, torch.randn(6, 4), torch.ones(())
    roles = {"v": Role.PARAMETER, "w": Role.PARAMETER, "scale": Role.BUFFER}
    step = trace(two_parameters, *given, writes={1: 0, 2: 1}, roles=roles)
    first, second = step.graph.find_nodes(op="call_function", target=REDUCE)
    _, a, b = step.returned
    total = next(each for each in b.all_input_nodes if each.op == "call_function")
    sets = {first, a, *a.all_input_nodes}, {second, b, total}
    return step, given, [frozenset(n for n in each if n.op == "call_function") for each in sets]


@pytest.mark.parametrize("both", [False, True])
def test_a_set_reads_what_another_writes_as_it_was_in_its_own_call(both):
    """The update of ``w`` reads the ``v`` of before; with both moved it is carried to it."""
    step, given, (first, second) = two_sets()
    moves = [Move(first), Move(second)] if both else [Move(second)]
    check_equal(step, carried(step, moves), given, changing=(2, 3), calls=40)


def test_carried_values_are_each_carried_once():
    def shared(v, w, x):
        g = x * 2.0
        return g.sum(), v - g, w - g

    given = torch.randn(3), torch.randn(3), torch.randn(3)
    roles = {"v": Role.PARAMETER, "w": Role.PARAMETER}
    step = trace(shared, *given, writes={1: 0, 2: 1}, roles=roles)
    _, a, b = step.returned
    steps = carried(step, [Move(frozenset([a])), Move(frozenset([b]))])
    assert len(steps.carried) == 1
    check_equal(step, steps, given, changing=(2,), calls=10)


def test_views_are_taken_again_from_what_is_carried():
    def viewed(w, x):
        g = x @ x.t()
        return g.sum(), w - g.t().reshape(-1)[:3] * g.t()[0, 0]

    given = torch.randn(3), torch.randn(3, 3)
    step = trace(viewed, *given, writes={1: 0}, roles={"w": Role.PARAMETER})
    _, new = step.returned
    product = next(each for each in new.all_input_nodes if each.op == "call_function")
    steps = carried(step, [Move(frozenset([new, product]))])
    check_equal(step, steps, given, changing=(1,), calls=10)


def test_what_overlaps_is_carried_in_a_plain_layout():
    def spread(w, x):
        g = x.sum(0, keepdim=True).expand(4, 3)
        return g.sum(), w - g * g, g

    given = torch.randn(4, 3), torch.randn(5, 3)
    step = trace(spread, *given, writes={1: 0}, roles={"w": Role.PARAMETER})
    _, new, _ = step.returned
    product = next(each for each in new.all_input_nodes if each.target is aten.mul.Tensor)
    check_equal(
        step, carried(step, [Move(frozenset([new, product]))]), given, changing=(1,), calls=10
    )


def test_what_the_call_returns_is_not_what_is_carried():
    """The caller may write to its result; the carried value is the step's own."""

    def returned(w, x):
        g = x * 2.0
        return g, w - g

    given = torch.randn(3), torch.randn(3)
    step = trace(returned, *given, writes={1: 0}, roles={"w": Role.PARAMETER})
    _, new = step.returned
    steps = carried(step, [Move(frozenset([new]))])
    result, kept = run_step(steps.first, given)
    assert torch.equal(result, kept)
    assert result.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr()


def test_nothing_of_the_step_changes():
    step, _ = traced()
    before = show_plain(step)
    carried(step, [Move(set_from(step, REDUCE))])
    assert show_plain(step) == before


# Refused, by nodes.


def by_nodes(case):
    step, _ = traced()
    moved = set_from(step, REDUCE)
    new = step.returned[1]
    relu = node_of(step, aten.relu.default)
    return step, case(step, moved, new, relu)


NODES = {
    "before is in the set": (
        lambda step, moved, new, relu: [Move(moved, new)],
        "TR-535",
        "is moved itself",
    ),
    "before is in another set": (
        lambda step, moved, new, relu: [Move(moved - {new}, None), Move(frozenset([new]), None)],
        "TR-531",
        "sub (sub.Tensor) reads",
    ),
    "two sets share a node": (
        lambda step, moved, new, relu: [Move(moved), Move(frozenset([new]))],
        "TR-535",
        "sub (sub.Tensor) is in another moved set",
    ),
    "a set that is not closed": (
        lambda step, moved, new, relu: [Move(moved - {new})],
        "TR-531",
        "sub (sub.Tensor) reads",
    ),
    "the head of a set only": (
        lambda step, moved, new, relu: [Move(frozenset([node_of(step, REDUCE)]))],
        "TR-531",
        "add (add.Tensor) reads",
    ),
    "a result of the call": (
        lambda step, moved, new, relu: [Move(frozenset([node_of(step, aten.sum.default)]))],
        "TR-532",
        "the call returns 'out0'",
    ),
    "an input": (
        lambda step, moved, new, relu: [Move(frozenset([step.placeholders[0]]))],
        "TR-530",
        "w is not an operation",
    ),
    "a node of another step": (
        lambda step, moved, new, relu: [Move(set_from(traced()[0], REDUCE))],
        "TR-530",
        "is not an operation of the step",
    ),
    "nothing at all": (
        lambda step, moved, new, relu: [Move(frozenset())],
        "TR-530",
        "writes to no",
    ),
    "before an input": (
        lambda step, moved, new, relu: [Move(moved, step.placeholders[0])],
        "TR-535",
        "not an operation of the step",
    ),
    "before a node of another step": (
        lambda step, moved, new, relu: [Move(moved, node_of(traced()[0], aten.relu.default))],
        "TR-535",
        "not an operation of the step",
    ),
    "behind a transposed view": (
        lambda step, moved, new, relu: [Move(moved, relu)],
        "TR-533",
        "t (t) reads 'w'",
    ),
}


@pytest.mark.parametrize(("case", "code", "words"), NODES.values(), ids=NODES)
def test_refused_by_nodes(case, code, words):
    step, moves = by_nodes(case)
    with pytest.raises(TreadleError) as found:
        carried(step, moves)
    assert found.value.code == code
    assert words in found.value.message


def test_refused_to_write_to_what_is_another_tensor_at_the_next_call():
    def overwritten(x, y):
        return x.sum(), y * 2.0

    step = trace(overwritten, torch.randn(3), torch.randn(3), writes={1: 1})
    words = refusal(lambda: carried(step, [Move(frozenset([step.returned[1]]))]))
    assert "'y', which may be another tensor at the next call" in words


def test_refused_to_write_to_memory_that_another_input_shows():
    def aliased(w, v, x):
        return v.sum() + x.sum(), w - x

    w = torch.randn(4)
    step = trace(aliased, w, w.view(2, 2), torch.randn(4), writes={1: 0},
                 roles={"w": Role.PARAMETER, "v": Role.BUFFER})  # fmt: skip
    words = refusal(lambda: carried(step, [Move(frozenset([step.returned[1]]))]))
    assert "'v' shares memory with 'w'" in words


# Refused, in users' words.


def settings(model, optimizer, between=lambda x: None, after=lambda x, y: None, first=None):
    def step(x, y):
        extra = 0.0 if first is None else first(x)
        loss = (model(x) - y).square().mean() + extra
        loss.backward()
        reduced(model)
        between(x)
        optimizer.step()
        result = after(x, y)
        optimizer.zero_grad()
        return loss.detach(), result

    return step


def steps_of(function, model, optimizer, carry, given=None):
    found = capture(
        function,
        models={"": model},
        optimizers={"": optimizer},
        args=given or batch(),
        kwargs={},
    )
    return found.step, carried_steps(found, Options(carry=carry))


def adam(model):
    return torch.optim.Adam([each for each in model.parameters() if each.requires_grad])


class Tied(nn.Module):
    """Two layers of one weight, read as it is and transposed."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 5), nn.Linear(5, 4, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.detach().t().contiguous())
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.out(F.relu(self.into(x))) + F.linear(self.into(x), self.out.weight))


class Twice(nn.Module):
    """A module that is called twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.between, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.inner(self.between(self.inner(x))))


class Shared(nn.Module):
    """Input and output share one parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.middle.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(torch.relu(self.first(x))))


class Read(nn.Module):
    """``last.weight`` is read by ``how`` ahead of the layer that it belongs to."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 5), nn.Linear(5, 3), how

    def forward(self, x):
        early = self.how(self.last.weight)
        return self.last(torch.relu(self.first(x))) + early.sum() * 0.01


def plain(model_kind=stack, between=None, after=None, first=None, parameters=None):
    """A function that makes model, optimizer and step."""

    def make():
        model = model_kind()
        optimizer = adam(model) if parameters is None else parameters(model)
        hooks = {
            "between": (lambda x: between(model, x)) if between else lambda x: None,
            "after": (lambda x, y: after(model, optimizer, x, y)) if after else lambda x, y: None,
            "first": (lambda x: first(model, x)) if first else None,
        }
        return model, optimizer, settings(model, optimizer, **hooks)

    return make


def clipped(model, x):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def by_tensor(model, x):
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    for each in model.parameters():
        each.grad.div_(norm)


def skipping(model, x):
    fine = torch.stack([each.grad.isfinite().all() for each in model.parameters()]).all()
    for each in model.parameters():
        each.grad.copy_(torch.where(fine, each.grad, 0.0))


def by_largest(model, x):
    largest = torch.stack([each.grad.abs().max() for each in model.parameters()]).max()
    for each in model.parameters():
        each.grad.mul_(1.0 / (1.0 + largest))


def pair_clipped(model, x):
    nn.utils.clip_grad_norm_(list(model.parameters())[:2], 1.0)


def noisy(model, x):
    for each in model.parameters():
        each.grad.add_(torch.randn_like(each.grad), alpha=0.01)


def strange(model, x):
    for each in model.parameters():
        each.grad.copy_(ops.strange(each.grad))


def average(model, optimizer, x, y):
    with torch.no_grad():
        model.mean.lerp_(model[0].weight, 0.1)


def with_mean():
    model = stack()
    model.register_buffer("mean", torch.zeros(5, 4))
    return model


def frozen():
    model = stack()
    model[0].requires_grad_(False)
    return model


def unfinished(model, optimizer):
    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        reduced(model)
        optimizer.step()
        return loss.detach()

    return step


def keeps_gradients():
    model = stack()
    optimizer = adam(model)
    return model, optimizer, unfinished(model, optimizer)


@torch.no_grad()
def clamp(model):
    model[0].weight.clamp_(-0.2, 0.2)


def steps_twice():
    model = stack()
    optimizer = adam(model)
    once = settings(model, optimizer)

    def step(x, y):
        once(x, y)
        return once(x, y)

    return model, optimizer, step


def outside():
    model = stack()
    optimizer = adam(model)
    kept = {}

    def keep(x):
        kept["gradient"] = model[0].weight.grad

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        reduced(model)
        keep(x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, optimizer, step


def hands_out():
    model = stack()
    optimizer = adam(model)
    kept = {}
    once = settings(model, optimizer)

    def step(x, y):
        loss = once(x, y)
        kept["weight"] = model[0].weight
        return loss

    return model, optimizer, step


def reading(how):
    return plain(lambda: Read(how))


LAST = Carry("last.weight", before="last")
WORDS = {
    "no such parameter": (plain(), Carry("nothing.*"), "TR-530", "'nothing.*'"),
    "none of several patterns": (plain(), Carry(("a", "b")), "TR-530", "'a', 'b'"),
    "a function that takes none": (
        plain(), Carry(lambda name: False), "TR-530", "that a function chooses",
    ),
    "a frozen parameter": (plain(frozen), Carry("0.weight"), "TR-530", "'0.weight'"),
    "global norm": (plain(between=clipped), Carry("0.*"), "TR-534", "depends on the gradient of"),
    "global norm, all": (plain(between=clipped), Carry(), "TR-534", "reads both"),
    "norm as a tensor": (plain(between=by_tensor), Carry("2.bias"), "TR-534", "reads both"),
    "skipped steps": (plain(between=skipping), Carry("0.*"), "TR-534", "depends on the gradient"),
    "the largest": (plain(between=by_largest), Carry("0.weight"), "TR-534", "reads both"),
    "norm of a pair": (plain(between=pair_clipped), Carry("0.bias"), "TR-534", "0.weight"),
    "noise": (plain(between=noisy), Carry("0.weight"), "TR-536", "randn_like"),
    "an operator of the user's": (plain(between=strange), Carry("0.bias"), "TR-536", "strange"),
    "returned parameter": (
        plain(after=lambda model, optimizer, x, y: model[0].weight), Carry("0.weight"),
        "TR-532", "this call returns the parameter itself",
    ),
    "a parameter left outside": (
        hands_out, Carry("0.weight"), "TR-532", "this call returns the parameter itself",
    ),
    "returned copy of a parameter": (
        plain(after=lambda model, optimizer, x, y: model[0].weight.detach().clone()),
        Carry("0.weight"), "TR-531", "clone",
    ),
    "returned view of a parameter": (
        plain(after=lambda model, optimizer, x, y: model[0].weight[0]), Carry("0.weight"),
        "TR-532", "this call returns the parameter itself",
    ),
    "norm of parameters": (
        plain(after=lambda model, optimizer, x, y: model[2].weight.norm()), Carry("2.*"),
        "TR-531", "norm",
    ),
    "evaluation within the step": (
        plain(after=lambda model, optimizer, x, y: model(x).sum()), Carry("0.bias"),
        "TR-531", "addmm",
    ),
    "reduced gradient returned": (
        plain(after=lambda model, optimizer, x, y: model[0].bias.grad), Carry("0.bias"),
        "TR-532", "the call returns 'result 1'",
    ),
    "norm of a gradient logged": (
        plain(after=lambda model, optimizer, x, y: model[0].bias.grad.norm()), Carry("0.bias"),
        "TR-531", "norm",
    ),
    "an average of a parameter": (
        plain(with_mean, after=average), Carry("0.weight"), "TR-531", "0.weight",
    ),
    "gradients that stay": (keeps_gradients, Carry("0.weight"), "TR-532", "'grad of 0.weight'"),
    "a gradient kept outside": (outside, Carry("0.weight"), "TR-532", "kept"),
    "two choices that overlap": (
        plain(), (Carry("0.*"), Carry("*.weight")), "TR-535", "another moved set",
    ),
    "no such module": (plain(), Carry("0.*", before="lost"), "TR-535", "'lost'"),
    "behind its own layer": (plain(), Carry("0.weight", before="2"), "TR-533", "reads '0.weight'"),
    "a bias behind its layer": (plain(), Carry("0.bias", before="1"), "TR-533", "reads '0.bias'"),
    "all in front of the last": (plain(), Carry(before="2"), "TR-533", "in module 0"),
    "tied weights": (
        plain(Shared), Carry("first.weight", before="middle"), "TR-533", "reads 'first.weight'",
    ),
    "a module called twice": (
        plain(Twice), Carry("inner.*", before="between"), "TR-533", "in module inner",
    ),
    "transposed": (reading(lambda w: w.t() @ w), LAST, "TR-533", "reads 'last.weight'"),
    "flattened": (reading(lambda w: w.view(-1) * 2), LAST, "TR-533", "reads 'last.weight'"),
    "a row": (reading(lambda w: w[0] * 2), LAST, "TR-533", "reads 'last.weight'"),
    "a piece": (reading(lambda w: w.chunk(3)[1] * 2), LAST, "TR-533", "reads 'last.weight'"),
    "by strides": (
        reading(lambda w: w.as_strided((2, 2), (1, 2)) * 2), LAST, "TR-533", "reads 'last.weight'",
    ),
    "detached": (reading(lambda w: w.detach() * 2), LAST, "TR-533", "reads 'last.weight'"),
    "regularised": (reading(lambda w: w.square()), LAST, "TR-533", "pow"),
    "spread": (
        reading(lambda w: w.unsqueeze(0).expand(2, 3, 5) * 2), LAST, "TR-533", "'last.weight'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "carry", "code", "words"), WORDS.values(), ids=WORDS)
def test_refused_in_users_words(make, carry, code, words):
    model, optimizer, function = make()
    with pytest.raises(TreadleError) as found:
        steps_of(function, model, optimizer, carry)
    assert found.value.code.startswith(code)
    assert words in found.value.message


def test_at_least_thirty_moves_are_refused():
    assert len(NODES) + len(WORDS) >= 50


# Legal ones that look like the refused.

LEGAL = {
    "each in front of its reader": (plain(), Carry()),
    "in front of its own layer": (plain(), Carry("2.*", before="2")),
    "before the first layer": (plain(), Carry(before="0")),
    "three sets": (plain(lambda: stack(4)), (Carry("0.*"), Carry("2.*"), Carry("4.*"))),
    "two updates in one call": (steps_twice, Carry("0.weight")),
    "tied": (plain(Shared), Carry("first.weight")),
    "a module called twice": (plain(Twice), Carry("inner.*")),
    "read early, moved further": (reading(lambda w: w.t() @ w), Carry("last.*")),
    "each clipped by itself": (
        plain(between=lambda model, x: [
            nn.utils.clip_grad_norm_([each], 0.1) for each in model.parameters()
        ]),
        Carry(),
    ),
    "clipped by value": (
        plain(between=lambda model, x: nn.utils.clip_grad_value_(model.parameters(), 0.01)),
        Carry(),
    ),
    "scaled by what another call sees": (
        plain(between=lambda model, x: [
            each.grad.mul_(x.abs().mean()) for each in model.parameters()
        ]),
        Carry("2.*"),
    ),
    "clamped after its update": (
        plain(after=lambda model, optimizer, x, y: clamp(model)), Carry("0.*"),
    ),
    "parameters of the call before returned": (
        plain(first=lambda model, x: model[0].weight.square().mean()), Carry("2.*"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "carry"), LEGAL.values(), ids=LEGAL)
def test_what_is_legal_gives_the_same(make, carry):
    model, optimizer, function = make()
    step, steps = steps_of(function, model, optimizer, carry)
    torch.manual_seed(3)
    values = []
    for _, given in step.inputs():
        found = {name: each.detach() for name, each in model.named_parameters()}
        if given.name in found:
            values.append(found[given.name].clone())
        elif given.role is Role.SCALAR:
            values.append(torch.tensor(SCALARS[given.name.split(".")[1]], dtype=torch.float64))
        else:
            fake = value_of(step.placeholders[len(values)])
            zeros = given.role is Role.STATE
            values.append((torch.zeros if zeros else torch.randn)(fake.shape))
    changing = [at for at, each in enumerate(step.signature.inputs) if each.role is Role.BATCH]
    rate = [at for at, each in enumerate(step.signature.inputs) if each.name == "adam.lr.0"]
    check_equal(step, steps, values, changing=[*changing, *rate], calls=20, flushes=(1, 7))


SCALARS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 5.0}


def test_a_step_that_updates_nothing_is_left_alone():
    model = stack()
    found = capture(
        lambda x: model(x).sum(), models={"": model}, optimizers={}, args=(torch.randn(2, 4),),
        kwargs={},
    )  # fmt: skip
    assert carried_steps(found, Options(carry=Carry())) is None


def capture_of(function, model, optimizer):
    found = capture(
        function, models={"": model}, optimizers={"": optimizer}, args=batch(), kwargs={}
    )
    run_passes(found.step, [RemoveNoOps(), RemoveDeadCode()])
    return found


def call_behind(node, target, *args, phase):
    """A new call that stands behind ``node``."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, args)
    inherit(made, node)
    with_info(made, phase=phase)
    return made


def communicated(step, names, *, coalesced, phase):
    """The stand-ins of these parameters become collectives. ``phase``: where they are started."""
    blocks = update_blocks(step).by_name
    old = [blocks[name].gradients[0] for name in names]
    assert all(each.target is REDUCE for each in old)
    given = [each.args[0] for each in old]
    last = max(given, key=list(step.graph.nodes).index) if phase == "backward" else old[-1]
    if coalesced:
        target = torch.ops._c10d_functional.all_reduce_coalesced.default
        start = call_behind(last, target, given, "sum", "0", phase=phase)
        made = [
            call_behind(start, operator.getitem, start, at, phase=phase) for at in range(len(given))
        ]
    else:
        target = torch.ops._c10d_functional.all_reduce.default
        made = [call_behind(last, target, each, "sum", "0", phase=phase) for each in given]
    for before, each in zip(old, made, strict=True):
        wait = call_behind(made[0], torch.ops._c10d_functional.wait_tensor.default, each,
                           phase=phase)  # fmt: skip
        before.replace_all_uses_with(wait)
        step.graph.erase_node(before)
    restore_order(step.graph)
    verify(step)


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_a_collective_moves_with_its_update(phase):
    """Also one that a hook starts in the middle of the backward pass."""
    model = stack()
    optimizer = adam(model)
    names = [name for name, _ in model.named_parameters()]
    step = capture_of(settings(model, optimizer), model, optimizer).step
    communicated(step, names, coalesced=False, phase=phase)
    steps = carried(step, update_moves(step, names[:2]))
    assert [len(collectives_in(each.graph)) for each in (step, steps.first)] == [4, 2]
    assert [len(collectives_in(each.graph)) for each in (steps.steady, steps.flush)] == [4, 2]
    waits = [sum(map(is_wait, each.graph.nodes)) for each in (steps.first, steps.steady)]
    assert waits == [2, 4]


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_updates_of_one_coalesced_collective_move_together(phase):
    model = stack()
    optimizer = adam(model)
    names = [name for name, _ in model.named_parameters()]
    step = capture_of(settings(model, optimizer), model, optimizer).step
    communicated(step, names[:2], coalesced=True, phase=phase)
    moves = update_moves(step, names)
    assert [len(m.words.split(",")) for m in moves] == [2, 1, 1]
    for left, right in itertools.combinations(moves, 2):
        assert not left.nodes & right.nodes
    steps = carried(step, moves)
    assert len(collectives_in(steps.flush.graph)) == 1
    assert not collectives_in(steps.first.graph)
    words = refusal(lambda: carried(step, update_moves(step, names[:1])))
    assert "reads all_reduce_coalesced" in words


def test_a_collective_whose_result_is_read_elsewhere_does_not_move():
    model = stack()
    optimizer = adam(model)
    names = [name for name, _ in model.named_parameters()]
    function = settings(model, optimizer, after=lambda x, y: model[0].weight.grad.norm())
    step = capture_of(function, model, optimizer).step
    communicated(step, names, coalesced=False, phase="backward")
    words = refusal(lambda: carried(step, update_moves(step, names[:1])))
    assert "norm" in words
