"""A small radiance field: positional encoding, samples along rays, volume rendering, rate by step."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(49)
N_samples, L_embed, N_iters = 8, 3, 5


def posenc(x):
    rets = [x]
    for i in range(L_embed):
        for fn in [torch.sin, torch.cos]:
            rets.append(fn(2.0**i * x))
    return torch.cat(rets, -1)


class NeRF(nn.Module):
    def __init__(self, W=16):
        super().__init__()
        self.l1, self.l2 = nn.Linear(3 + 3 * 2 * L_embed, W), nn.Linear(W, W)
        self.out = nn.Linear(W, 4)

    def forward(self, x):
        return self.out(torch.relu(self.l2(torch.relu(self.l1(x)))))


def render_rays(network, rays_o, rays_d, near, far, rand=True):
    z_vals = torch.linspace(near, far, N_samples)
    if rand:
        z_vals = (
            z_vals + torch.rand(list(rays_o.shape[:-1]) + [N_samples]) * (far - near) / N_samples
        )
    pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
    raw = network(posenc(pts))
    sigma_a, rgb = torch.relu(raw[..., 3]), torch.sigmoid(raw[..., :3])
    dists = torch.cat(
        [z_vals[..., 1:] - z_vals[..., :-1], torch.full_like(z_vals[..., :1], 1e10)], -1
    )
    alpha = 1.0 - torch.exp(-sigma_a * dists)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)
    weights = alpha * trans[..., :-1]
    return (weights[..., None] * rgb).sum(-2), (weights * z_vals).sum(-1)


model = NeRF()
optimizer = torch.optim.Adam(model.parameters(), 5e-4)


def train_step(rays_o, rays_d, target):
    rgb, depth = render_rays(model, rays_o, rays_d, near=2.0, far=6.0)
    loss = torch.mean((rgb - target) ** 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
psnrs, iternums = [], []
for i in range(N_iters + 1):
    loss = train_step(torch.zeros(16, 3), torch.randn(16, 3), torch.rand(16, 3))
    new_lrate = 5e-4 * (0.1 ** (i / 500))
    for param_group in optimizer.param_groups:
        param_group["lr"] = new_lrate
    if i % 2 == 0:
        psnrs.append((-10.0 * torch.log(loss) / torch.log(torch.tensor(10.0))).item())
        iternums.append(i)
