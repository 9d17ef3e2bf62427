"""How treadle rounds: as eager where asked to, and never worse than eager by default."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

pytestmark = pytest.mark.users_flags  # how sums are rounded depends on their vectors


class Chain(nn.Module):
    """Products and sums that a compiler would like to contract."""

    def __init__(self, size: int = 1003) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))

    def forward(self, x):
        y = x * self.a + self.b
        z = y * y * y - x * y + self.a / (self.b * self.b + 1.0)
        return z * (z * z + 0.5) - x


def chain_step(model):
    def step(x):
        y = model(x)
        y.backward(torch.ones_like(y))
        return y.detach()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_operations_round_one_by_one_as_in_eager(dtype):
    """Bit for bit: PyTorch rounds each of these operations by itself. (Its square root is not
    always the nearest number, as ours is; sums with alpha= are contracted there, or not.)"""
    model = Chain().to(dtype)
    twin = copy.deepcopy(model)
    step = treadle.compile(chain_step(model), model=model, numerics="eager")
    x = torch.randn(1003).to(dtype)
    ours, theirs = step(x), chain_step(twin)(x)
    assert torch.equal(ours, theirs)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert not contracts(step)


def contracts(step):
    """Whether a sum of some kernel takes in a product before it rounds."""
    return "= t_fma(" in step.graph("sources")


class Average(nn.Module):
    """One operation with a product and a sum inside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1003))

    def forward(self, x):
        return torch.addcmul(x, self.weight, x)


def test_the_default_may_contract_inside_of_an_operation():
    for model, expected in ((Average(), True), (Chain(), False)):
        step = treadle.compile(chain_step(model), model=model)
        step(torch.randn(1003))
        assert contracts(step) == expected


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("numerics", ["default", "eager"])
def test_updates_of_half_precision_round_once(kind, numerics):
    """Ten steps from the same gradients: nearly all parameters equal eager's, the others are one
    unit in the last place away (PyTorch rounds ``alpha=`` to bfloat16 on CPUs, we do not)."""
    model = Chain(257).bfloat16()
    twin = copy.deepcopy(model)
    optimizer, other = (kind(m.parameters(), lr=1e-2) for m in (model, twin))

    def train(model, optimizer):
        def step(g):
            (model.a * g[0] + model.b * g[1]).backward(torch.ones_like(g[0]))
            optimizer.step()
            optimizer.zero_grad()

        return step

    step = treadle.compile(
        train(model, optimizer), model=model, optimizer=optimizer, numerics=numerics
    )
    eager = train(twin, other)
    for _ in range(10):
        g = torch.randn(2, 257).bfloat16()
        step(g)
        eager(g)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        unit = q.abs().float().clamp(min=0.1) * torch.finfo(torch.bfloat16).eps
        assert ((p.float() - q.float()).abs() <= unit).all()
        assert (p == q).float().mean() > 0.95


class Block(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 11)
        self.mix, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.out(F.rms_norm(x, x.shape[-1:]))


def stepping(model):
    def step(x, y):
        model.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss.detach()

    return step


def gradients(model, step, x, y):
    return [step(x, y).double(), *(p.grad.double() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_is_as_near_to_the_exact_numbers_as_eager(dtype):
    """Distance from float64 over a block with norms, attention and a loss, both summed over all
    gradients: at most a tenth more than eager's, over several batches."""
    ours = theirs = 0.0
    compiled = Block().to(dtype)
    step = treadle.compile(stepping(compiled), model=compiled)
    for seed in range(3):
        torch.manual_seed(seed)
        model = Block().to(dtype)
        compiled.load_state_dict(model.state_dict())
        x, y = torch.randn(4, 19, 48).to(dtype), torch.randint(11, (4, 19))
        wide = copy.deepcopy(model).double()
        exact = gradients(wide, stepping(wide), x.double(), y)
        mine = gradients(compiled, step, x, y)
        eager = gradients(model, stepping(model), x, y)
        for e, a, b in zip(exact, mine, eager, strict=True):
            ours += float((a - e).norm() / e.norm())
            theirs += float((b - e).norm() / e.norm())
    assert ours <= 1.1 * theirs
    assert step.recompiles == []


SUMS = {
    "rows": lambda x: x.sum(1),
    "columns": lambda x: x.sum(0),
    "middle": lambda x: x.view(len(x), -1, 4).sum(1),
    "everything": lambda x: x.abs().sum(),
    "norms": lambda x: F.layer_norm(x, x.shape[1:]),
    "softmax": lambda x: x.softmax(-1),
    "squares": lambda x: x.square().mean(0),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("shape", [(24, 4096), (5000, 12), (3, 70_000), (40_001, 4)])
def test_long_sums_are_as_near_to_the_exact_ones_as_eager(name, shape):
    """Eager adds in cascades; here float32 sums of a few hundred terms are added in float64."""
    function, model = SUMS[name], nn.Linear(1, 1)
    step = treadle.compile(function, model=model)
    ours = theirs = 0.0
    for _ in range(6):
        x = torch.randn(shape)
        exact = function(x.double())
        ours += float((step(x) - exact).norm() / exact.norm())
        theirs += float((function(x) - exact).norm() / exact.norm())
    assert ours <= 1.2 * theirs + 6 * 2**-24  # half a unit in the last place, each time


def test_an_unknown_value_is_refused():
    with pytest.raises(treadle.TreadleError, match=r"TR-001.*not one of default, eager"):
        treadle.compile(lambda: None, model=Chain(), numerics="exact")


def test_both_values_are_kept_apart_in_the_cache():
    x = torch.randn(1003)
    for numerics in ("default", "eager", "default"):
        model = Average()
        step = treadle.compile(chain_step(model), model=model, numerics=numerics)
        step(x)
        assert contracts(step) == (numerics == "default")
