"""Every operator that draws, on tensors of every layout: eager's numbers, at eager's places, and
the generator where eager leaves it."""

import itertools
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from contract.contract_help import training

QUICK = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "permuted": lambda x: x.permute(1, 2, 0, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every other": lambda x: x[..., ::2],
    "a slice of rows": lambda x: x[:, 1:, 1:],
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "one row": lambda x: x[:, :1].transpose(1, 3),
    "flat": lambda x: x.flatten(),
    "a number": lambda x: x.sum(),
    "nothing": lambda x: x[:, :0].transpose(0, 3),
}
"""How the tensor lies that a draw looks like."""

IN_PLACE = {
    "normal_": lambda t: t.normal_(),
    "normal_ of two numbers": lambda t: t.normal_(1.0, 0.3),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda t: t.bernoulli_(torch.full_like(t, 0.4)),
    "exponential_": lambda t: t.exponential_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(),
    "random_ to": lambda t: t.random_(100),
    "random_ from": lambda t: t.random_(7, 100),
}
OF_A_TENSOR = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli of nothing": lambda x: torch.bernoulli(torch.empty_like(x), 0.3),
    "poisson": lambda x: torch.poisson(3 * x),
    "binomial": lambda x: torch.binomial((9 * x).round(), x),
    "normal": lambda x: torch.normal(x, 2 * x),
    "normal with one spread": lambda x: torch.normal(x, 0.5),
    "normal around one mean": lambda x: torch.normal(0.5, x),
    "gamma": lambda x: torch._standard_gamma(x + 0.1),
    "dirichlet": lambda x: torch._sample_dirichlet(x + 0.1),
    "multinomial": lambda x: torch.multinomial(x + 0.1, 1),
    "multinomial with replacement": lambda x: torch.multinomial(x + 0.1, 3, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of channels": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}
OF_NOTHING = {
    "rand": lambda: torch.rand(3, 5),
    "randn": lambda: torch.randn(17),
    "randint": lambda: torch.randint(2, 9, (4,)),
    "randperm": lambda: torch.randperm(7),
    "normal of a shape": lambda: torch.normal(0.0, 1.0, (5,)),
}
ONLY = {  # what eager takes
    "multinomial": {"a number of rows"},
    "multinomial with replacement": {"a number of rows"},
    "attention": {"contiguous", "transposed", "permuted", "channels last", "expanded"},
    "dropout of channels": {"a row of channels"},
    "feature_alpha_dropout": {"contiguous", "transposed", "permuted", "channels last"},
    "bernoulli": set(LAYOUTS) - {"a number"},  # its probability is above 1
    "native_dropout": set(LAYOUTS) - {"nothing"},
    "gumbel_softmax": set(LAYOUTS) - {"a number", "nothing"},
    "dirichlet": set(LAYOUTS) - {"a number", "nothing"},
}
ROWS = {
    "a number of rows": lambda x: x[0, 0].t(),
    "a row of channels": lambda x: x[0].permute(2, 0, 1),
}


def cases():
    for name, layout in itertools.product(OF_A_TENSOR, {**LAYOUTS, **ROWS}):
        if layout in ONLY.get(name, set(LAYOUTS)):
            yield name, layout
    for name, layout in itertools.product(IN_PLACE, set(LAYOUTS) - {"expanded"}):
        yield name, layout
    for name in OF_NOTHING:
        yield name, ""


CASES = sorted(cases())
_TURN = len(CASES) % 3


def drawn(case, x):
    name, layout = case
    if name in OF_NOTHING:
        return OF_NOTHING[name]()
    like = {**LAYOUTS, **ROWS}[layout](x)
    if name in OF_A_TENSOR:
        return OF_A_TENSOR[name](like)
    if layout in ("every other", "a slice of rows"):  # in place, with gaps between
        return IN_PLACE[name]({**LAYOUTS}[layout](torch.zeros(x.shape)))
    return IN_PLACE[name](torch.empty_like(like))


def compare(function, x, *, exact=True, **options):
    """Twice, so that what is kept from one call to the next would show."""
    model = nn.Identity()
    chosen = treadle.Options(progress=False, **options)
    step = treadle.compile(function, model=model, options=chosen)
    for seed in (3, 4):
        found = []
        for each in (function, step):
            torch.manual_seed(seed)
            found.append((each(x), torch.get_rng_state()))
        (eager, state), (ours, after) = found
        for wanted, got in zip(eager, ours, strict=True):
            if exact:
                assert torch.equal(got, wanted) or got.isnan().any()
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(state, after)


def as_list(value):
    return list(value) if isinstance(value, tuple) else [value]


@QUICK
@given(
    draws=st.lists(st.tuples(st.sampled_from(CASES), st.booleans()), min_size=2, max_size=7),
    budget=st.sampled_from([None, None, 0.0]),
)
def test_any_draws_in_any_order_read_or_not(draws, budget):
    def function(x):
        results = []
        for case, read in draws:
            made = as_list(drawn(case, x + 0.0))
            results += made if read else []
        return [*results, torch.rand(2)]

    compare(function, torch.rand(2, 3, 4, 6), exact=False, codegen=False, memory=budget)


def test_every_operator_on_four_layouts():
    """All in two steps, since each step is a compile; other layouts each time."""
    some = [case for at, case in enumerate(CASES) if at % 3 == _TURN]
    for part in (some[::2], some[1::2]):

        def function(x, part=part):
            return [each for case in part for each in as_list(drawn(case, x + 0.0))]

        compare(function, torch.rand(2, 3, 4, 6), exact=False, codegen=False)


@pytest.mark.parametrize("memory", [None, 0.0])
def test_in_generated_code(memory):
    def function(x):
        y = (x + 1.0).sqrt()
        some = sorted(set(LAYOUTS) - {"nothing"})
        dropped = [F.dropout(LAYOUTS[name](y), 0.3) * 2.0 for name in some]
        empty = [torch.empty_like(LAYOUTS[name](y)) for name in ("transposed", "permuted")]
        noise = [each.normal_() + 1.0 for each in empty]
        return [*dropped, *noise, torch.rand(2)]

    compare(function, torch.rand(2, 3, 4, 6), exact=False, memory=memory)


LAYERS = {
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True),
    "dropout of the transposed": lambda: Transposed(),
    "channels last": lambda: nn.Sequential(ChannelsLast(), nn.Conv2d(1, 4, 2), nn.Dropout(0.4)),
}


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = F.dropout(self.linear(x).transpose(0, 1), 0.3)
        return h + torch.empty_like(h).uniform_() + torch.empty_like(h).bernoulli_(0.5)


class ChannelsLast(nn.Module):
    def forward(self, x):
        return x[:, None].contiguous(memory_format=torch.channels_last)


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) + torch.rand(())


def trained(make, **options):
    """Losses, parameters and the generator's state after two steps."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(lambda x: model(x).square().mean(), optimizer)
    if options:
        train = treadle.compile(train, model=model, optimizer=optimizer, **options)
    x = torch.randn(3, 5, 8)
    torch.manual_seed(5)
    losses = [train(x) for _ in range(2)]
    return [*losses, *(p.detach().clone() for p in model.parameters())], torch.get_rng_state()


@pytest.mark.parametrize("memory", [None, 0.0])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_steps_with_dropout_on_any_layout(name, wrapped, memory):
    make = LAYERS[name]
    if wrapped:
        make = partial(lambda inner: Checkpointed(inner()), make)
    eager, state = trained(make)
    plain = treadle.Options(codegen=False, memory=memory, progress=False)
    ours, after = trained(make, options=plain)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert torch.equal(after, state)


def test_in_generated_code_with_a_budget():
    eager, state = trained(LAYERS["dropout of the transposed"])
    ours, after = trained(LAYERS["dropout of the transposed"], memory=0.0)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert torch.equal(after, state)


@pytest.mark.parametrize("memory", [None, 0.0])
def test_in_the_backend(memory):
    found = []
    for options in (None, {"memory": memory}):
        torch.manual_seed(0)
        model = Transposed()
        run = model
        if options:
            run = torch.compile(model, backend="treadle", options=options)
        x = torch.randn(3, 5, 8)
        torch.manual_seed(5)
        loss = run(x).square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        found.append(([loss.detach(), *grads], torch.get_rng_state()))
    (eager, state), (ours, after) = found
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert torch.equal(after, state)


def test_counted_masks_of_the_transposed():
    def function(x):
        y = F.dropout(x.transpose(0, 1) + 1.0, 0.4)
        return y, F.dropout(x[:, 0], 0.0)

    step = treadle.compile(function, model=nn.Identity(), rng="counter")
    x = torch.randn(50, 40, 3)
    y, _ = step(x)
    assert y.stride() == (x + 1.0).transpose(0, 1).stride()
    kept = y != 0
    assert abs(kept.float().mean() - 0.6) < 0.02
    assert torch.allclose(y[kept], (x.transpose(0, 1) + 1.0)[kept] / 0.6)
