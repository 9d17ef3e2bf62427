"""What modules may bring along, beside eager: hooks, functions of one's own, parametrizations."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import treadle
from contract.contract_help import beside_eager, training


def stepping(model, forward=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training(lambda x: (forward or model)(x).square().mean(), optimizer), model, optimizer


def net():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5, bias=False))


def batch(_):
    return (torch.randn(6, 5),)


def halve(p):
    p.grad.mul_(0.5)


HOOKS = {
    "forward pre": lambda m: m[0].register_forward_pre_hook(lambda _, a: (a[0] * 2,)),
    "forward": lambda m: m[0].register_forward_hook(lambda _, a, r: r + a[0].sum()),
    "backward": lambda m: m[2].register_full_backward_hook(lambda _, gi, go: (gi[0] * 0.5,)),
    "backward pre": lambda m: m[2].register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
    "of a parameter": lambda m: m[0].weight.register_hook(lambda g: g * 0.1),
    "after accumulation": lambda m: m[2].weight.register_post_accumulate_grad_hook(halve),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name):
    def make():
        model = net()
        HOOKS[name](model)
        return stepping(model)

    beside_eager(make, batch)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_and_go(name):
    """A variant without a hook is not run where there is one, nor the other way round."""
    handles = {}

    def between(number, model):
        if number in (2, 4):
            handles[id(model)] = HOOKS[name](model)
        elif number == 3:
            handles[id(model)].remove()

    step = beside_eager(lambda: stepping(net()), batch, steps=5, between=between)
    assert "a hook of a module or a parameter was added or removed" in step.recompiles


def test_hooks_with_keywords_and_of_values_in_between():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x, scale=1.0):
            return self.inner(x) * scale

    def make():
        model = Scaled()
        model.register_forward_pre_hook(
            lambda _, a, k: (a, {"scale": k["scale"] * 2}), with_kwargs=True
        )
        model.register_forward_hook(lambda _, a, k, r: r * k["scale"], with_kwargs=True)

        def forward(x):
            y = model(x, scale=0.5)
            y.register_hook(lambda g: g.clamp(-0.01, 0.01))
            return y

        return stepping(model, forward)

    beside_eager(make, batch)


class Kept(torch.autograd.Function):
    """Two results, one without a gradient, and a backward pass that is not forward's derivative."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        product = x * w
        positive = product > 0
        ctx.mark_non_differentiable(positive)
        return product, positive

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        x, w = ctx.saved_tensors
        return grad * w * 2, (grad * x).sum(0)


def test_custom_functions():
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.inner = nn.Parameter(torch.randn(5)), nn.Linear(5, 5)

        def forward(self, x):
            product, positive = Kept.apply(self.inner(x), self.w)
            return torch.where(positive, product, product * 0.1)

    beside_eager(lambda: stepping(Uses()), batch)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


PARAMETRIZED = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "of one's own": lambda m: nn.utils.parametrize.register_parametrization(
        m, "weight", Symmetric()
    ),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrizations(name):
    def make():
        first = nn.Linear(5, 5)
        PARAMETRIZED[name](first)
        return stepping(nn.Sequential(first, nn.ReLU(), nn.Linear(5, 2)))

    beside_eager(make, batch)


@pytest.mark.parametrize("form", ["reentrant", "not reentrant", "sequential"])
@pytest.mark.parametrize("memory", [None, 0.0])
def test_checkpointing_with_dropout(form, memory):
    def make():
        blocks = [nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]
        model = nn.Sequential(*blocks)

        def forward(x):
            if form == "sequential":
                return checkpoint_sequential(model, 2, x, use_reentrant=False)
            x = x.clone().requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=form == "reentrant")
            return x

        return stepping(model, forward)

    beside_eager(make, batch, memory=memory)


def test_a_parameter_without_hooks_is_compiled_once():
    step = beside_eager(lambda: stepping(net()), batch)
    assert step.recompiles == []
    assert isinstance(step, treadle.Step)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm1d, (6, 3, 5)), (nn.BatchNorm2d, (4, 3, 5, 2))],
)
def test_batch_norms_that_average_over_all_batches(norm, shape):
    models = [nn.Sequential(norm(3, momentum=None), nn.Tanh()) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]

    def step_of(model, optimizer):
        def step(x):
            loss = model(x).square().mean() + model(2 * x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    eager, ours = map(step_of, models, optimizers)
    compiled = treadle.compile(ours, model=models[1], optimizer=optimizers[1])
    for _ in range(5):
        x = torch.randn(shape) + 1
        torch.testing.assert_close(compiled(x), eager(x))
        torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())
    assert compiled.recompiles == []


class Codebook(nn.Module):
    """Codes that are averaged and put in the place of the parameter that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes = nn.Linear(5, 4), nn.Embedding(6, 4)
        self.codes.weight.requires_grad = False
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x):
        z = self.encoder(x)
        near = F.one_hot(torch.cdist(z, self.codes.weight).argmin(1), 6).float()
        if self.training:
            self.counts.data = 0.9 * self.counts + 0.1 * near.sum(0)
            codes = 0.9 * self.codes.weight + 0.1 * near.t() @ z
            self.codes.weight = nn.Parameter(codes.detach(), requires_grad=False)
            self.seen.data = torch.tensor(True)
        return z + (near @ self.codes.weight - z).detach() + 0.1 * z.sum() * self.counts.mean()


def test_frozen_parameters_and_buffers_that_are_replaced():
    step = beside_eager(lambda: stepping(Codebook()), batch)
    assert step.recompiles == []


def test_what_a_module_may_not_have_is_named_beside_a_list_that_grows():
    """The list was named, in which numbers are put at every call."""
    model, losses = net(), []

    def step(x):
        loss = model(x).square().mean()
        model[0].weight = nn.Parameter(2 * model[0].weight)
        losses.append(loss.item())
        return loss

    with pytest.raises(treadle.CaptureError, match=r"\[TR-117\].*a part of a module"):
        treadle.compile(step, model=model)(*batch(0))
