"""A linear layer whose products are of float8, as a user would write it with ``_scaled_mm``."""

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and its scale."""
    most = torch.finfo(dtype).max
    largest = x.abs().amax().float().clamp_min(1e-12)
    return (x.float() * (largest.reciprocal() * most)).clamp(-most, most).to(dtype), largest / most


def product(x: Tensor, y: Tensor, x_dtype: torch.dtype, y_dtype: torch.dtype, fast: bool) -> Tensor:
    """``x @ y`` of float8. Autocast would round the scales."""
    with torch.autocast(x.device.type, enabled=False):
        (q, a), (p, b) = scaled(x, x_dtype), scaled(y, y_dtype)
        q, p = q.contiguous(), p.t().contiguous().t()
        return torch._scaled_mm(q, p, a, b, out_dtype=x.dtype, use_fast_accum=fast)


class Float8Linear(torch.autograd.Function):
    """``x @ w.t()``."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return product(x, w.t(), E4M3, E4M3, True)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return product(grad, w, E5M2, E4M3, False), product(grad.t(), x, E5M2, E4M3, False)


class Float8Module(nn.Module):
    """In the place of an ``nn.Linear`` without a bias, under autocast to bfloat16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y = Float8Linear.apply(rows, self.weight.bfloat16())
        return y.view(*x.shape[:-1], -1)


def in_float8(model: nn.Module) -> nn.Module:
    """The model with such layers, in place."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear) and child.bias is None:
            setattr(model, name, Float8Module(child))
        else:
            in_float8(child)
    return model


def training(model: nn.Module, device: str, *, exact: bool = False):
    """A step of SGD under autocast, unless it is to be ``exact``: the loss and the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x, y):
        with torch.autocast(device, torch.bfloat16, enabled=not exact):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), grads

    return step, optimizer


def no_further_from_exact(ours, theirs, exact, most: float = 1.3) -> None:
    """Gradients of layers of float8 beside those of others. A scale that is one place off rounds
    all numbers of a matrix elsewhere, so the two are as far from each other as from the exact ones.
    """
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        allowed = most * (other - right).norm() + 1e-3 * right.norm()
        assert (mine - right).norm() < allowed


def products(compiled) -> tuple[int, int]:
    """How many products of a compiled step are of float8, and how many others it has."""
    calls = [getattr(each, "op", "") for each in compiled.compiled.artifact.steps]
    return sum("_scaled_mm" in call for call in calls), sum(".mm." in call for call in calls)
