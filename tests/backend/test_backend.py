"""``torch.compile`` with our backend against eager: values, gradients, buffers, breaks, sizes."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle as package
from treadle.backend import treadle


def perceptron():
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.2), nn.Linear(32, 4)
    )


def convolution():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class Broken(nn.Module):
    """A print in the middle: two graphs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.b(h)


class Shapes(nn.Module):
    """Results that are an input, a view of one, a dict, a constant and the same tensor twice."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.lin2 = nn.Linear(8, 8)
        self.lin2.weight = self.lin.weight

    def forward(self, x):
        y = self.lin2(self.lin(x).relu())
        return {"y": y, "again": y, "x": x, "view": x[1:], "n": x.shape[0], "none": None}


def check(model, batches, pick=lambda out: out, **options):
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=treadle, **options)
    for batch in batches:
        torch.manual_seed(1)
        ours = pick(compiled(*batch))
        torch.manual_seed(1)
        theirs = pick(twin(*batch))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
        for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, other)
    return compiled


@pytest.mark.parametrize("memory", [None, 1.0, 0.5, 0.0])
def test_dropout_and_norms_at_every_budget(memory):
    check(perceptron(), [(torch.randn(5, 8),)] * 2, options={"memory": memory})


@pytest.mark.parametrize("memory", [0.5, 0.0])
def test_norms_that_are_computed_again_see_the_statistics_of_before(memory, monkeypatch):
    monkeypatch.setenv("TREADLE_NO_CODEGEN", "1")
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()),
        *(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.SiLU()),
        *(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
    )
    check(model, [(torch.randn(2, 3, 8, 8),) for _ in range(2)], options={"memory": memory})


def test_buffers_that_change():
    check(convolution(), [(torch.randn(4, 3, 9, 9),) for _ in range(3)])


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes_that_change(dynamic):
    batches = [(torch.randn(n, 8),) for n in (5, 6, 9, 2, 5)]
    check(perceptron(), batches, dynamic=dynamic)


def test_a_graph_break():
    check(Broken(), [(torch.randn(3, 8),)] * 2)


def test_results_of_every_kind():
    model = Shapes()
    compiled = check(model, [(torch.randn(3, 8),)], pick=lambda out: out["y"])
    x = torch.randn(3, 8)
    out = compiled(x)
    assert out["x"] is x
    assert out["view"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert out["n"] == 3
    assert out["none"] is None
    torch.testing.assert_close(out["again"], out["y"])


def test_inference():
    model = perceptron().eval()
    compiled = torch.compile(model, backend=treadle)
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))


def test_two_forwards_then_two_backwards():
    model = perceptron()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=treadle)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    torch.manual_seed(0)
    ours = compiled(x).sum(), compiled(y).square().sum()
    torch.manual_seed(0)
    theirs = twin(x).sum(), twin(y).square().sum()
    for mine, other in zip(reversed(ours), reversed(theirs), strict=True):
        mine.backward(retain_graph=True)
        mine.backward()
        other.backward(retain_graph=True)
        other.backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_results_belong_to_the_caller():
    model = perceptron().eval()
    compiled = torch.compile(model, backend=treadle)
    x = torch.randn(3, 8)
    first = compiled(x)
    kept = first.detach().clone()
    compiled(torch.randn(3, 8))
    assert torch.equal(first, kept)
    del first
    gc.collect()


def test_a_result_may_be_written_to():
    model = nn.Sequential(nn.Linear(8, 4), nn.Flatten(0))
    compiled = torch.compile(model, backend=treadle)
    loss = compiled(torch.randn(3, 8)).square().mean()
    out = compiled(torch.randn(3, 8))
    out *= 2
    (out.sum() + loss).backward()
    assert model[0].weight.grad is not None

    scalar = torch.compile(lambda x: model(x).square().mean(), backend=treadle)
    loss = scalar(torch.randn(3, 8))
    loss /= 2
    loss.backward()


def test_autocast():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=treadle)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(x), twin(x)
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    ours.float().sum().backward()
    theirs.float().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad, rtol=5e-2, atol=5e-2)


def test_in_place_compile_keeps_the_keys():
    model = perceptron()
    keys = list(model.state_dict())
    model.compile(backend=treadle)
    model(torch.randn(3, 8)).sum().backward()
    assert list(model.state_dict()) == keys


def test_options_that_are_not_there():
    for wrong in ({"options": {"budget": 3}}, {"mode": "max-autotune"}):
        torch._dynamo.reset()
        compiled = torch.compile(nn.Linear(2, 2), backend=treadle, **wrong)
        with pytest.raises(Exception, match="TR-001") as caught:
            compiled(torch.randn(1, 2))
        assert "memory, strict" in str(caught.value)


def test_a_budget_that_cannot_be_says_the_smallest():
    compiled = torch.compile(perceptron(), backend=treadle, options={"memory": 100})
    with pytest.raises(Exception, match="TR-202"):
        compiled(torch.randn(5, 8))


@pytest.mark.parametrize("rows", [
    lambda h: h[h[:, 0] > 0], lambda h: h[torch.nonzero(h[:, 0] > 0)[:, 0]],
], ids=["mask", "nonzero"])  # fmt: skip
def test_sizes_that_values_decide_are_refused_at_their_line(rows):
    compiled = torch.compile(lambda x: rows(torch.tanh(x)).sum(), backend=treadle)
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with pytest.raises(package.LoweringError, match=r"TR-150.*nonzero") as caught, captured:
        compiled(torch.randn(6, 4, requires_grad=True))
    assert "h[" in caught.value.where
    torch._dynamo.reset()  # and as the remedy says
    x = torch.randn(6, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x), rows(torch.tanh(x)).sum())


def test_a_dropped_element_has_no_gradient():
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(500))

        def forward(self, x):
            return F.dropout(torch.tanh(x * self.scale), 0.5)

    model = Drop()
    compiled = torch.compile(model, backend=treadle, options={"memory": 0.0})
    out = compiled(torch.rand(500) + 0.5)
    out.sum().backward()
    assert torch.equal(model.scale.grad == 0, out.detach() == 0)
    assert 100 < int((out == 0).sum()) < 400


def test_zeros_without_memory(monkeypatch):
    """PyTorch's gradient of ``sgn`` is a tensor of zeros that has no storage."""
    monkeypatch.setenv("TREADLE_NO_CODEGEN", "1")
    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: torch.sgn(x), backend="treadle")(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(5))


def test_the_name_is_known():
    known = torch._dynamo.list_backends()
    assert "treadle" in known, "install the package: the name is an entry point"
    compiled = torch.compile(nn.Linear(2, 2), backend="treadle")
    assert compiled(torch.randn(1, 2)).shape == (1, 2)
    assert package.compile is not torch.compile
