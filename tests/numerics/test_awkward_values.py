"""What was found to be wrong at infinities, NaN, -0.0 and subnormals, one by one."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

TINY = 2.0**-149


def _step(function):
    return treadle.compile(function, model=nn.Linear(1, 1))


def _same(found, expected):
    torch.testing.assert_close(found, expected, equal_nan=True)
    zeros = (found == 0) & (expected == 0)
    assert torch.equal(found[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize("function", [torch.exp, torch.expm1, torch.exp2, torch.sinh, torch.cosh])
def test_a_sum_that_follows_takes_no_infinity_back(function):
    """The last product of a power of e is not to be rounded together with a sum after it."""
    x = torch.tensor([200.0, 100.0, 88.8, 89.0, 129.0] * 4)
    _same(_step(lambda x: function(x) - math.inf)(x), function(x) - math.inf)


def test_the_least_numbers_stay():
    x = torch.tensor([TINY, -TINY, 0.0, -0.0] * 8)
    _same(_step(lambda x: x.expm1() * math.inf)(x), x.expm1() * math.inf)
    y = torch.tensor([-88.8, -100.0, -104.0, 20.0] * 8, requires_grad=True)

    def slope(y):
        (g,) = torch.autograd.grad(F.softplus(y).sum() + F.logsigmoid(-y).sum(), y)
        return g

    _same(_step(slope)(y), slope(y))


def test_hypot_of_an_infinity_and_nan():
    some = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -1.0, TINY, 3e38])
    x, y = torch.cartesian_prod(some, some).t().contiguous()
    _same(_step(torch.hypot)(x, y), torch.hypot(x, y))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_smooth_l1_loss_of_nan_has_a_gradient_of_nan(reduction, beta):
    x = torch.randn(40) * 2
    x[3], x[7], x[9] = math.nan, math.inf, -math.inf
    target = torch.randn(40)

    def step(x):
        x = x.detach().requires_grad_()
        loss = F.smooth_l1_loss(x, target, reduction=reduction, beta=beta)
        return torch.autograd.grad(loss, x, torch.full_like(loss, 0.7))[0]

    _same(_step(step)(x), step(x))


def test_a_loss_of_nan_makes_no_finite_updates():
    model = nn.Linear(6, 4)
    twin = copy.deepcopy(model)
    for each, compiles in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

        def train(x, each=each, optimizer=optimizer):
            F.smooth_l1_loss(each(x), torch.zeros(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step = treadle.compile(train, model=each, optimizer=optimizer) if compiles else train
        step(torch.full((3, 6), math.nan))
    for ours, eager in zip(model.parameters(), twin.parameters(), strict=True):
        assert eager.isnan().all()
        assert ours.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, -1.0, 3.0, 0.33, 1.001])
def test_powers_of_infinities_and_zeros(dtype, exponent):
    """For float16 PyTorch takes no roots on CPUs; exponents are rounded to half precisions."""
    x = torch.tensor([-math.inf, -0.0, 0.0, math.inf, math.nan, -2.0, 4.0, 0.3] * 8, dtype=dtype)
    _same(_step(lambda x: x**exponent)(x), x**exponent)


@pytest.mark.parametrize(
    "function",
    [F.relu, F.relu6, F.softshrink, F.logsigmoid, lambda x: x.clamp(min=0.0),
     lambda x: x.clamp(max=-0.0), lambda x: x.clamp(-0.0, 0.0), F.hardtanh],
)  # fmt: skip
def test_zeros_keep_their_sign(function):
    x = torch.tensor([0.0, -0.0, 0.2, -0.2, math.nan, math.inf, -math.inf, 1000.0] * 8)
    _same(_step(function)(x), function(x))


def test_the_error_function_of_large_numbers():
    for dtype, end, rtol in ((torch.float32, 10.0, 3e-6), (torch.float64, 26.0, 1e-13)):
        x = torch.linspace(-4, end, 1000, dtype=dtype)
        found, exact = _step(torch.erfc)(x), x.double().erfc().to(dtype)
        torch.testing.assert_close(found, exact, rtol=rtol, atol=torch.finfo(dtype).tiny)
