"""Ways of training: averages, accumulation, checkpointing, adapters, functional gradients."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ordinary_steps.kit import Kit, Setup, mlp, row, trained


def _table(kit: Kit, classes: int = 3) -> tuple[Tensor, Tensor]:
    return kit.randn(32, 8), kit.randint(classes, 32)


@row
def label_smoothing_schedule(kit: Kit) -> Setup:
    model = kit.put(mlp(8, kit.size(16, 256), 3, act=nn.GELU))
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    return trained(model, loss_of, lambda: _table(kit), optimizer=sgd)


@row
def distillation(kit: Kit) -> Setup:
    teacher = kit.put(mlp(8, kit.size(32, 512), 3)).eval().requires_grad_(False)
    student = kit.put(mlp(8, kit.size(8, 64), 3))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = student(x)
        soft = F.kl_div(
            (out / 4).log_softmax(1), (teacher(x) / 4).softmax(1), reduction="batchmean"
        )
        return 16 * soft + F.cross_entropy(out, y)

    return trained([student, teacher], loss_of, lambda: _table(kit))


@row
def exponential_average(kit: Kit) -> Setup:
    model = kit.put(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    )
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.detach()

    return Setup(step, [model, average], optimizer, lambda: _table(kit))


@row
def bootstrap_latent(kit: Kit) -> Setup:
    """BYOL: a target that follows by an average, and a predictor."""
    w = kit.size(16, 256)
    online, predictor = kit.put(mlp(8, w, 4)), kit.put(mlp(4, w, 4))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], 1e-3)

    def step(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            goals = F.normalize(target(a)), F.normalize(target(b))
        seen = F.normalize(predictor(online(b))), F.normalize(predictor(online(a)))
        loss = sum(2 - 2 * (g * s).sum(1).mean() for g, s in zip(goals, seen, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for theirs, mine in zip(target.parameters(), online.parameters(), strict=True):
                theirs.lerp_(mine, 0.01)
        return loss.detach()

    batch = lambda: (kit.randn(16, 8), kit.randn(16, 8))  # noqa: E731
    return Setup(step, [online, predictor, target], optimizer, batch)


class Queue(nn.Module):
    """Keys of earlier batches in a ring, whose place is a buffer."""

    def __init__(self, size: int, w: int) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, w)))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def put(self, keys: Tensor) -> None:
        places = (self.at + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        self.keys[places] = keys
        self.at.copy_((self.at + len(keys)) % len(self.keys))


@row
def momentum_contrast(kit: Kit) -> Setup:
    w = kit.size(16, 256)
    query = kit.put(mlp(8, w, 4))
    key, queue = copy.deepcopy(query).requires_grad_(False), kit.put(Queue(64, 4))
    optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9)

    def step(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for theirs, mine in zip(key.parameters(), query.parameters(), strict=True):
                theirs.mul_(0.99).add_(mine, alpha=0.01)
            k = F.normalize(key(b))
        q = F.normalize(query(a))
        odds = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.keys.clone().T], 1) / 0.07
        loss = F.cross_entropy(odds, torch.zeros(len(q), dtype=torch.long, device=q.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.put(k)
        return loss.detach()

    batch = lambda: (kit.randn(16, 8), kit.randn(16, 8))  # noqa: E731
    return Setup(step, [query, key, queue], optimizer, batch)


class Ring(nn.Module):
    """One entry a step, at the place that an integer buffer says."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.body = nn.Linear(w, w)
        self.register_buffer("entries", torch.zeros(5, w))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.no_grad():
            self.entries[self.at] = h.mean(0)
            self.at.add_(1).remainder_(5)
        return h - self.entries.mean(0)


@row
def ring_buffer(kit: Kit) -> Setup:
    model = kit.put(Ring(8))
    return trained(model, lambda x: model(x).square().mean(), lambda: (kit.randn(16, 8),))


@row
def gradient_accumulation(kit: Kit) -> Setup:
    model = kit.put(mlp(8, kit.size(16, 256), 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(a), b) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Setup(step, model, optimizer, lambda: _table(kit))


@row
def several_steps(kit: Kit) -> Setup:
    """Four micro-batches with an update after each, in one call."""
    model = kit.put(mlp(8, kit.size(16, 256), 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return Setup(step, model, optimizer, lambda: _table(kit))


@row
def sharpness_aware(kit: Kit) -> Setup:
    """SAM: the gradient at the worst place near by."""
    model = kit.put(mlp(8, kit.size(16, 256), 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    parameters = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in parameters]
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Setup(step, model, optimizer, lambda: _table(kit))


@row
def checkpointed(kit: Kit) -> Setup:
    w = kit.size(16, 512)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(w, w), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
    )
    model = kit.put(nn.ModuleList([nn.Linear(8, w), blocks, nn.Linear(w, 3)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = model[0](x)
        for block in model[1]:
            h = checkpoint(block, h, use_reentrant=False)
        return F.cross_entropy(model[2](h), y)

    return trained(model, loss_of, lambda: _table(kit))


@row
def spectral_norm(kit: Kit) -> Setup:
    w = kit.size(16, 256)
    layers = [parametrizations.spectral_norm(nn.Linear(8, w)), nn.LeakyReLU()]
    model = kit.put(nn.Sequential(*layers, parametrizations.spectral_norm(nn.Linear(w, 3))))
    return trained(model, lambda x, y: F.cross_entropy(model(x), y), lambda: _table(kit))


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (F.dropout(x, 0.1, self.training) @ self.a.T @ self.b.T)


@row
def low_rank_adapters(kit: Kit) -> Setup:
    w = kit.size(16, 512)
    model = kit.put(nn.Sequential(LoRA(nn.Linear(8, w), 4), nn.ReLU(), LoRA(nn.Linear(w, 3), 4)))
    return trained(model, lambda x, y: F.cross_entropy(model(x), y), lambda: _table(kit))


class FakeQuantized(nn.Linear):
    """Weights rounded to 8 bits in the forward pass, with the gradient of the identity."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (self.weight / scale).round().clamp(-127, 127) * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


@row
def quantization_aware(kit: Kit) -> Setup:
    w = kit.size(16, 256)
    model = kit.put(nn.Sequential(FakeQuantized(8, w), nn.ReLU6(), FakeQuantized(w, 3)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
        return F.cross_entropy(model(x), y)

    return trained(model, loss_of, lambda: _table(kit))


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a clipped identity."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad_out):
        (x,) = ctx.saved_tensors
        return grad_out * (x.abs() <= 1)


@row
def binary_network(kit: Kit) -> Setup:
    w = kit.size(16, 256)
    model = kit.put(nn.ModuleList([nn.Linear(8, w), nn.BatchNorm1d(w), nn.Linear(w, 3)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = Sign.apply(model[1](model[0](x)))
        return F.multi_margin_loss(F.linear(h, Sign.apply(model[2].weight)) / w**0.5, y)

    return trained(model, loss_of, lambda: _table(kit))


@row
def autocast_bfloat16(kit: Kit) -> Setup:
    w = kit.size(16, 512)
    model = kit.put(nn.Sequential(nn.Linear(8, w), nn.LayerNorm(w), nn.GELU(), nn.Linear(w, 3)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(kit.device.type, torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    return trained(model, loss_of, lambda: _table(kit))


@row
def hypernetwork(kit: Kit) -> Setup:
    """A network that makes the weights of another for each row."""
    w = kit.size(6, 32)
    model = kit.put(mlp(4, 16, 8 * w + w + w * 3))

    def loss_of(task: Tensor, x: Tensor, y: Tensor) -> Tensor:
        made = model(task)
        a, b, c = made.split([8 * w, w, 3 * w], 1)
        h = (x[:, None] @ a.view(-1, 8, w) + b[:, None]).relu()
        return F.cross_entropy((h @ c.view(-1, w, 3))[:, 0], y)

    return trained(model, loss_of, lambda: (kit.randn(32, 4), *_table(kit)))


@row
def meta_learning(kit: Kit) -> Setup:
    """MAML: an inner step of gradient descent, and the gradient through it."""
    model = kit.put(mlp(1, kit.size(16, 64), 1, act=nn.Tanh))

    def loss_of(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
        names, values = zip(*model.named_parameters(), strict=True)
        inner = F.mse_loss(model(x), y)
        slopes = torch.autograd.grad(inner, values, create_graph=True)
        fast = {n: v - 0.1 * g for n, v, g in zip(names, values, slopes, strict=True)}
        return F.mse_loss(functional_call(model, fast, (x2,)), y2)

    return trained(model, loss_of, lambda: tuple(kit.randn(16, 1) for _ in range(4)))


@row
def meta_learning_functional(kit: Kit) -> Setup:
    """The same over several tasks, by ``torch.func``."""
    model = kit.put(mlp(1, kit.size(16, 64), 1, act=nn.Tanh))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        start = dict(model.named_parameters())

        def inner(params: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            return F.mse_loss(functional_call(model, params, (a,)), b)

        def task(a: Tensor, b: Tensor) -> Tensor:
            slopes = grad(inner)(start, a, b)
            fast = {name: value - 0.1 * slopes[name] for name, value in start.items()}
            return inner(fast, a, b)

        return vmap(task)(x, y).mean()

    return trained(model, loss_of, lambda: (kit.randn(4, 8, 1), kit.randn(4, 8, 1)))


@row
def private_gradients(kit: Kit) -> Setup:
    """DP-SGD: a gradient for each row, clipped, added up, with noise."""
    model = kit.put(mlp(8, kit.size(16, 64), 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            total = torch.einsum("n...,n->...", each[name], share)
            p.grad = (total + 0.1 * torch.randn_like(total)) / len(x)
        optimizer.step()
        optimizer.zero_grad()
        return norms.mean()

    return Setup(step, model, optimizer, lambda: _table(kit))


@row
def physics_informed(kit: Kit) -> Setup:
    """Second derivatives with respect to inputs, for a heat equation."""
    model = kit.put(mlp(2, kit.size(16, 128), 1, act=nn.Tanh))

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        x, t = x.requires_grad_(), t.requires_grad_()
        u = model(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return (u_t - 0.1 * u_xx).square().mean()

    return trained(model, loss_of, lambda: (kit.rand(32, 1), kit.rand(32, 1)))
