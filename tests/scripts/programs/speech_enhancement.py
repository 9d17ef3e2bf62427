"""Enhancement of speech between a Fourier transform of short times and its inverse."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(16)


class S4D(nn.Module):
    def __init__(self, H, N=8):
        super().__init__()
        self.log_dt = nn.Parameter(
            torch.rand(H) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)
        )
        self.C = nn.Parameter(torch.view_as_real(torch.randn(H, N // 2, dtype=torch.cfloat)))
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(H, N // 2)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(N // 2).repeat(H, 1).float())
        self.D = nn.Parameter(torch.randn(H))

    def forward(self, u):
        L = u.size(-1)
        dt = torch.exp(self.log_dt)
        C = torch.view_as_complex(self.C)
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dtA = A * dt.unsqueeze(-1)
        K = dtA.unsqueeze(-1) * torch.arange(L)
        C = C * (torch.exp(dtA) - 1.0) / A
        K = 2 * torch.einsum("hn, hnl -> hl", C, torch.exp(K)).real
        kf = torch.fft.rfft(K, n=2 * L)
        uf = torch.fft.rfft(u, n=2 * L)
        y = torch.fft.irfft(uf * kf, n=2 * L)[..., :L]
        return F.gelu(y + u * self.D.unsqueeze(-1))


class SpectralConv2d(nn.Module):
    def __init__(self, i, o, m1, m2):
        super().__init__()
        self.m1, self.m2 = m1, m2
        self.w1 = nn.Parameter(torch.rand(i, o, m1, m2, dtype=torch.cfloat) / (i * o))
        self.w2 = nn.Parameter(torch.rand(i, o, m1, m2, dtype=torch.cfloat) / (i * o))

    def forward(self, x):
        f = torch.fft.rfft2(x)
        out = torch.zeros(
            x.shape[0], self.w1.shape[1], x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat
        )
        out[:, :, : self.m1, : self.m2] = torch.einsum(
            "bixy,ioxy->boxy", f[:, :, : self.m1, : self.m2], self.w1
        )
        out[:, :, -self.m1 :, : self.m2] = torch.einsum(
            "bixy,ioxy->boxy", f[:, :, -self.m1 :, : self.m2], self.w2
        )
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class Enh(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("win", torch.hann_window(16))
        self.s4, self.mask, self.sc = (
            S4D(9),
            nn.Conv1d(9, 18, 3, padding=1),
            SpectralConv2d(2, 2, 2, 2),
        )

    def forward(self, wav):
        X = torch.stft(wav, 16, hop_length=4, window=self.win, return_complex=True)
        m = self.mask(self.s4(X.abs().clamp(min=1e-6).log()))
        mr, mi = torch.tanh(m).chunk(2, 1)
        z = torch.view_as_real(X * torch.complex(mr, mi)).permute(0, 3, 1, 2).contiguous()
        z = z + self.sc(z)
        Y = torch.complex(z[:, 0], z[:, 1])
        return torch.istft(Y, 16, hop_length=4, window=self.win, length=wav.size(-1)), Y


def si_snr(est, ref, eps=1e-8):
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    t = (est * ref).sum(-1, keepdim=True) * ref / (ref.pow(2).sum(-1, keepdim=True) + eps)
    return 20 * torch.log10(eps + t.norm(dim=-1) / ((est - t).norm(dim=-1) + eps))


net = Enh()
special = [net.s4.log_A_real, net.s4.A_imag]
opt = torch.optim.AdamW(
    [
        {"params": [p for p in net.parameters() if all(p is not q for q in special)]},
        {"params": special, "weight_decay": 0.0, "lr": 1e-4},
    ],
    lr=1e-3,
)


def step(noisy, clean):
    opt.zero_grad()
    est, Y = net(noisy)
    C = torch.stft(clean, 16, hop_length=4, window=net.win, return_complex=True)
    loss = (
        -si_snr(est, clean).mean()
        + 0.1 * F.l1_loss(Y.abs(), C.abs())
        + 0.01 * (1 - torch.cos(torch.angle(C) - torch.angle(Y + 1e-3))).mean()
    )
    loss.backward()
    opt.step()
    return loss.detach(), torch.view_as_real(Y.detach())


step = treadle.compile(step, model=net, optimizer=opt)
for i in range(4):
    n = 100
    c = torch.sin(torch.arange(n) * 0.3)[None] * torch.rand(3, 1)
    l, Y = step(c + 0.3 * torch.randn(3, n), c)
