"""Models that make things: autoencoders, adversaries, flows, diffusion, energies."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ordinary_steps.kit import Kit, Setup, mlp, row, trained


@row
def autoencoder(kit: Kit) -> Setup:
    w = kit.size(24, 512)
    model = kit.put(nn.Sequential(mlp(w, w // 2, w // 8), nn.ReLU(), mlp(w // 8, w // 2, w)))
    return trained(model, lambda x: F.mse_loss(model(x), x), lambda: (kit.rand(16, w),))


@row
def variational_autoencoder(kit: Kit) -> Setup:
    w, z = kit.size(24, 512), kit.size(4, 32)
    encoder, decoder = kit.put(mlp(w, w, 2 * z, act=nn.SiLU)), kit.put(mlp(z, w, w, act=nn.SiLU))

    def loss_of(x: Tensor) -> Tensor:
        mean, log_var = encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        near = F.binary_cross_entropy_with_logits(decoder(code), x, reduction="sum")
        return near - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()

    return trained([encoder, decoder], loss_of, lambda: (kit.rand(16, w),))


@row
def vector_quantized_autoencoder(kit: Kit) -> Setup:
    w, z, n = kit.size(24, 256), kit.size(4, 32), kit.size(8, 256)
    encoder, decoder = kit.put(mlp(w, w, z)), kit.put(mlp(z, w, w))
    codes = kit.put(nn.Embedding(n, z))

    def loss_of(x: Tensor) -> Tensor:
        code = encoder(x)
        nearest = codes(torch.cdist(code, codes.weight).argmin(1))
        commit = F.mse_loss(code, nearest.detach()) * 0.25 + F.mse_loss(nearest, code.detach())
        return F.mse_loss(decoder(code + (nearest - code).detach()), x) + commit

    return trained([encoder, decoder, codes], loss_of, lambda: (kit.randn(16, w),))


def _two_optimizers(g: nn.Module, d: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(each.parameters(), 2e-4, betas=(0.5, 0.999)) for each in (g, d)]


@row
def gan(kit: Kit) -> Setup:
    w, z = kit.size(16, 256), kit.size(4, 64)
    g, d = kit.put(mlp(z, w, w)), kit.put(mlp(w, w, 1, act=nn.LeakyReLU))
    opt_g, opt_d = _two_optimizers(g, d)
    bce = F.binary_cross_entropy_with_logits

    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        fake = g(torch.randn(real.shape[0], z, device=real.device))
        ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
        opt_d.zero_grad()
        loss_d = bce(d(real), ones) + bce(d(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = bce(d(fake), ones)
        loss_g.backward()
        opt_g.step()
        return loss_d.detach(), loss_g.detach()

    return Setup(step, [g, d], [opt_g, opt_d], lambda: (kit.randn(16, w),))


@row
def dcgan_hinge(kit: Kit) -> Setup:
    w, z = kit.size(8, 64), kit.size(4, 64)
    g = kit.put(nn.Sequential(
        nn.ConvTranspose2d(z, 2 * w, 4, 1, 0, bias=False), nn.BatchNorm2d(2 * w), nn.ReLU(),
        nn.ConvTranspose2d(2 * w, w, 4, 2, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(),
        nn.ConvTranspose2d(w, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ))  # fmt: skip
    d = kit.put(nn.Sequential(
        nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * w, 1, 4), nn.Flatten(),
    ))  # fmt: skip
    opt_g, opt_d = _two_optimizers(g, d)

    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(real.shape[0], z, 1, 1, device=real.device)
        with torch.no_grad():
            fake = g(noise)
        loss_d = F.relu(1 - d(real)).mean() + F.relu(1 + d(fake)).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = -d(g(noise)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_d.detach(), loss_g.detach()

    return Setup(step, [g, d], [opt_g, opt_d], lambda: (kit.pictures((16, 16)),))


@row
def wgan_gradient_penalty(kit: Kit) -> Setup:
    """Two steps of the critic for one of the generator; a gradient of a gradient."""
    w, z = kit.size(16, 256), kit.size(4, 64)
    g, d = kit.put(mlp(z, w, w)), kit.put(mlp(w, w, 1, act=nn.Softplus))
    opt_g, opt_d = _two_optimizers(g, d)

    def penalty(real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(real.shape[0], 1, device=real.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
        return ((slope.norm(2, 1) - 1) ** 2).mean()

    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            fake = g(torch.randn(real.shape[0], z, device=real.device)).detach()
            loss_d = d(fake).mean() - d(real).mean() + 10 * penalty(real, fake)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
        loss_g = -d(g(torch.randn(real.shape[0], z, device=real.device))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_d.detach(), loss_g.detach()

    return Setup(step, [g, d], [opt_g, opt_d], lambda: (kit.randn(16, w),))


class Coupling(nn.Module):
    def __init__(self, w: int, hidden: int, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = mlp(w // 2, hidden, w, act=nn.Tanh), flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        a, b = (b, a) if self.flip else (a, b)
        scale, shift = self.net(a).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([a, b * scale.exp() + shift], 1), scale.sum(1)


@row
def normalizing_flow(kit: Kit) -> Setup:
    w, h = kit.size(8, 64), kit.size(16, 256)
    model = kit.put(nn.ModuleList(Coupling(w, h, at % 2 == 1) for at in range(4)))

    def loss_of(x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], device=x.device)
        for layer in model:
            x, log_det = layer(x)
            total = total + log_det
        prior = -0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
        return -(prior + total).mean()

    return trained(model, loss_of, lambda: (kit.randn(32, w),))


class Denoiser(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.time, self.inner = mlp(16, w, w, act=nn.SiLU), nn.Conv2d(3, w, 3, padding=1)
        self.norm, self.mid = nn.GroupNorm(4, w), nn.Conv2d(w, w, 3, padding=1)
        self.out = nn.Conv2d(w, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(8, device=x.device) * -0.5)
        angles = t[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        h = self.inner(x) + time[:, :, None, None]
        return self.out(F.silu(self.mid(F.silu(self.norm(h)))))


@row
def diffusion(kit: Kit) -> Setup:
    model = kit.put(Denoiser(kit.size(8, 64)))
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).to(kit.device)

    def loss_of(x: Tensor) -> Tensor:
        t = torch.randint(100, (x.shape[0],), device=x.device)
        noise, share = torch.randn_like(x), kept[t].view(-1, 1, 1, 1)
        return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)

    return trained(model, loss_of, lambda: (kit.pictures(),))


@row
def flow_matching(kit: Kit) -> Setup:
    w = kit.size(8, 64)
    model = kit.put(mlp(w + 1, 4 * w, w, act=nn.Mish))

    def loss_of(x: Tensor) -> Tensor:
        t, noise = torch.rand(x.shape[0], 1, device=x.device), torch.randn_like(x)
        speed = model(torch.cat([(1 - t) * noise + t * x, t], 1))
        return F.mse_loss(speed, x - noise)

    return trained(model, loss_of, lambda: (kit.randn(32, w),))


@row
def energy_model(kit: Kit) -> Setup:
    """Samples by Langevin steps along the energy's own gradient."""
    w = kit.size(8, 64)
    model = kit.put(mlp(w, 4 * w, 1, act=nn.SiLU))

    def loss_of(x: Tensor, start: Tensor) -> Tensor:
        sample = start
        for _ in range(3):
            sample = sample.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(sample).sum(), sample)
            sample = sample - 0.1 * slope + 0.01 * torch.randn_like(sample)
        low, high = model(x).mean(), model(sample.detach()).mean()
        return low - high + 0.1 * (low.square() + high.square())

    return trained(model, loss_of, lambda: (kit.randn(16, w), kit.randn(16, w)))


@row
def score_matching(kit: Kit) -> Setup:
    w = kit.size(6, 32)
    model = kit.put(mlp(w, 4 * w, w, act=nn.Softplus))

    def loss_of(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        score, direction = model(x), torch.randn_like(x)
        (along,) = torch.autograd.grad((score * direction).sum(), x, create_graph=True)
        return ((along * direction).sum(1) + 0.5 * score.square().sum(1)).mean()

    return trained(model, loss_of, lambda: (kit.randn(16, w),))


@row
def mixture_density(kit: Kit) -> Setup:
    k = 5
    model = kit.put(mlp(2, kit.size(16, 256), 3 * k, act=nn.Tanh))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits, mean, spread = model(x).chunk(3, 1)
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=logits, validate_args=False),
            torch.distributions.Normal(mean, spread.exp(), validate_args=False),
            validate_args=False,
        )
        return -mixture.log_prob(y).mean()

    return trained(model, loss_of, lambda: (kit.randn(32, 2), kit.randn(32)))


@row
def masked_autoencoder(kit: Kit) -> Setup:
    t, w = kit.size(16, 64), kit.size(8, 128)
    layer = nn.TransformerEncoderLayer(w, 4, 2 * w, dropout=0.0, batch_first=True)
    model = kit.put(nn.ModuleList([layer, nn.Linear(w, w)]))
    token = kit.put(nn.ParameterList([nn.Parameter(torch.zeros(w))]))

    def loss_of(x: Tensor, hidden: Tensor) -> Tensor:
        seen = torch.where(hidden[..., None], token[0], x)
        error = (model[1](model[0](seen)) - x).square().mean(-1)
        return (error * hidden).sum() / hidden.sum()

    def batch() -> tuple[Tensor, Tensor]:
        return kit.randn(4, t, w), kit.rand(4, t) < 0.5

    return trained([model, token], loss_of, batch)
