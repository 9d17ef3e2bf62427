"""Accelerate with treadle as the backend of ``torch.compile``.

::

    python examples/accelerate_loop.py [--steps 6] [--eager]
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Prints the loss of every step. Needs accelerate.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from treadle.backend import compiled_graphs


class Classifier(nn.Module):
    """A class of one's own: ``nn.Sequential.compile`` would compile nothing in PyTorch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(steps: int, *, eager: bool = False, batch: int = 16) -> list[float]:
    """The loss of every step."""
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(batch * steps * accelerator.num_processes, 16)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=batch)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if not eager:
        model.compile(backend="treadle")
    before = compiled_graphs()
    losses = []
    for inputs, labels in data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert eager or compiled_graphs() > before, "nothing was compiled"
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    print(train(options.steps, eager=options.eager))


if __name__ == "__main__":
    main()
