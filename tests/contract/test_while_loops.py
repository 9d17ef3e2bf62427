"""``torch.while_loop`` in a step: how often it runs is looked up at each call, and numbers and
gradients are those of Python's ``while``, no round included."""

import copy
import warnings

import pytest
import torch
from torch import cond, nn, while_loop
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.options import Options, RegionRule, Regions
from treadle.session.breaks import breaks_of
from treadle.util.reasons import ReasonCode

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*TR-314. an index of:RuntimeWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.linspace(-1, 1, 4))
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.linspace(0, 1, 4)


def plain_while(condition, body, carried):
    """What ``torch.while_loop`` means."""
    while bool(condition(*carried)):
        carried = body(*carried)
    return carried


def plain_if(pred, yes, no, operands=()):
    return yes(*operands) if bool(pred) else no(*operands)


def count():
    return torch.zeros((), dtype=torch.int64)


def training(model, loss, loop):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(x, rounds):
        value = loss(model, x, rounds, loop)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return train, optimizer


def train_with(model, loss, loop, tmp_path, **options):
    train, optimizer = training(model, loss, loop)
    if loop is plain_while:
        return train
    options = Options(cache_dir=tmp_path, **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=options)


def beside_others(model, x, rounds, loop):
    """What the functions use from outside: the batch, a module, a parameter that others use too."""
    body = lambda i, h: (i + 1, torch.tanh(model.second(h)) * model.scale + x)  # noqa: E731
    i, h = loop(lambda i, h: i < rounds, body, (count(), model.first(x)))
    return h.square().mean() + model.scale.sum() * i.float() + model.second(x).mean()


def several(model, x, rounds, loop):
    one = beside_others(model, x, rounds, loop)
    two = late_gradient(model, x.cos(), rounds + 1, loop)
    return one + two * 1e-2


def in_a_loop(model, x, rounds, loop):
    def body(i, h):
        step = lambda j, g: (j + 1, (g * model.scale + h).sin())  # noqa: E731
        _, g = loop(lambda j, g: j < i, step, (count(), h * 2))
        return i + 1, g + model.second(h) * 0.1

    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].mean()


def with_a_branch(model, x, rounds, loop):
    choose = plain_if if loop is plain_while else cond

    def body(i, h):
        return i + 1, choose(h.sum() > 0, lambda: h * model.scale, lambda: model.second(h).sin())

    go_on = lambda i, h: (i < rounds) & (h.abs().max() < 1e3)  # noqa: E731
    return loop(go_on, body, (count(), model.first(x)))[1].mean()


def containers(model, x, rounds, loop):
    def body(state):
        h, (total, i) = state["h"], state["k"]
        return ({"h": h.sin() * model.table + model.constant, "k": (total + h.mean(), i + 1)},)

    state = {"h": model.first(x), "k": (x.sum(), count())}
    (state,) = loop(lambda state: state["k"][1] < rounds, body, (state,))
    return state["h"].sum() * state["k"][0]


def late_gradient(model, x, rounds, loop):
    """Carried tensors that have a gradient after a round only, one of them after two."""
    body = lambda i, h, g: (i + 1, h + g, (x * model.scale).cos())  # noqa: E731
    start = (count(), torch.zeros(3, 4), torch.ones(3, 4))
    _, h, g = loop(lambda i, h, g: i < rounds, body, start)
    return h.square().mean() + g.sum() + model.first(x).sum()


def cut_gradient(model, x, rounds, loop):
    """A round passes none on; where there is no round, there is one."""
    body = lambda i, h: (i + 1, h.detach() * 2)  # noqa: E731
    return (
        loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].mean() + model.scale.sum()
    )


def swapped(model, x, rounds, loop):
    h = model.first(x)
    body = lambda i, a, b: (i + 1, b * 0.5, a * 1)  # noqa: E731
    _, a, b = loop(lambda i, a, b: i < rounds, body, (count(), h, h * model.scale))
    return (a * 3 + b).square().mean()


def from_outside(model, x, rounds, loop):
    h = model.first(x)
    _, a = loop(lambda i, a: i < rounds, lambda i, a: (i + 1, h), (count(), h * model.scale))
    return a.mean()


def in_place(model, x, rounds, loop):
    def body(i, h):
        y = h.clone()
        y[:, 0] = 3
        y.mul_(model.scale)
        y.t()[1] += x[:, 0]
        return i + 1, y

    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].square().mean()


def transposed(model, x, rounds, loop):
    body = lambda i, a: (i + 1, (a.t() @ model.second.weight).sin().t())  # noqa: E731
    _, a = loop(lambda i, a: i < rounds, body, (count(), model.first(x).t()))
    return a.reshape(-1)[3:].square().sum() + a.mean()


def checkpointed(model, x, rounds, loop):
    def part(h):
        body = lambda i, h: (i + 1, torch.tanh(model.second(h)) * model.scale)  # noqa: E731
        return loop(lambda i, h: i < rounds, body, (count(), h * model.scale))[1]

    return checkpoint(part, model.first(x), use_reentrant=False).square().mean()


def without_gradient(model, x, rounds, loop):
    with torch.no_grad():
        body = lambda i, h: (i + 1, torch.tanh(model.second(h)))  # noqa: E731
        _, h = loop(lambda i, h: i < rounds, body, (count(), model.first(x)))
    return (h * model.scale).mean()


def partly_without_gradient(model, x, rounds, loop):
    """A parameter is used without gradients first, and with them after that."""

    def body(i, h):
        with torch.no_grad():
            factor = (model.scale * 2).sum()
        return i + 1, (h * model.scale * factor).tanh()

    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].square().mean()


def constants(model, x, rounds, loop):
    def body(i, h):
        return i + torch.tensor(1), h + torch.tensor([1.0, 2.0, 3.0, 4.0]) * model.scale

    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].mean()


def rows_by_number(model, x, rounds, loop):
    def body(i, h):
        row = F.embedding(i.view(1) % 4, model.first.weight)
        return i + 1, h * 0.5 + model.second.weight[i % 4] + row

    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].square().mean()


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


def function_of_the_user_s(model, x, rounds, loop):
    body = lambda i, h: (i + 1, Exponential.apply((h * model.scale).tanh()))  # noqa: E731
    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].mean()


def before_parameters(model, x, rounds, loop):
    """What it gives has no gradient of its own."""
    _, h = loop(lambda i, h: i < rounds, lambda i, h: (i + 1, h * 2), (count(), x))
    return model.first(h).mean()


def until_small(model, x, rounds, loop):
    """Values decide, not a count."""
    (h,) = loop(lambda h: h.abs().max() > 0.1, lambda h: (h * model.scale / 2,), (model.first(x),))
    return h.square().sum() + rounds * 0


def divided(model, x, rounds, loop):
    body = lambda i, h: (i + 1, h * (7 // (i + 1)) * 0.1)  # noqa: E731
    return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].mean()


LOSSES = [
    beside_others,
    several,
    in_a_loop,
    with_a_branch,
    containers,
    late_gradient,
    cut_gradient,
    swapped,
    from_outside,
    in_place,
    transposed,
    checkpointed,
    without_gradient,
    partly_without_gradient,
    constants,
    rows_by_number,
    function_of_the_user_s,
    before_parameters,
    until_small,
    divided,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda each: each.__name__)
def test_numbers_and_gradients_are_those_of_python_s_while(loss, tmp_path):
    model = Net().double()
    model.constant = model.constant.double()
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(torch.seed() % 1000)
    torch.set_default_dtype(torch.float64)
    try:
        step = train_with(model, loss, while_loop, tmp_path)
        eager = train_with(twin, loss, plain_while, tmp_path)
        some = torch.randint(0, 7, (2,), generator=generator).tolist()
        for rounds in (3, 0, 1, *some, 0):
            x = torch.randn(3, 4)
            given = x, torch.tensor(rounds)
            torch.testing.assert_close(step(*given), eager(*given), rtol=1e-9, atol=1e-12)
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_in_a_body(kind, tmp_path):
    """Each round casts the weight, and sums its gradients in float32; one ``while`` under autocast
    casts it once, and sums them in the low dtype: so a few of its roundings apart."""

    def loss(model, x, rounds, loop):
        with torch.autocast("cpu", kind):
            body = lambda i, h: (i + 1, torch.tanh(model.second(h)).float())  # noqa: E731
            _, h = loop(lambda i, h: i < rounds, body, (count(), model.first(x).float()))
        return h.square().mean()

    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    step = train_with(model, loss, while_loop, tmp_path)
    eager = train_with(twin, loss, plain_while, tmp_path)
    for rounds in (2, 0, 3):
        given = torch.randn(3, 4), torch.tensor(rounds)
        torch.testing.assert_close(step(*given), eager(*given), rtol=1e-2, atol=1e-3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_regions_and_words_name_what_a_round_runs(tmp_path):
    step = train_with(Net(), beside_others, while_loop, tmp_path, strict=True)
    given = torch.randn(3, 4), torch.tensor(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*given)
    assert not breaks_of(step.compiled.artifact)
    assert {region.compiler for region in step.regions()} == {"native"}
    inside = [region for region in step.regions() if region.inside]
    assert {region.inside for region in inside} == {
        "while_loop_default",
        "while_loop_backward_default",
    }
    assert "in each round of while_loop_default" in inside[0].text
    assert "lt.Tensor(carried_0, other_0)" in inside[0].text
    assert [region.number for region in step.regions()] == list(range(len(step.regions())))
    assert step.verify([given]) is None
    assert "(each round)" in step.explain()
    assert "treadle.while_loop.default" in step.explain()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"codegen": False}, ReasonCode.NO_CODEGEN),
        ({"regions": Regions(rules=(RegionRule("eager", "*while_loop*"),))}, ReasonCode.CHOSEN),
    ],
)
def test_rounds_are_pytorch_s_kernels_where_that_is_asked_for(options, code, tmp_path):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    step = train_with(model, beside_others, while_loop, tmp_path, **options)
    eager = train_with(twin, beside_others, plain_while, tmp_path)
    given = torch.randn(3, 4), torch.tensor(3)
    torch.testing.assert_close(step(*given), eager(*given))
    artifact = step.compiled.artifact
    assert not artifact.bodies
    reasons = {each.op: each.reason for each in artifact.fallbacks}
    assert reasons["treadle.while_loop.default"].startswith(code)
    assert reasons["treadle.while_loop_backward.default"].startswith(code)
    assert not any(region.inside for region in step.regions())


def test_it_is_one_operation_whose_text_is_all_of_it(tmp_path):
    step = train_with(Net(), in_a_loop, while_loop, tmp_path)
    given = torch.randn(3, 4), torch.tensor(3)
    step(*given)
    for stage in ("captured", "clean"):
        text = step.graph(stage)
        assert show(parse(text), exact=True) == text
        assert "loop_value" not in text
        assert [line.count("treadle.while_loop(") for line in text.splitlines()].count(1) == 1


def test_a_cached_and_a_saved_step_have_their_loops(tmp_path):
    torch.manual_seed(0)
    models = [Net()]
    models += [copy.deepcopy(models[0]), copy.deepcopy(models[0])]
    step = train_with(models[0], beside_others, while_loop, tmp_path / "first")
    given = torch.randn(3, 4), torch.tensor(3)
    loss = step(*given)
    step.save(tmp_path / "step")
    cached = train_with(models[1], beside_others, while_loop, tmp_path / "first")
    train, optimizer = training(models[2], beside_others, while_loop)
    loaded = treadle.load(
        tmp_path / "step",
        train,
        model=models[2],
        optimizer=optimizer,
        options=Options(cache_dir=tmp_path / "second"),
    )
    for each in (cached, loaded):
        assert torch.equal(each(*given), loss)
        assert each.compiled.from_cache


def test_another_body_is_another_step(tmp_path):
    """Also where it differs in a number alone."""
    keys = set()
    for factor in (2, 3):
        body = lambda h, factor=factor: (h * factor,)  # noqa: E731
        step = treadle.compile(
            lambda x, body=body: while_loop(lambda h: h.sum() < 9, body, (x,))[0],
            model=nn.Module(),
            options=Options(cache_dir=tmp_path),
        )
        expected = {2: [8.0, 8.0], 3: [9.0, 9.0]}[factor]
        assert step(torch.ones(2)).tolist() == expected
        keys.add(step.compiled.key)
    assert len(keys) == 2


def test_numbers_of_python_s_are_those_of_the_call(tmp_path):
    """One that the step was given, in the condition and in the body."""
    step = treadle.compile(
        lambda x, most, by: while_loop(lambda h: h.sum() < most, lambda h: (h * by,), (x,))[0],
        model=nn.Module(),
        options=Options(cache_dir=tmp_path),
    )
    for most, by in ((9, 2.0), (9, 3.0), (2.5, 3.0), (1000, 1.5), (1, 2.0)):
        expected = torch.ones(2)
        while expected.sum() < most:
            expected = expected * by
        torch.testing.assert_close(step(torch.ones(2), most, by), expected)


def leaves_a_value(model, i, h):
    model.last = h * 2
    return i + 1, h * 2


def of_a_function(model, i, h):
    return i + 1, Exponential.apply(model.scale) + h


BODIES = {
    "its body has a side effect .aten.bernoulli": lambda m, i, h: (i + 1, F.dropout(h, 0.5)),
    "its body writes to a tensor from outside$": lambda m, i, h: (m.count.add_(1).long(), h * 2),
    "its body writes to a tensor from outside .aten.add_": lambda m, i, h: (i.add_(1) * 1, h * 2),
    "in its body a size depends on values": lambda m, i, h: (i + 1, h[h > 0].sum() + h),
    r"its body returns torch.float32 \[6, 4\] on cpu for torch.float32 \[3, 4\]": lambda m, i, h: (
        i + 1,
        torch.cat([h, h]),
    ),
    r"its body returns torch.float64 \[3, 4\] on cpu for torch.float32": lambda m, i, h: (
        i + 1,
        h.double(),
    ),
    r"its body returns 3 for torch.int64 \[\]": lambda m, i, h: (3, h * 2),
    "its body does not return the containers that it receives": lambda m, i, h: [i + 1, h * 2],
    "its body computes gradients": lambda m, i, h: (i + 1, torch.autograd.grad(h.sum(), h)[0]),
    "its body sets an attribute of a tensor": lambda m, i, h: (i + 1, setattr(h, "grad", None)),
    "a value of one iteration is used outside that iteration": leaves_a_value,
    "its body uses a tensor from outside that is not an operand": of_a_function,
    "a torch.func transform in it uses a tensor from outside": lambda m, i, h: (
        i + 1,
        torch.vmap(lambda row: row * m.scale)(h),
    ),
}


@pytest.mark.parametrize("why", BODIES)
def test_a_body_that_does_more_is_refused(why, tmp_path):
    torch.manual_seed(0)
    model = Net()

    def loss(model, x, rounds, loop):
        body = lambda i, h: BODIES[why](model, i, h)  # noqa: E731
        return loop(lambda i, h: i < rounds, body, (count(), model.first(x)))[1].sum()

    refused(train_with(model, loss, while_loop, tmp_path), model, why)


def refused(step, model, why, code="TR-151"):
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(treadle.CaptureError, match=rf"(?m){code}(.|\n)*{why}") as error:
        step(torch.rand(3, 4), torch.tensor(3))
    assert "test_while_loops.py" in error.value.where
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


LOOPS = {
    "its condition is not a tensor but True": lambda h: while_loop(
        lambda h: True, lambda h: (h * 1,), (h,)
    ),
    r"its condition is torch.float32 \[\] on cpu, not a single": lambda h: while_loop(
        torch.sum, lambda h: (h * 1,), (h,)
    ),
    r"its condition is torch.bool \[3, 4\] on cpu, not a single": lambda h: while_loop(
        lambda h: h > 0, lambda h: (h * 1,), (h,)
    ),
    "its condition has a side effect .aten.rand": lambda h: while_loop(
        lambda h: torch.rand(()) < 0.5, lambda h: (h * 1,), (h,)
    ),
    "it carries an int, whose value is known only after the last": lambda h: while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, h), (0, h)
    )[1:],
    "it carries no tensor": lambda h: while_loop(lambda: False, lambda: (), ()) or (h,),
    "it carries a tensor that is not dense": lambda h: while_loop(
        lambda h: h.sum() < 3, lambda h: (h * 1,), (h.to_sparse(),)
    ),
    "it is inside a torch.func transform": lambda h: (
        torch.vmap(
            lambda row: while_loop(lambda row: row.sum() < 3, lambda row: (row + 1,), (row,))[0]
        )(h),
    ),
}


@pytest.mark.filterwarnings("ignore:.*batching rule.*")
@pytest.mark.parametrize("why", LOOPS)
def test_a_loop_that_eager_would_not_run_so_is_refused(why, tmp_path):
    model = Net()
    loss = lambda m, x, rounds, loop: LOOPS[why](m.first(x))[0].sum()  # noqa: E731
    refused(train_with(model, loss, while_loop, tmp_path), model, why)


def test_a_second_derivative_is_refused(tmp_path):
    def loss(model, x, rounds, loop):
        (h,) = loop(lambda h: h.sum() < 9, lambda h: (h * 2 + 1,), (model.first(x),))
        (grad,) = torch.autograd.grad(h.sum(), model.first.weight, create_graph=True)
        return grad.square().sum()

    model = Net()
    refused(train_with(model, loss, while_loop, tmp_path), model, "differentiated again", "TR-140")


def test_declared_sizes_are_refused(tmp_path):
    model = nn.Linear(4, 4)

    def evaluate(x):
        return while_loop(lambda h: h.sum() < 9, lambda h: (h + 1,), (model(x),))[0]

    step = treadle.compile(
        evaluate,
        model=model,
        shapes=treadle.dynamic({"x": ("rows", None)}, rows=(2, 8)),
        options=Options(cache_dir=tmp_path),
    )
    with pytest.raises(treadle.CaptureError, match=r"TR-151(.|\n)*declared or unknown sizes"):
        step(torch.randn(3, 4))
