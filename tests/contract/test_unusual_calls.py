"""Calls and set-ups that eager takes, or that are mistakes of the user's: never a raw error."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treadle
from contract.contract_help import beside_eager

OPTIONS = treadle.Options(codegen=False, progress=False)


def _batch(number: int, size: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(size, 4), torch.randint(3, (size,))


def _parts() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step_of(model: nn.Module, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((0,), {}), ((0, 1, 2), {}), ((0, 1), {"other": 1}), ((0, 1), {"x": 1}), ((), {})],
)
def test_arguments_that_the_step_does_not_take_are_pythons_own_error(args, kwargs):
    model, optimizer = _parts()
    step = _step_of(model, optimizer)
    with pytest.raises(TypeError) as theirs:
        step(*args, **kwargs)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=OPTIONS)
    for _ in range(2):
        with pytest.raises(TypeError) as ours:
            compiled(*args, **kwargs)
        assert str(ours.value) == str(theirs.value)
        compiled(*_batch(0))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (1, 2, 3), (2, 3, 4), (1, 3, 4)])
def test_buckets_of_one_size(sizes):
    batches = [2, 1, 2, *sizes[2:]]
    found = []
    for compiled in (False, True):
        model, optimizer = _parts()
        step = _step_of(model, optimizer)
        if compiled:
            dims = {"x": ("batch", None), "y": ("batch",)}
            shapes = treadle.dynamic(dims, batch=sizes)
            step = treadle.compile(
                step, model=model, optimizer=optimizer, shapes=shapes, options=OPTIONS
            )
        sized = [max(size, sizes[0]) for size in batches]
        losses = [step(*_batch(at, size)) for at, size in enumerate(sized)]
        found.append([*losses, *(p.detach().clone() for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_inference_mode_around_a_step():
    model, optimizer = _parts()
    compiled = treadle.compile(lambda x: model(x).softmax(1), model=model, options=OPTIONS)
    x, _ = _batch(0)
    with torch.inference_mode():
        made = torch.randn(5, 4)
        results = [compiled(x), compiled(made)]
        expected = [model(each).softmax(1) for each in (x, made)]
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(compiled(x), results[0])
    train = treadle.compile(
        _step_of(model, optimizer), model=model, optimizer=optimizer, options=OPTIONS
    )
    with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
        train(*_batch(0))  # as in eager
    train(*_batch(0))


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_a_wrapper_around_an_optimizer():
    def make():
        model, optimizer = _parts()
        wrapper = Wrapper(Wrapper(optimizer))
        return _step_of(model, wrapper), model, optimizer

    def make_with_wrapper():
        step, model, optimizer = make()
        return treadle.compile(step, model=model, optimizer=Wrapper(optimizer), options=OPTIONS)

    beside_eager(make, _batch)
    losses = [make_with_wrapper()(*_batch(0)) for _ in range(2)]
    assert torch.equal(*losses)


def test_optimizers_that_share_their_groups():
    """As sharpness-aware minimisation's two: the outer one changes parameters by itself."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters, inner) -> None:
            super().__init__(parameters, {"rho": 0.05})
            self.inner = inner(self.param_groups, lr=0.1)
            self.param_groups = self.inner.param_groups

        @torch.no_grad()
        def climb(self, back: float) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(group["rho"] * back)

    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        outer = Outer(model.parameters(), torch.optim.SGD)

        def step(x, y):
            outer.climb(1.0)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            outer.climb(-1.0)
            outer.inner.step()
            outer.zero_grad()
            return loss.detach()

        return step, model, [outer, outer.inner]

    beside_eager(make, _batch)


def test_optimizers_found_by_their_parameter_in_a_hook_are_refused_with_the_line():
    model, _ = _parts()
    by_parameter = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        by_parameter[parameter].step()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    compiled = treadle.compile(
        step, model=model, optimizer=list(by_parameter.values()), options=OPTIONS
    )
    with pytest.raises(treadle.CaptureError, match=r"TR-117.*dict from outside by key") as caught:
        compiled(*_batch(0))
    assert "by_parameter[parameter].step()" in caught.value.where


def test_views_of_views_written_to_without_gradients():
    def make():
        model, optimizer = _parts()

        def step(x, y):
            with torch.no_grad():
                model.weight.view(-1)[:4].mul_(0.5)
                row = model.weight[0]
                row = row[1:]
                row.add_(0.1)
                model.weight.t()[0][1:].zero_()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, model, optimizer

    beside_eager(make, _batch)
