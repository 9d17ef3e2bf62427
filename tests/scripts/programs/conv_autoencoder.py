"""A denoising autoencoder trained by a Trainer class that counts, logs and keeps the best loss."""

import logging
from types import SimpleNamespace

import torch
import torch.nn as nn

import treadle

logging.getLogger(__name__).setLevel(logging.ERROR)
log = logging.getLogger(__name__)
torch.manual_seed(37)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = AutoEncoder()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.criterion = nn.MSELoss()
        self.global_step = 0
        self.best = float("inf")
        self.history = []
        self.step = treadle.compile(self.train_step, model=self.model, optimizer=self.optimizer)

    def train_step(self, clean, noisy):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(noisy), clean)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            for _ in range(self.cfg.batches):
                clean = torch.rand(4, 1, 8, 8)
                loss = self.step(clean, clean + 0.1 * torch.randn_like(clean))
                self.global_step += 1
                self.history.append(loss.item())
                log.info("step %d loss %.4f", self.global_step, loss)
            if self.history[-1] < self.best:
                self.best = self.history[-1]


trainer = Trainer(SimpleNamespace(lr=1e-3, epochs=2, batches=3, dir="out"))
trainer.fit()
history, best = trainer.history, trainer.best
