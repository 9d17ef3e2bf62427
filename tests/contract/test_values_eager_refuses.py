"""Values that PyTorch's CPU kernels refuse: a call with them raises eager's error, has changed
nothing, and the next one goes on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NAN = float("nan")


def whole(*values):
    return torch.tensor(values)


def filled(value):
    return torch.full((3, 2), value)


def quotient(rounding):
    return lambda z, x: torch.div(whole(5, 7, 9), x, rounding_mode=rounding)


GOOD, ZERO = whole(1, 2, 3), whole(1, 0, 3)
TABLE = torch.arange(4.0)
CASES = {
    "a probability of too much": (lambda z, x: F.binary_cross_entropy(x, torch.ones(3, 2)),
                                  filled(0.5), filled(1.5)),
    "no probability": (lambda z, x: F.binary_cross_entropy(x, torch.ones(3, 2)),
                       filled(0.5), filled(NAN)),
    "a target of too much": (lambda z, x: F.binary_cross_entropy(torch.sigmoid(z), x),
                             filled(0.5), filled(-0.5)),
    "a model that diverged": (lambda z, x: nn.BCELoss()(torch.sigmoid(z * x), torch.ones(3, 2)),
                              filled(1.0), filled(NAN)),
    "divided by zero": (lambda z, x: whole(5, 7, 9) // x, GOOD, ZERO),
    "divided by a sum that is zero": (lambda z, x: whole(5) // x.sum(), GOOD, whole(1, 0, -1)),
    "rounded down": (quotient("floor"), GOOD, ZERO),
    "rounded to zero": (quotient("trunc"), GOOD, ZERO),
    "rest": (lambda z, x: whole(5, 7, 9) % x, GOOD, ZERO),
    "rest of a number": (lambda z, x: 7 % x, GOOD, ZERO),
    "rest with the sign": (lambda z, x: torch.fmod(whole(5, 7, 9), x), GOOD, ZERO),
    "divided in place": (lambda z, x: whole(5, 7, 9).floor_divide_(x), GOOD, ZERO),
    "a class too many": (lambda z, x: F.one_hot(x, 4), GOOD, whole(1, 4, 3)),
    "a negative class": (lambda z, x: F.one_hot(x, num_classes=4), GOOD, whole(1, -1, 3)),
    "a place by rounding": (lambda z, x: TABLE[(x * 4).long()], filled(0.9), filled(1.0)),
    "a place by rounding, written to": (
        lambda z, x: torch.zeros(4).scatter_add(0, (x * 4).long().flatten(), torch.ones(6)),
        filled(0.9), filled(-0.3)),
    "a place by rounding, put": (
        lambda z, x: torch.zeros(4).index_put(((x * 4).long(),), torch.ones(3, 2)),
        filled(0.9), filled(1.2)),
    "the greatest of more": (lambda z, x: torch.arange(2.0)[x.argmax()],
                             whole(1.0, 0.0, 0.0), whole(0.0, 0.0, 1.0)),
    "a row by rounding": (lambda z, x: F.embedding((x[0] * 4).long(), torch.ones(4, 2)),
                          filled(0.9), filled(1.0)),
    "take": (lambda z, x: torch.take(TABLE, x), GOOD, whole(1, 4, 3)),
    "margins": (lambda z, x: F.multi_margin_loss(torch.zeros(3, 4), x), GOOD, whole(1, 4, 3)),
    "cholesky": (lambda z, x: torch.linalg.cholesky(x), torch.eye(2), -torch.eye(2)),
    "inverse": (lambda z, x: torch.linalg.inv(x), torch.eye(2), torch.zeros(2, 2)),
    "solution": (lambda z, x: torch.linalg.solve(x, torch.ones(2)), torch.eye(2), filled(0.0)[:2]),
    "repeats": (lambda z, x: torch.repeat_interleave(TABLE[:3], x, output_size=6),
                GOOD, whole(-1, 4, 3)),
    "bag": (lambda z, x: F.embedding_bag(x, torch.ones(4, 2), whole(0, 2)), GOOD, whole(1, 4, 3)),
    "put": (lambda z, x: torch.zeros(4).put(x, torch.ones(3)), GOOD, whole(1, 4, 3)),
    "gathered": (lambda z, x: TABLE.gather(0, x), GOOD, whole(1, -1, 3)),
}  # fmt: skip
DRAWS = {
    "coins": (lambda z, x: torch.bernoulli(x), filled(0.5), filled(1.5)),
    "counts": (lambda z, x: torch.poisson(x), filled(0.5), filled(-0.5)),
    "choices": (lambda z, x: torch.multinomial(x, 2), filled(0.5), filled(-0.5)),
}


def made(loss_of, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(3, 5)

    def step(x):
        z = model(inputs)
        loss = z.square().sum() + loss_of(z, x).double().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
    return run, model


def outcome(run, x):
    try:
        return run(x.clone())
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore:.*run as PyTorch kernels")
@pytest.mark.parametrize("name", [*CASES, *DRAWS])
def test_a_call_that_eager_refuses_raises_its_error_and_the_next_one_goes_on(name):
    loss_of, good, bad = (CASES | DRAWS)[name]
    (run, model), (eager, twin) = made(loss_of, compiled=True), made(loss_of, compiled=False)
    for each in (run, eager):
        torch.manual_seed(2)
        each(good)
    before = {key: value.clone() for key, value in model[0].state_dict().items()}
    for x in (bad, good, bad):
        torch.manual_seed(3)
        expected = outcome(eager, x)
        torch.manual_seed(3)
        found = outcome(run, x)
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected)), found
            continue
        torch.testing.assert_close(found, expected, **CLOSE)
        assert any(not value.equal(before[key]) for key, value in model[0].state_dict().items())
    torch.testing.assert_close(model[0].state_dict(), twin[0].state_dict(), **CLOSE)
    assert not run.recompiles


@pytest.mark.filterwarnings("ignore:.*run as PyTorch kernels")
@pytest.mark.parametrize("name", [*CASES, *DRAWS])
def test_a_first_call_that_eager_refuses(name):
    loss_of, good, bad = (CASES | DRAWS)[name]
    (run, model), (eager, twin) = made(loss_of, compiled=True), made(loss_of, compiled=False)
    for x in (bad, good):
        torch.manual_seed(3)
        expected = outcome(eager, x)
        torch.manual_seed(3)
        found = outcome(run, x)
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected)), found
        else:
            torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(model[0].state_dict(), twin[0].state_dict(), **CLOSE)


def test_an_error_that_the_step_catches_is_caught():
    """As a loss that falls back where a matrix has no root."""

    def loss(z, x):
        try:
            return torch.linalg.cholesky(x).sum()
        except RuntimeError:
            return x.square().sum() + 5.0

    (run, model), (eager, twin) = made(loss, compiled=True), made(loss, compiled=False)
    for x in (torch.eye(2), -torch.eye(2), 2 * torch.eye(2), -3 * torch.eye(2)):
        torch.testing.assert_close(run(x), eager(x), **CLOSE)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), **CLOSE)


BOUNDED = {
    "argmax": lambda z, x: TABLE[x.argmax(1).clamp(max=3)],
    "nearest": lambda z, x: F.embedding(
        torch.cdist(x, torch.zeros(4, 2)).argmin(1), torch.ones(4, 2)
    ),
    "best": lambda z, x: x.gather(1, x.topk(1, dim=1)[1]),
    "sorted": lambda z, x: x[:, 0][x[:, 0].sort()[1]],
    "highest": lambda z, x: TABLE[x.max(dim=1)[1]],
    "bins": lambda z, x: torch.zeros(5)[torch.bucketize(x, TABLE)],
    "clamped": lambda z, x: TABLE[(x * 9).long().clamp(0, 3)],
    "drawn": lambda z, x: TABLE[torch.randperm(4)],
    "signs": lambda z, x: TABLE[(x > 0).long()],
    "enlarged": lambda z, x: F.interpolate(x[None, None], scale_factor=1.7, mode="nearest"),
    "smoothed": lambda z, x: F.interpolate(x[None, None], size=(5, 7), mode="bilinear"),
    "apart": lambda z, x: TABLE[x.argmax(1).flip(0)[1:]],
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_operations_bound_is_not_looked_at(name):
    run, _ = made(BOUNDED[name], compiled=True)
    x = filled(0.5)
    run(x)
    assert "expect" not in str(run.graph("captured"))
    torch.manual_seed(3)
    found = run(x)
    assert found.isfinite()


WRITES = {
    "add": (lambda t: t.add_(1), RuntimeError),
    "copy": (lambda t: t.copy_(torch.ones(3, 2)), RuntimeError),
    "item": (lambda t: t.__setitem__(0, torch.ones(2)), RuntimeError),
    "scatter": (lambda t: t.scatter_(0, torch.zeros(1, 2).long(), 1.0), RuntimeError),
    "fill": (lambda t: t.fill_(2.0), None),
}


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded")
@pytest.mark.parametrize("is_given", [True, False], ids=["argument", "made"])
@pytest.mark.parametrize("name", WRITES)
def test_writing_to_an_expanded_tensor(name, is_given):
    write, error = WRITES[name]
    model = nn.Linear(2, 2)

    def step(x):
        t = (x if is_given else x * 1).expand(3, 2)
        write(t)
        return model(t).sum() + x.sum()

    run = treadle.compile(step, model=model)
    x = torch.rand(3, 1)
    if error is None:
        torch.testing.assert_close(run(x.clone()), step(x.clone()).detach())
        return
    with pytest.raises(error):
        step(x.clone())
    with pytest.raises(error, match="TR-132"):
        run(x)
