"""Losses of a language model with an option that changes numbers, beside those without.

::

    python benchmarks/losses.py --option numerics=fp8 [--steps 1000] [--layers 4] [--width 1024]
        [--length 512] [--batch 16] [--seeds 2]
    python benchmarks/losses.py --option optimizer_state=8bit

A decoder reads bytes: the sources of Python's standard library, in batches of random places. Every
run of a seed has the same weights and batches, and differs in the option alone. Prints the mean
loss of each tenth of the steps, the time of a step, and how far apart the last tenths are: those of
two seeds say what is noise. On a GPU if there is one, under autocast to bfloat16.
"""

import argparse
import statistics
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import treadle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, 64)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


def text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def losses(
    options: dict[str, str], seed: int, args: argparse.Namespace, data: Tensor
) -> list[float]:
    torch.manual_seed(seed)
    model = Decoder(args.layers, args.width, args.length).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(step, model=model, optimizer=optimizer, **options)
    found: list[Tensor] = []
    began = 0.0
    for number in range(args.steps):
        if number == args.steps // 10:
            _wait()
            began = time.perf_counter()
        places = torch.randint(0, len(data) - args.length - 1, (args.batch,)).tolist()
        rows = torch.stack([data[at : at + args.length + 1] for at in places]).long()
        found.append(compiled(rows.to(DEVICE)))
    _wait()
    ms = 1000 * (time.perf_counter() - began) / (args.steps - args.steps // 10)
    values = torch.stack(found).tolist()
    tenth = args.steps // 10
    means = [statistics.mean(values[at : at + tenth]) for at in range(0, args.steps, tenth)]
    row = " ".join(f"{mean:.4f}" for mean in means)
    promised = compiled.summary().peak_predicted_bytes / 2**20
    name = ", ".join(options.values()) or "default"
    print(f"{name:>8} seed {seed}: {row}   {ms:.2f} ms, {promised:.0f} MiB", flush=True)
    return means


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"steps": 1000, "layers": 4, "width": 1024, "length": 512, "batch": 16, "seeds": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--option", required=True, help="such as numerics=fp8")
    args, data = parser.parse_args(), text()
    name, _, value = args.option.partition("=")
    for seed in range(args.seeds):
        half, eight = (losses(chosen, seed, args, data) for chosen in ({}, {name: value}))
        worst = max(abs(a - b) / b for a, b in zip(eight[1:], half[1:], strict=True))
        last = (eight[-1] - half[-1]) / half[-1]
        print(f"seed {seed}: last tenth {last:+.2%}, most apart after the first tenth {worst:.2%}")


if __name__ == "__main__":
    main()
