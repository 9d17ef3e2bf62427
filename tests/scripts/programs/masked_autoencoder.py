"""Masked autoencoder: random shuffling by argsort, gather, learned mask tokens, cosine schedule."""

import math

import torch
import torch.nn as nn

import treadle

torch.manual_seed(4)


class MAE(nn.Module):
    def __init__(self, patch=4, img=16, dim=24, dec=16):
        super().__init__()
        self.p = patch
        n = (img // patch) ** 2
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.pos = nn.Parameter(torch.randn(1, n, dim) * 0.02, requires_grad=False)
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, 4, 48, 0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.d_embed = nn.Linear(dim, dec)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dec))
        self.d_pos = nn.Parameter(torch.randn(1, n, dec) * 0.02, requires_grad=False)
        self.dec = nn.TransformerEncoderLayer(dec, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(dec, patch * patch * 3)

    def patchify(self, x):
        B, C, H, W = x.shape
        p = self.p
        x = x.reshape(B, C, H // p, p, W // p, p)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(B, (H // p) * (W // p), p * p * C)

    def random_masking(self, x, ratio):
        N, L, D = x.shape
        keep = int(L * (1 - ratio))
        noise = torch.rand(N, L, device=x.device)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        ids_keep = shuffle[:, :keep]
        x = torch.gather(x, 1, ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :keep] = 0
        return x, torch.gather(mask, 1, restore), restore

    def forward(self, imgs, ratio=0.75):
        x = self.embed(imgs).flatten(2).transpose(1, 2) + self.pos
        x, mask, restore = self.random_masking(x, ratio)
        x = self.d_embed(self.enc(x))
        tokens = self.mask_token.repeat(x.shape[0], restore.shape[1] - x.shape[1], 1)
        x = torch.cat([x, tokens], 1)
        x = torch.gather(x, 1, restore.unsqueeze(-1).repeat(1, 1, x.shape[2])) + self.d_pos
        pred = self.head(self.dec(x))
        target = self.patchify(imgs)
        mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        target = (target - mean) / (var + 1e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum()


net = MAE()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
sched = torch.optim.lr_scheduler.LambdaLR(
    opt, lambda s: min(1, (s + 1) / 3) * 0.5 * (1 + math.cos(math.pi * s / 10))
)


def step(imgs):
    opt.zero_grad()
    loss = net(imgs)
    loss.backward()
    gn = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    opt.step()
    return loss.detach(), gn


step = treadle.compile(step, model=net, optimizer=opt)
log = []
for _ in range(5):
    loss, gn = step(torch.randn(6, 3, 16, 16))
    sched.step()
    log.append((loss.item(), gn.item(), sched.get_last_lr()[0]))
