"""``Step.find_nan``: the first value that is not finite."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


class Overflowing(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 3)
        self.scale = scale

    def forward(self, x):
        h = torch.exp(self.inner(x) * self.scale)
        h = h - h.amax(1, keepdim=True)
        return self.outer(h)


def trained(model, loss_of=F.cross_entropy):
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return treadle.compile(step, model=model, optimizer=optimizer)


def batch():
    torch.manual_seed(0)
    return torch.randn(5, 4), torch.randint(3, (5,))


def test_a_finite_step_has_none_and_stays_as_it_is():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    step = trained(model)
    x, y = batch()
    before, random = model[0].weight.clone(), torch.get_rng_state()
    assert step.find_nan(x, y) is None
    assert step.find_nan(y=y, x=x) is None
    assert torch.equal(before, model[0].weight)
    assert torch.equal(random, torch.get_rng_state())
    assert step.compiled.has_run is False


def test_a_nan_is_found_with_the_infinite_value_that_it_is_made_of():
    step = trained(Overflowing(1e4))
    found = step.find_nan(*batch())
    assert (found.name, found.kind, found.phase) == ("sub.Tensor", "NaN", "forward")
    assert "h = h - h.amax(1, keepdim=True)" in found.where
    assert found.kernel
    assert 0 < found.count <= found.total == 40
    assert (found.origin.name, found.origin.kind) == ("exp", "inf")
    assert "h = torch.exp(self.inner(x) * self.scale)" in found.origin.where
    text = str(found)
    assert text.startswith(f"result of sub.Tensor (forward): {found.count} of 40 values are NaN")
    assert "infinite values, which first appear here: result of exp" in text


def test_the_module_is_named():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Overflowing(1e4)

        def forward(self, x):
            return self.body(x)

    assert trained(Outer()).find_nan(*batch()).module == "body"


@pytest.mark.parametrize("where", ["x", "weight"])
def test_an_input_that_is_nan_is_found_first(where):
    model = nn.Linear(4, 3)
    step = trained(model)
    x, y = batch()
    with torch.no_grad():
        (x if where == "x" else model.weight)[0, 1] = float("nan")
    found = step.find_nan(x, y)
    assert found.phase == "input"
    assert found.name == {"x": "argument x", "weight": "weight"}[where]
    assert (found.count, found.where) == (1, "")


def test_a_nan_that_only_the_backward_makes():
    step = trained(nn.Linear(4, 3), lambda out, y: (out * 0.0).norm(dim=1).sqrt().sum())
    found = step.find_nan(*batch())
    assert found.phase == "backward"
    assert "norm(dim=1)" in found.where


def test_infinite_values_alone_are_found_where_they_reach_a_result():
    def overflowing(out, y):
        return out.sum() + torch.exp(out.detach().sum() * 0.0 + 1e3)

    found = trained(nn.Linear(4, 3), overflowing).find_nan(*batch())
    assert (found.kind, found.name, found.phase) == ("inf", "exp", "forward")


def test_a_mask_of_infinite_values_is_no_find():
    def masked(out, y):
        hidden = torch.zeros(5, 3, dtype=torch.bool)
        hidden[:, 2] = True
        return F.cross_entropy(out.masked_fill(hidden, float("-inf")), y.clamp(max=1))

    assert trained(nn.Linear(4, 3), masked).find_nan(*batch()) is None


def test_the_path_of_this_batch_is_the_one_that_is_searched():
    model = nn.Linear(4, 3)

    def loss_of(out, y):
        if out.sum().item() > 1e3:
            return (out.sum() - out.sum()) / 0.0
        return F.cross_entropy(out, y)

    step = trained(model, loss_of)
    x, y = batch()
    step(x, y)
    with torch.no_grad():
        model.bias.fill_(0.0)
        model.weight.fill_(1.0)
    assert step.find_nan(torch.full((5, 4), 1e3), y).kind == "NaN"
    assert step.find_nan(x.clamp(-1, 1), y) is None


class Pooled(nn.Module):
    """Sizes of the batch stand among the arguments of its operations."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.conv(x))
        return self.out(x[..., : x.shape[-1] // 2].mean(-1) + x.flip(-1).cumsum(-1)[..., -1])


def test_sizes_are_those_of_the_batch():
    step = trained(Pooled())
    for rows, length in ((4, 12), (4, 9), (3, 14), (4, 7), (2, 12)):
        x, y = torch.randn(rows, 4, length), torch.randint(3, (rows,))
        step(x, y)
        assert step.find_nan(x, y) is None
        x[0, 0, 0] = torch.nan
        found = step.find_nan(x, y)
        assert (found.name, found.phase, found.total) == ("argument x", "input", x.numel())
