"""A VQ-VAE whose codebook follows its codes by moving averages in buffers."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(44)


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num, dim, commitment=0.25, decay=0.9, epsilon=1e-5):
        super().__init__()
        self._num, self._dim = num, dim
        self._embedding = nn.Embedding(num, dim)
        self._embedding.weight.requires_grad_(False)
        self._commitment, self._decay, self._epsilon = commitment, decay, epsilon
        self.register_buffer("_ema_cluster_size", torch.zeros(num))
        self.register_buffer("_ema_w", self._embedding.weight.data.clone())

    def forward(self, inputs):
        flat = inputs.reshape(-1, self._dim)
        distances = (
            flat.pow(2).sum(1, keepdim=True)
            + self._embedding.weight.pow(2).sum(1)
            - 2 * flat @ self._embedding.weight.t()
        )
        indices = distances.argmin(1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], self._num)
        encodings.scatter_(1, indices, 1)
        quantized = (encodings @ self._embedding.weight).view(inputs.shape)
        if self.training:
            with torch.no_grad():
                self._ema_cluster_size.mul_(self._decay).add_(
                    encodings.sum(0), alpha=1 - self._decay
                )
                n = self._ema_cluster_size.sum()
                size = (
                    (self._ema_cluster_size + self._epsilon) / (n + self._num * self._epsilon) * n
                )
                self._ema_w.mul_(self._decay).add_(encodings.t() @ flat, alpha=1 - self._decay)
                self._embedding.weight.data.copy_(self._ema_w / size.unsqueeze(1))
        loss = self._commitment * F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        avg = encodings.mean(0)
        return loss, quantized, torch.exp(-torch.sum(avg * torch.log(avg + 1e-10)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = nn.Linear(10, 4), VectorQuantizerEMA(6, 4), nn.Linear(4, 10)

    def forward(self, x):
        loss, quantized, perplexity = self.vq(self.enc(x))
        return loss, self.dec(quantized), perplexity


model = Model()
model.train()
optimizer = torch.optim.Adam(
    [p for p in model.parameters() if p.requires_grad], lr=1e-3, amsgrad=False
)


def iteration(data):
    optimizer.zero_grad()
    vq_loss, recon, perplexity = model(data)
    recon_error = F.mse_loss(recon, data) / 0.5
    loss = recon_error + vq_loss
    loss.backward()
    optimizer.step()
    return recon_error.detach(), perplexity.detach()


iteration = treadle.compile(iteration, model=model, optimizer=optimizer)
train_res_recon_error, train_res_perplexity = [], []
for i in range(5):
    error, perplexity = iteration(torch.randn(12, 10))
    train_res_recon_error.append(error.item())
    train_res_perplexity.append(perplexity.item())
