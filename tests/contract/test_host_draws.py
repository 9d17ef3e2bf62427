"""Numbers that a step draws from Python's and NumPy's own generators, beside eager: each call
draws its own, from the same stream."""

import random
from random import random as chance
from random import uniform

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import nn

import treadle


def mixup(model, x):
    lam = np.random.beta(0.4, 0.4)
    order = torch.from_numpy(np.random.permutation(len(x)))
    mixed = lam * x + (1 - lam) * x[order]
    return model(mixed).square().mean() * lam


def several(model, x):
    noise = torch.as_tensor(np.random.normal(size=(4, 3)).astype("float32"))
    scale = random.uniform(0.5, 2.0) + random.random()
    return (model(x + noise) * scale).mean() + random.gauss(0.0, 1.0) * random.randint(1, 9)


Array = torch.FloatTensor


def noise_of_classes(model, x):
    """As older scripts make the noise and the labels of a GAN."""
    noise = Array(np.random.normal(0, 1, (x.shape[0], 3)))
    valid = Array(x.size(0), 1).fill_(1.0)
    share = torch.Tensor([np.random.uniform(0.1, 0.9)])
    return ((model(x + noise) - valid) * share).square().mean() + np.random.random()


def left(model, x):
    model.last = random.random()
    return model(x).mean() * model.last


class Jitter:
    def __init__(self):
        self.draw = random.gauss

    def __call__(self, x):
        return x + self.draw(0.0, 0.1)


JITTER = Jitter()


def imported(model, x):
    noise = torch.from_numpy(rand(4, 3).astype("float32"))
    return (model(JITTER(x) + noise) * uniform(0.5, 2.0)).mean() * chance()


DRAWING = [mixup, several, left, noise_of_classes, imported]


def losses(make, calls=5):
    torch.manual_seed(0)
    models = [nn.Linear(3, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            loss = make(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps.append((step, model, optimizer))
    batches = [torch.randn(4, 3) for _ in range(calls)]
    eager, (function, model, optimizer) = steps[0][0], steps[1]
    compiled = treadle.compile(function, model=model, optimizer=optimizer)
    found = []
    for step in (eager, compiled):
        random.seed(5)
        np.random.seed(6)
        found.append([step(x) for x in batches])
        found[-1] += [random.random(), np.random.random()]
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())
    return compiled.recompiles, models


@pytest.mark.parametrize("make", DRAWING, ids=lambda make: make.__name__)
def test_each_call_draws_its_own(make):
    recompiles, models = losses(make)
    assert recompiles == []
    assert vars(models[0]).get("last") == vars(models[1]).get("last")


def test_verify_draws_the_same():
    model = nn.Linear(3, 3)
    compiled = treadle.compile(lambda x: mixup(model, x).detach(), model=model)
    compiled(torch.randn(4, 3))
    assert compiled.verify([(torch.randn(4, 3),), (torch.randn(4, 3),)]) is None


def test_a_failed_call_has_drawn_nothing_twice():
    model = nn.Linear(3, 3)

    def step(x):
        loss = model(x).mean() * random.random()
        assert (x < 5).all()
        return loss.detach()

    compiled = treadle.compile(step, model=model)
    compiled(torch.randn(4, 3))
    random.seed(3)
    first = random.random(), random.random()
    random.seed(3)
    with pytest.raises(AssertionError):
        compiled(torch.full((4, 3), 9.0))  # runs as it is, and draws once
    assert random.random() == first[1]


def test_a_bad_index_draws_nothing():
    table = nn.Embedding(4, 2)
    compiled = treadle.compile(lambda at: table(at).sum() * random.random(), model=table)
    compiled(torch.tensor([1, 2]))
    before = random.getstate()
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 7]))
    assert random.getstate() == before


def chooses(model, x):
    return model(x) if random.random() < 0.5 else model(2 * x)


def by_chance(model, x):
    hint = None
    if model.training and chance() < 0.5:
        with torch.no_grad():
            hint = model(x)
    return model(x if hint is None else x + hint) * uniform(1.0, 2.0)


def sized(model, x):
    return model(x[: random.randint(1, 3)])


def branches(model, x):
    y = model(x)
    if random.random() < 0.5:
        y = y * random.uniform(1.0, 2.0)
    if np.random.random() < 0.5:
        y = y + np.random.normal()
    return y * random.random()


def selects(model, x):
    return random.choice([torch.relu, torch.tanh, torch.sigmoid])(model(x))


def teaches(model, x):
    h = x[0]
    for row in x:
        h = model(row if random.random() < 0.8 else h)
    return h


def repeats(model, x):
    for _ in range(np.random.randint(1, 4)):
        x = torch.tanh(model(x))
    return x


def decides_by_both(model, x):
    y = model(x) * random.random()
    if y.sum() > 0:
        y = y * random.random()
    return y * 2 if random.random() < 0.5 else y


DECIDING = [chooses, by_chance, sized, branches, selects, teaches, repeats, decides_by_both]


@pytest.mark.parametrize("make", DECIDING, ids=lambda make: make.__name__)
def test_what_a_draw_decides_is_a_path(make):
    recompiles, _ = losses(lambda model, x: make(model, x).square().mean(), calls=12)
    assert recompiles
    assert all(("was" in each and __file__ in each) or "eagerly" in each for each in recompiles)


def test_more_sizes_than_are_kept_run_eagerly():
    model = nn.Linear(3, 3)
    compiled = treadle.compile(
        lambda x: model(x[: random.randint(1, 30)]),
        model=model,
        options=treadle.Options(max_cached=2, codegen=False),
    )
    x = torch.randn(30, 3)

    def calls():
        for seed in range(8):
            random.seed(seed)
            found = compiled(x)
            random.seed(seed)
            torch.testing.assert_close(found, model(x[: random.randint(1, 30)]))

    with pytest.warns(RuntimeWarning, match="max_cached=2"):
        calls()
    assert len(compiled.recompiles) <= 3


def shuffled(model, x):
    order = [0, 1, 2, 3]
    random.shuffle(order)
    return model(x[order])


def by_any_number(model, x):
    return model(x) * (1.0 if f"{random.random():.1f}" == "0.5" else 2.0)


@pytest.mark.parametrize("make", [by_any_number, shuffled], ids=lambda make: make.__name__)
def test_what_any_number_or_order_decides_is_refused(make):
    model = nn.Linear(3, 3)
    before = random.getstate()
    with pytest.raises(treadle.CaptureError, match="TR-119"):
        treadle.compile(lambda x: make(model, x), model=model)(torch.randn(4, 3))
    assert random.getstate() == before
