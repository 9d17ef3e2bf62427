"""VQ-VAE whose averaged codes take the place of a parameter, with dead codes replaced and numbers
in two lists.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(8)
EPOCH = 0


class VectorQuantizerEMA(nn.Module):
    def __init__(self, K, D, commitment_cost=0.25, decay=0.9, epsilon=1e-5, threshold=0.5):
        super().__init__()
        self._D, self._K = D, K
        self._embedding = nn.Embedding(K, D)
        self._embedding.weight.data.normal_()
        self._embedding.weight.requires_grad = False
        self._commitment_cost, self._decay, self._epsilon, self.threshold = (
            commitment_cost,
            decay,
            epsilon,
            threshold,
        )
        self.register_buffer("_ema_cluster_size", torch.ones(K))
        self._ema_w = nn.Parameter(torch.Tensor(K, D), requires_grad=False)
        self._ema_w.data.copy_(self._embedding.weight.data)

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        shape = inputs.shape
        flat = inputs.view(-1, self._D)
        distances = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self._embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat, self._embedding.weight.t())
        )
        idx = torch.argmin(distances, dim=1).unsqueeze(1)
        enc = torch.zeros(idx.shape[0], self._K, device=inputs.device)
        enc.scatter_(1, idx, 1)
        quantized = torch.matmul(enc, self._embedding.weight).view(shape)
        if self.training:
            self._ema_cluster_size = self._ema_cluster_size * self._decay + (
                1 - self._decay
            ) * torch.sum(enc, 0)
            n = torch.sum(self._ema_cluster_size.data)
            self._ema_cluster_size = (
                (self._ema_cluster_size + self._epsilon) / (n + self._K * self._epsilon) * n
            )
            dw = torch.matmul(enc.t(), flat)
            self._ema_w = nn.Parameter(
                self._ema_w * self._decay + (1 - self._decay) * dw, requires_grad=False
            )
            self._embedding.weight = nn.Parameter(
                self._ema_w / self._ema_cluster_size.unsqueeze(1), requires_grad=False
            )
            with torch.no_grad():
                dead = self._ema_cluster_size < self.threshold
                cand = flat[torch.randperm(flat.shape[0])[: self._K]]
                self._embedding.weight.data[dead] = cand[dead]
        e_latent_loss = F.mse_loss(quantized.detach(), inputs)
        loss = self._commitment_cost * e_latent_loss * min(1.0, (EPOCH + 1) / 3)
        quantized = inputs + (quantized - inputs).detach()
        avg = torch.mean(enc, dim=0)
        perplexity = torch.exp(-torch.sum(avg * torch.log(avg + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2).contiguous(), perplexity, enc


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self._encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1)
        )
        self._vq = VectorQuantizerEMA(16, 6)
        self._decoder = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 1)
        )

    def forward(self, x):
        loss, q, perplexity, _ = self._vq(self._encoder(x))
        return loss, self._decoder(q), perplexity


model = Model()
data_variance = 0.3
optimizer = torch.optim.Adam(
    filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3, amsgrad=False
)
train_res_recon_error, train_res_perplexity = [], []


def step(data):
    optimizer.zero_grad()
    vq_loss, data_recon, perplexity = model(data)
    recon_error = F.mse_loss(data_recon, data) / data_variance
    loss = recon_error + vq_loss
    loss.backward()
    optimizer.step()
    train_res_recon_error.append(recon_error.item())
    train_res_perplexity.append(perplexity.item())


step = treadle.compile(step, model=model, optimizer=optimizer)
for i in range(8):
    EPOCH = i // 3
    step(torch.rand(6, 1, 12, 12))
