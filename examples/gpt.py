"""A byte-level GPT in plain PyTorch, trained on the source of Python's own standard library.

Run ``python examples/gpt.py`` to train it eagerly; ``treadle demo`` trains it both ways. The
only line that knows treadle is the one that compiles the step.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """About 3.2 million parameters; one step sees ``batch * length`` bytes."""

    vocabulary: int = 256
    length: int = 128
    layers: int = 7
    heads: int = 6
    width: int = 192
    dropout: float = 0.1
    batch: int = 8


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        mask = torch.ones(config.length, config.length).tril().bool()
        self.register_buffer("mask", mask, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (c // self.heads) ** -0.5
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm_1(x)), self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = F.dropout(self.tokens(x) + self.positions(places), self.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def corpus(limit: int = 8_000_000) -> Tensor:
    """The standard library's source as bytes, in file-name order: uint8, at most ``limit``."""
    pieces: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit]), dtype=torch.uint8)


def batches(data: Tensor, config: Config, steps: int, seed: int = 0):
    """``steps`` random windows of ``data``: (bytes, next bytes), int64 of (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - config.length - 1, (config.batch,), generator=generator)
        window = torch.stack([data[s : s + config.length + 1] for s in starts.tolist()]).long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer):
    """An ordinary step: forward, loss, backward, clipping, update."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    torch.manual_seed(0)
    config = Config()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = training_step(model, optimizer)
    for i, (x, y) in enumerate(batches(corpus(), config, 300)):
        loss = step(x, y)
        if i % 50 == 0:
            print(f"step {i:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
