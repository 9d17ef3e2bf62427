"""PyTorch Lightning with treadle as the backend of ``torch.compile``.

::

    python examples/lightning_loop.py [--steps 6] [--eager]
    torchrun --nproc-per-node 2 examples/lightning_loop.py

Prints the loss of every step. Needs lightning.
"""

import argparse
import logging
import os

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from treadle.backend import compiled_graphs


class Network(nn.Module):
    """A class of one's own: ``nn.Sequential.compile`` would compile nothing in PyTorch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Classifier(lightning.LightningModule):
    """A small network whose losses are kept in ``losses``."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.losses: list[float] = []

    def training_step(self, batch, _number):
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def train(steps: int, *, eager: bool = False, batch: int = 16) -> list[float]:
    """The loss of every step."""
    lightning.seed_everything(0, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    x = torch.randn(128, 16)
    rows = TensorDataset(x, x[:, :4].argmax(1))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    share = DistributedSampler(rows, ranks, rank, shuffle=False)  # Lightning's own would shuffle
    data = DataLoader(rows, batch_size=batch, sampler=share)
    model = Classifier()
    if not eager:
        model.network.compile(backend="treadle")
    before = compiled_graphs()
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="auto", devices=ranks, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    assert eager or compiled_graphs() > before, "nothing was compiled"
    return model.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    print(train(options.steps, eager=options.eager))


if __name__ == "__main__":
    main()
