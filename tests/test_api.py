"""What a user sees of ``treadle.compile``: equal numbers, clear errors, nothing lost."""

import copy
import inspect
import typing

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.b = nn.Linear(13, 5)
        self.p = p

    def forward(self, x):
        return self.b(F.dropout(F.gelu(self.norm(self.a(x))), self.p, self.training))


def make_step(model, optimizer, clip=1.0):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch(n=11):
    return torch.randn(n, 7), torch.randint(5, (n,))


def pair(kind=torch.optim.AdamW, p=0.0, **options):
    model = Net(p)
    twin = copy.deepcopy(model)
    optimizer = kind(model.parameters(), **options)
    other = kind(twin.parameters(), **options)
    step = treadle.compile(make_step(model, optimizer), model=model, optimizer=optimizer)
    return model, optimizer, step, twin, other, make_step(twin, other)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    ],
    ids=["sgd", "nesterov", "adam", "amsgrad"],
)
def test_ten_steps_equal_eager(kind, options):
    model, optimizer, step, twin, other, eager = pair(kind, **options)
    for i in range(10):
        x, y = batch()
        for each in (optimizer, other):
            each.param_groups[0]["lr"] = options["lr"] / (1 + i)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-5, atol=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(step.recompiles) == 0


def test_dropout_follows_eagers_stream():
    _, _, step, _, _, eager = pair(p=0.3)
    x, y = batch()
    step.prepare(x, y)
    for seed in range(5):
        torch.manual_seed(seed)
        ours = step(x, y)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, eager(x, y), rtol=1e-5, atol=1e-6)


def test_compile_is_a_decorator_with_and_without_options():
    """``@treadle.compile(model=...)`` above the function, as with ``torch.compile``."""
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    eager = make_step(twin, other)
    whole = treadle.compile(make_step(model, optimizer), model=model, optimizer=optimizer)

    @treadle.compile(model=model, optimizer=optimizer, memory="8GiB")
    def train_step(x, y, scale=1.0):
        """One step."""
        loss = F.cross_entropy(model(x), y) * scale
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    assert isinstance(train_step, treadle.Step)
    assert (train_step.__name__, train_step.__doc__) == ("train_step", "One step.")
    assert list(inspect.signature(train_step).parameters) == ["x", "y", "scale"]
    assert train_step.options.memory == "8GiB"
    for step in (train_step, train_step, whole):
        x, y = batch()
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-5, atol=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_one_decorator_compiles_several_functions():
    model = Net()
    compiled = treadle.compile(model=model)

    @compiled
    def mean(x):
        return model(x).mean()

    @compiled
    def total(x):
        return model(x).sum()

    x, _ = batch()
    torch.testing.assert_close(mean(x), model(x).mean())
    torch.testing.assert_close(total(x), model(x).sum())
    assert mean.__name__ == "mean"


def test_the_overloads_have_the_parameters_of_the_function():
    """Type checkers read the overloads, users the function."""
    real = inspect.signature(treadle.compile).parameters
    given, decorator = (
        inspect.signature(each).parameters for each in typing.get_overloads(treadle.compile)
    )
    assert [*given] == [*real]
    assert [*decorator] == [*real]
    assert given["function"].default is inspect.Parameter.empty
    for name, parameter in real.items():
        if name != "function":
            assert str(given[name]) == str(decorator[name]) == str(parameter)


def test_another_shape_compiles_again_and_says_why():
    _, _, step, _, _, eager = pair()
    for n in (11, 4, 1, 11):
        x, y = batch(n)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-5, atol=1e-6)
    assert len(step.recompiles) == 2
    assert "11" in step.recompiles[0]
    assert "4" in step.recompiles[0]


def test_another_dtype_at_the_second_call():
    _, _, step, _, _, _ = pair()
    x, y = batch()
    step(x, y)
    with pytest.raises(Exception, match=r"(?i)dtype|float|double"):
        step(x.double(), y)
    step(x, y)


def test_nan_flows_as_in_eager():
    model, _, step, twin, _, eager = pair()
    x, y = batch()
    x[0, 0] = float("nan")
    assert torch.isnan(step(x, y))
    assert torch.isnan(eager(x, y))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(torch.isnan(a), torch.isnan(b))


def test_an_error_in_the_step_is_the_users_and_changes_nothing():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        raise KeyError("mine")

    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    with pytest.raises(KeyError, match="mine"):
        compiled(*batch())
    torch.set_rng_state(random)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state


def test_checkpoint_moves_between_eager_and_compiled():
    model, optimizer, step, twin, other, eager = pair()
    data = [batch() for _ in range(6)]
    for x, y in data[:3]:
        step(x, y)
        eager(x, y)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x, y in data[3:]:
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-5, atol=1e-6)


def test_verify_finds_nothing_and_changes_nothing():
    model, _, step, _, _, _ = pair(torch.optim.SGD, p=0.2, lr=0.1, momentum=0.9)
    x, y = batch()
    step(x, y)
    before = copy.deepcopy(model.state_dict())
    assert step.verify([batch(), batch()]) is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_explain_names_kernels_and_memory():
    _, _, step, _, _, _ = pair()
    step(*batch())
    text = step.explain()
    assert "kernels:" in text
    assert "predicted peak" in text
    assert "write" in step.graph("captured") or "return" in step.graph("captured")


@pytest.mark.parametrize("memory", ["", "lots", "12 parsecs", "0GiB", -5])
def test_an_unreadable_budget_is_refused(memory):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(treadle.PlanError, match="TR-201"):
        treadle.compile(lambda: None, model=model, optimizer=optimizer, memory=memory)


def test_an_impossible_budget_names_the_smallest():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = treadle.compile(
        make_step(model, optimizer), model=model, optimizer=optimizer, memory="100B"
    )
    with pytest.raises(treadle.PlanError, match="TR-202"):
        step(*batch())
    assert not any(p.grad is not None for p in model.parameters())


def test_an_optimizer_of_another_model_trains_nothing_as_in_eager():
    model, other = Net(), Net()
    before = [each.detach().clone() for each in (*model.parameters(), *other.parameters())]
    optimizer = torch.optim.AdamW(other.parameters())
    treadle.compile(make_step(model, optimizer), model=model, optimizer=optimizer)(*batch())
    after = [each.detach() for each in (*model.parameters(), *other.parameters())]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(each.grad is not None for each in model.parameters())


def test_profile_runs_a_step_and_explain_shows_the_times():
    model, _, step, twin, _, eager = pair()
    given = batch()
    torch.testing.assert_close(step.profile(*given), eager(*given))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    text = step.explain()
    assert "measured:" in text
    assert "GB/s" in text
    assert len(step.compiled.kernel_seconds) == len(step.compiled.artifact.steps)
    assert min(step.compiled.kernel_seconds) > 0


def test_a_profile_is_one_step_and_takes_medians(monkeypatch):
    model, _, step, twin, _, eager = pair(p=0.3)
    given = batch()
    step.prepare(*given)
    runs = []
    executable = step.compiled.executable
    run = type(executable).run
    monkeypatch.setattr(
        type(executable), "run", lambda self, *rest: (runs.append(1), run(self, *rest))[1]
    )
    for call in (step.profile, step):  # random numbers go on as after one step
        torch.manual_seed(3)
        mine = call(*given)
        drawn = torch.rand(2)
        torch.manual_seed(3)
        torch.testing.assert_close(mine, eager(*given))
        assert torch.equal(drawn, torch.rand(2))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(runs) == 5 + 1


def test_a_profile_within_a_full_budget_is_one_run(monkeypatch):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = treadle.compile(
        make_step(model, optimizer), model=model, optimizer=optimizer, memory=0.0
    )
    step.prepare(*batch())
    runs = []
    executable = step.compiled.executable
    run = type(executable).run
    monkeypatch.setattr(
        type(executable), "run", lambda self, *rest: (runs.append(1), run(self, *rest))[1]
    )
    step.profile(*batch())
    assert len(runs) == 1
    assert "measured:" in step.explain()


def test_within_a_budget_nothing_is_called_cheaper_to_compute_again():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(train_step, model=model, optimizer=optimizer, memory=0.0)
    step.prepare(torch.randn(512, 64))
    text = step.explain()
    assert "recomputed to stay within the budget" in text
    assert "cheaper to recompute" not in text
    assert "at least" not in text
