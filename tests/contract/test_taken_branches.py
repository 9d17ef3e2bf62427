"""``torch.cond`` runs one branch where both cost more, with eager's numbers and gradients."""

import copy
import functools

import pytest
import torch
from tests.contract.test_control_flow import LOSSES, Net, plain_if, train_with, zeros_elsewhere
from torch import cond, nn
from torch.nn import functional as F

import treadle
from treadle.compiler import memory
from treadle.options import Options
from treadle.passes.taken_branches import RunTakenBranches
from treadle.runtime.execute.loops import Branch
from treadle.runtime.store.artifact import CallStep


@pytest.fixture
def always(monkeypatch):
    """Every cond runs one branch, whatever that saves."""
    monkeypatch.setattr(memory, "RunTakenBranches", functools.partial(RunTakenBranches, wait=-1.0))


def branches(compiled):
    steps = compiled.artifact.steps
    return [step for step in steps if isinstance(step, CallStep) and "branch" in step.op]


def check(loss, tmp_path, batches, make=Net):
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    step = train_with(model, loss, cond, tmp_path)
    eager = train_with(twin, loss, plain_if, tmp_path)
    for seed, x in enumerate(batches):
        torch.manual_seed(seed)
        got = step(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, eager(x), equal_nan=True)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            assert ours.isfinite().all() or loss is not zeros_elsewhere
    return step


SIGNS = (1, -1, 1, -1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda each: each.__name__)
def test_one_branch_is_eager_s_forward_and_backward(loss, tmp_path):
    torch.manual_seed(1)
    batches = [torch.rand(3, 4) * sign for sign in SIGNS]
    step = check(loss, tmp_path, batches)
    assert len(step.recompiles) == 0
    assert branches(step.prepare(batches[0]))


def between(model, x, choose):
    """Draws between the branch and its gradient, and a second cond of the same condition."""
    h = model.first(x)
    taken = x.sum() > 0
    y = choose(taken, lambda: model.second(h).tanh(), lambda: h.exp() @ model.second.weight)
    y = F.dropout(y, 0.5)
    z = choose(taken, lambda: y * model.scale, lambda: model.second(y).sin())
    return (z + torch.rand_like(z)).square().mean()


def one_has_no_gradient(model, x, choose):
    h = model.first(x)
    return (choose(x.sum() > 0, lambda: model.second(h), lambda: x.clone()) * h).sum()


def passes_through(model, x, choose):
    """A branch gives what it is given, and the same tensor twice."""
    h = model.first(x)
    a, b = choose(x.sum() > 0, lambda: (h, h), lambda: (model.second(h), h * 2))
    return (a * b).sum() + a.square().sum()


def transposed(model, x, choose):
    h = model.first(x).t()
    y = choose(x.sum() > 0, lambda: (h @ h.t()) @ model.second.weight, lambda: h @ h.t())
    return (y * model.scale).square().mean()


def several_results_of_one(model, x, choose):
    h = model.first(x)

    def normal():
        return F.layer_norm(h, (4,), model.scale) @ model.second.weight

    return choose(x.sum() > 0, normal, lambda: h.softmax(-1).cumsum(0)).square().sum()


def looks_up(model, x, choose):
    """An index is looked at before the step, whichever branch is taken: so both look it up."""
    h = model.first(x)
    at = (x.abs() * 3).long()[:, 0]
    return choose(x.sum() > 0, lambda: model.second(model.second.weight[at]), lambda: h).sum()


def only_a_parameter(model, x, choose):
    """Products of a step that only a branch reads are of the branch."""
    h = model.first(x)
    product = model.second(h)
    return choose(x.sum() > 0, lambda: product.sin(), lambda: h * 3).square().mean()


MORE = [
    between,
    one_has_no_gradient,
    passes_through,
    transposed,
    several_results_of_one,
    looks_up,
    only_a_parameter,
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("loss", MORE, ids=lambda each: each.__name__)
def test_more_of_them(loss, tmp_path):
    torch.manual_seed(1)
    check(loss, tmp_path, [torch.rand(3, 4) * sign for sign in SIGNS])


@pytest.mark.usefixtures("always")
def test_no_rows(tmp_path):
    check(LOSSES[0], tmp_path, [torch.rand(0, 4), torch.rand(0, 4)])


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(512, 512) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(512))


def products(model, x, choose):
    h = model.first(x)
    return (
        choose(
            x.sum() > 0,
            lambda: model.second(model.second(h).relu()),
            lambda: model.third(model.third(h).tanh()) * 2,
        )
        .square()
        .mean()
    )


def pointwise(model, x, choose):
    h = model.first(x)
    return choose(x.sum() > 0, lambda: h.sin() * 3, lambda: h.exp().relu()).square().mean()


def test_only_the_branch_that_is_taken_runs(tmp_path, monkeypatch):
    torch.manual_seed(1)
    taken = []
    run = Branch.__call__

    def noted(self, condition, *rest):
        taken.append(bool(condition))
        return run(self, condition, *rest)

    monkeypatch.setattr(Branch, "__call__", noted)
    step = check(products, tmp_path, [torch.rand(512, 512) * sign for sign in (1, -1)], Wide)
    assert taken == [True, True, False, False]  # once forward, once back
    compiled = step.prepare(torch.rand(512, 512))
    calls = branches(compiled)
    assert len(calls) == 2
    for call in calls:
        yes, no = compiled.artifact.bodies_of(call)
        for body in (yes, no):
            assert len(body.steps) >= 2 or (2, 3, 4)
    assert "in branches, of which each call runs one" in step.explain()
    assert "treadle.branch.default" in step.explain()
    assert not step.explain().count("in each iteration of loops")


def test_pointwise_branches_stay_where_they_fuse(tmp_path):
    torch.manual_seed(1)
    step = check(pointwise, tmp_path, [torch.rand(512, 512) * sign for sign in (1, -1)], Wide)
    assert not branches(step.prepare(torch.rand(512, 512)))


def wide_step(tmp_path, **options):
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        value = products(model, x, cond)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    options = Options(cache_dir=tmp_path, **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=options), model


@pytest.mark.parametrize("options", [{"memory": 1.0}, {"skip": ("RunTakenBranches",)}])
def test_both_are_computed_within_a_budget(options, tmp_path):
    step, *_ = wide_step(tmp_path, **options)
    assert not branches(step.prepare(torch.rand(512, 512)))
    assert step.verify([(torch.rand(512, 512),), (-torch.rand(512, 512),)]) is None


def test_sizes_that_change(tmp_path):
    """A program for many sizes computes both."""
    step, *_ = wide_step(tmp_path)
    for rows in (512, 300, 400):
        assert step(torch.rand(rows, 512)).isfinite()
    assert step.verify([(torch.rand(256, 512),)]) is None


def test_the_promised_peak_covers_either_branch(tmp_path):
    step, *_ = wide_step(tmp_path)
    for sign in (1, -1):
        step(torch.rand(512, 512) * sign)
        report = step.measure(torch.rand(512, 512) * sign)
        assert report.peak_bytes <= step.summary().peak_predicted_bytes


def test_a_saved_step_runs_one_branch(tmp_path):
    step, model = wide_step(tmp_path)
    x = torch.rand(512, 512)
    step(x)
    step.save(tmp_path / "step.treadle")
    kept = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def again_train(x):
        value = products(model, x, cond)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    expected = step(-x)
    model.load_state_dict(kept)
    again = treadle.load(tmp_path / "step.treadle", again_train, model=model, optimizer=optimizer)
    torch.testing.assert_close(again(-x), expected)


def test_profiles_time_both_calls(tmp_path):
    step, *_ = wide_step(tmp_path)
    x = torch.rand(512, 512)
    step(x)
    step.profile(x)
    assert "treadle.branch.default x1" in step.explain()


def test_a_second_run_finds_nothing(tmp_path):
    step, *_ = wide_step(tmp_path)
    compiled = step.prepare(torch.rand(512, 512))
    graph = compiled.step.copy()
    each = RunTakenBranches(compiled.hardware)
    assert each.run(graph) == 2
    assert each.run(graph) == 0
    assert RunTakenBranches(compiled.hardware, wait=10.0).run(compiled.step.copy()) == 0
