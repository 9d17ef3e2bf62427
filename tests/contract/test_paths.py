"""Steps that decide by values of tensors: one variant for each path that calls take, with eager's
numbers, random ones among them, and nothing of a call on the wrong path is left."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


class Trainer:
    """Of a script: what it decides by stands in the step."""

    def __init__(self, decide, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4))
        self.model.append(nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.verdict = None
        self.decide = decide
        self.call = self.step
        if options.pop("compiled", False):
            self.call = treadle.compile(
                self.step,
                model=self.model,
                optimizer=self.optimizer,
                options=treadle.Options(codegen=False, **options),
            )

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        return self.decide(self, loss)


LARGE = 2.2


def scales(self, loss):
    if loss > 1.1:
        loss = loss * 0.5
    loss.backward()
    self.optimizer.step()
    return loss.detach()


def skips(self, loss):
    loss.backward()
    norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    if norm.item() < LARGE:
        self.optimizer.step()
    return norm


def names(self, loss):
    loss.backward()
    self.optimizer.step()
    self.verdict = "yes" if float(loss) < 1.1 else "no"
    return loss.item()


def by_variable(self, loss):
    """The truth of a value is in a variable before the code asks for it."""
    is_small = (loss < 1.1).item()
    is_finite = bool(torch.isfinite(loss).all().item())
    if not is_finite:
        return None
    loss.backward()
    if is_small:
        self.optimizer.step()
    return loss.detach() * (2 if is_small else 1)


def by_comparison(self, loss):
    is_large = loss.item() > 1.1
    scale = 0.5 if is_large else 2.0
    (loss * scale).backward()
    self.optimizer.step()
    return loss.detach(), is_large


def several(self, loss):
    if loss.item() > 1.2 and self.model[0].bias.sum() > 0:
        loss = loss + self.model[0].weight.square().sum()
    loss.backward()
    if not self.model[0].weight.grad.sum() > 0:
        self.optimizer.step()
    return loss.detach()


def after(self, loss):
    loss.backward()
    self.optimizer.step()
    if self.model[0].weight.sum() > -0.3:
        with torch.no_grad():
            self.model[0].weight.mul_(0.9)
    return loss.detach()


def limits(self, loss):
    (loss * max(loss.detach(), 1.1)).backward()
    self.optimizer.step()
    return loss.detach()


def orders(self, loss):
    least, most = sorted([loss, loss.detach() * 0 + 1.1])
    (least + 0.5 * most).backward()
    self.optimizer.step()
    return least.detach()


def trains(trainer, calls=10):
    found = []
    for at in range(calls):
        torch.manual_seed(at)
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        found.append((trainer.call(x, y), torch.rand(2)))
    return found


def assert_alike(one, other):
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert one.verdict == other.verdict


@pytest.mark.parametrize(
    "decide",
    [scales, skips, names, by_variable, by_comparison, several, after, limits, orders],
)
def test_each_call_takes_its_own_path(decide):
    eager, ours = Trainer(decide), Trainer(decide, compiled=True)
    torch.testing.assert_close(trains(ours), trains(eager), rtol=1e-5, atol=1e-5)
    assert_alike(ours, eager)
    why = ours.call.recompiles
    assert why
    assert all("a branch on a tensor was" in each and __file__ in each for each in why), why
    assert len(why) <= 3
    before = list(why)
    trains(ours)
    assert ours.call.recompiles == before or decide is several


def test_a_path_is_captured_when_it_is_first_taken():
    model = nn.Linear(3, 3)

    def step(x):
        if x.sum() > 0:
            return model(x)
        return model(x) * 2

    compiled = treadle.compile(step, model=model)
    x = torch.ones(2, 3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), step(x))
    assert not compiled.recompiles
    for sign in (-1, 1, -1, -1, 1):
        torch.testing.assert_close(compiled(sign * x), step(sign * x))
    assert len(compiled.recompiles) == 1
    text = str(compiled.explain())
    assert "the path that these tensor values select" in text
    assert "True: " in text
    assert "if x.sum() > 0:" in text


def test_a_call_starts_on_the_path_of_the_last_one():
    """Also after calls that were served without another look at what they read."""
    model, left = nn.Linear(3, 3), []

    def step(x):
        y = model(x)
        return y * 3 if y.sum() > 0 else y - 1

    compiled = treadle.compile(step, model=model)
    real = compiled._dispatcher.takes_other_path

    def counted(*batch):
        left.append(len(left))
        return real(*batch)

    compiled._dispatcher.takes_other_path = counted
    with torch.no_grad():
        model.bias.fill_(1.0)
    rise = torch.randn(3, 2, 3) * 0.1
    rise[1] -= 10 * model.weight.detach().sum(0).sign()
    for at in (0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 2, 2):  # how often the path changes, it is left
        torch.testing.assert_close(compiled(rise[at]), step(rise[at]))
    assert len(left) == 4
    assert len(compiled.recompiles) == 1


def test_where_each_call_takes_a_path_of_its_own_few_are_tried():
    """Looking for a path costs about as much as the call."""
    model, tried = nn.Linear(8, 8), []

    def step(x):
        y = model(x)
        for at in range(8):
            if x[0, at] > 0:
                y = y * (at + 2)
        return y

    compiled = treadle.compile(step, model=model, options=treadle.Options(max_cached=2))
    real = compiled._dispatcher.takes_other_path

    def counted(*batch):
        tried.append(batch)
        return real(*batch)

    compiled._dispatcher.takes_other_path = counted
    x = torch.ones(1, 8)
    first, second = torch.eye(8)[3:4] - 0.5, -x
    assert torch.equal(compiled(first), step(first))
    assert torch.equal(compiled(second), step(second))
    with pytest.warns(RuntimeWarning, match="max_cached=2"):
        torch.testing.assert_close(compiled(x), step(x))
    for _ in range(200):
        x = torch.randn(1, 8)
        torch.testing.assert_close(compiled(x), step(x))
    assert len(tried) < 40
    for _ in range(130):  # a variant serves them again, sooner or later
        torch.testing.assert_close(compiled(second), step(second))
    tried.clear()
    torch.testing.assert_close(compiled(first), step(first))
    assert tried


def test_more_paths_than_are_kept_run_eagerly():
    model = nn.Linear(3, 3)

    def step(x):
        y = model(x)
        for at in range(3):
            if x[0, at] > 0:
                y = y * (at + 2)
        return y

    compiled = treadle.compile(step, model=model, options=treadle.Options(max_cached=3))

    def calls():
        for number in [*range(8), *range(8)]:
            x = torch.tensor([[1.0 if number >> at & 1 else -1.0 for at in range(3)]])
            torch.testing.assert_close(compiled(x), step(x))

    with pytest.warns(RuntimeWarning, match="max_cached=3"):
        calls()
    assert len(compiled.recompiles) == 3, compiled.recompiles


def test_a_loop_until_a_value_is_small():
    model = nn.Linear(3, 3)

    def step(x):
        y = model(x)
        while not (y.abs().sum() < 1.0).item():
            y = y * 0.5
        return y

    compiled = treadle.compile(step, model=model)
    for scale in (1.0, 4.0, 1.0, 9.0):
        x = torch.ones(2, 3) * scale
        torch.testing.assert_close(compiled(x), step(x))


def test_the_way_that_a_call_does_not_take_may_fail():
    model = nn.Linear(3, 3)

    def step(x):
        loss = model(x).sum() if (x > 0).any() else None
        return loss * 2

    compiled = treadle.compile(step, model=model)
    good, bad = torch.ones(2, 3), -torch.ones(2, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(good), step(good))
        with pytest.raises(TypeError, match="NoneType"):
            compiled(bad)


@pytest.mark.parametrize("budget", [None, 1.0, 0.7])
def test_within_a_budget_and_with_generated_code(budget):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        loss = model(x).square().mean()
        if x.mean() > 0:
            loss = loss + model[0][0].weight.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    twin = copy.deepcopy((model, optimizer))
    options = {} if budget is None else {"memory": budget}
    compiled = treadle.compile(step, model=model, optimizer=optimizer, **options)
    inputs = [torch.randn(128, 64) + sign for sign in (1, -1, 1, 1, -1)]
    found = [compiled(x) for x in inputs]
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(twin[0].state_dict())
    optimizer.load_state_dict(twin[1].state_dict())
    expected = [step(x) for x in inputs]
    assert found == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(state, model.state_dict(), rtol=1e-3, atol=1e-4)
    assert len(compiled.recompiles) == 1


def test_draws_of_a_generator_of_the_users_own():
    """Its questions cannot be asked beforehand: the first guess is compiled, others are eager's."""
    model = nn.Linear(3, 3)

    def step(x, generator):
        y = model(x) + torch.rand(2, 3, generator=generator)
        return y * 2 if y.sum() > 0 else y

    compiled = treadle.compile(step, model=model)
    ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for at in range(4):
        x = torch.ones(2, 3) * (-2 if at % 2 else 2)
        torch.testing.assert_close(compiled(x, ours), step(x, theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())


def weights_of(step_options, weighted):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def step(x, y):
        counts = torch.bincount(y, minlength=3) if weighted is None else torch.bincount(
            y, weighted[: len(y)], minlength=3
        )  # fmt: skip
        weights = counts.sum() / (counts + 1)
        return F.cross_entropy(model(x), y, weights[:3].float()), counts

    return treadle.compile(step, model=model, options=treadle.Options(**step_options)), step


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("weighted", [None, torch.rand(9), torch.rand(9).double()])
def test_weights_of_classes_by_their_counts(weighted, strict):
    compiled, step = weights_of({"strict": strict, "codegen": True}, weighted)
    for _ in range(3):
        x, y = torch.randn(9, 4), torch.randint(3, (9,))
        torch.testing.assert_close(compiled(x, y), step(x, y))
    assert not compiled.recompiles


def test_counts_of_more_than_the_least_length():
    model = nn.Linear(2, 2)

    def step(x, y):
        return model(x).sum() * torch.bincount(y, minlength=3).float().square().sum()

    compiled = treadle.compile(step, model=model)
    for most in (3, 5, 3, 4, 7):
        x, y = torch.randn(2, 2), torch.cat([torch.randint(most, (6,)), torch.tensor([most - 1])])
        torch.testing.assert_close(compiled(x, y), step(x, y))
    assert len(compiled.recompiles) == 1
    with pytest.raises(RuntimeError):
        compiled(x, torch.tensor([1, -1]))


def test_numbers_that_a_step_draws_are_those_of_eager_on_every_path():
    model = nn.Linear(3, 3)

    def step(x):
        y = model(x) * np.random.beta(0.4, 0.4)
        return y * 2 if x.sum() > 0 else y

    compiled = treadle.compile(step, model=model)
    inputs = [torch.ones(2, 3) * sign for sign in (1, -1, 1, 1, -1)]
    np.random.seed(3)
    found = [compiled(x) for x in inputs]
    np.random.seed(3)
    torch.testing.assert_close(found, [step(x) for x in inputs])
