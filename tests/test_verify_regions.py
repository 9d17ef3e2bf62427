"""``verify`` names the first region, then the first node, whose result is off."""

import warnings

import pytest
import torch
from torch import nn

import treadle
from treadle.lower import registry
from treadle.options import Options

aten = torch.ops.aten


@torch.library.custom_op("treadle_verify_tests::between", mutates_args=())
def between(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@between.register_fake
def _(x):
    return torch.empty_like(x)


between.register_autograd(lambda ctx, grad: grad)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = between(self.first(x).sigmoid() * 2)
        return between(self.second(h).square().sin().neg()).exp().mean()


def step_of(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return treadle.compile(
        train, model=model, optimizer=optimizer, options=Options(cache_dir=tmp_path)
    )


@pytest.mark.parametrize(
    ("operation", "line"), [("sin", "self.second(h)"), ("sigmoid", "self.first(x)")]
)
def test_a_wrong_rule_is_found(operation, line, tmp_path, monkeypatch):
    op = getattr(aten, operation).default
    right = registry._RULES[aten.cos.default]
    monkeypatch.setitem(registry._RULES, op, right)
    step = step_of(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = step.verify([(torch.randn(3, 4),)])
    assert found is not None
    assert found.node.startswith(operation)
    assert line in found.where
    names = {node.name: each.number for each in step.regions() for node in each.nodes}
    assert found.region == names[found.node]


def test_state_and_random_numbers_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._RULES, aten.sin.default, registry._RULES[aten.cos.default])
    step = step_of(tmp_path)
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    parameters = [each for model in step._step.models.values() for each in model.parameters()]
    before = [each.clone() for each in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert step.verify([(x,)]) is not None
    assert torch.equal(state, torch.get_rng_state())
    assert len(before) == 4
    assert all(map(torch.equal, before, parameters))


def test_nothing_is_named_where_nothing_is_off(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert step_of(tmp_path).verify([(torch.randn(3, 4),)]) is None


def test_a_difference_that_no_region_has_alone_may_be_rounding():
    text = str(treadle.Difference(0, "bias", 2e-5, 1e-4))
    assert text.startswith("bias differs from eager by 2e-05 (0.0001 of its largest value)")
    assert "rounding" in text


def test_a_batch_of_one_argument_needs_no_tuple():
    model = nn.Linear(4, 3)
    step = treadle.compile(lambda x: model(x).sum(), model=model)
    of_entries = treadle.compile(lambda batch: model(batch["x"]).sum(), model=model)
    x = torch.randn(5, 4)
    assert step.verify([x, (x,), [x]]) is None
    assert of_entries.verify([{"x": x}, ({"x": x},)]) is None
