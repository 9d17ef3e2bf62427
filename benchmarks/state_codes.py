"""What 8-bit codes do to AdamW's updates: with the gradients of an ordinary run, on the CPU.

::

    python benchmarks/state_codes.py [--steps 300] [--width 128]

A small decoder on text is trained with state in 32 bits. Averages in codes get the same gradients,
once with averages of squares rounded to the nearest code, and once as ``optimizer_state="8bit"``
rounds them. For each large parameter: the median of the roots of averages of squares beside the
exact ones, and the root mean square of updates beside that of exact ones.
"""

import argparse

import torch
from losses import Decoder, text
from torch import Tensor, nn

from treadle.capture.optimizers.eight_bits import decoded, encoded, turn_of

LENGTH, BATCH = 64, 8


def kept(value: Tensor, codes: torch.dtype, turn: Tensor | None) -> Tensor:
    """The numbers that are left of a state."""
    parts = encoded(value.view(-1, 256), codes, turn)
    return decoded(*parts, torch.float32).view_as(value)


def update(mean: Tensor, square: Tensor, step: int) -> Tensor:
    return mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    args, data = parser.parse_args(), text()
    torch.manual_seed(0)
    model = Decoder(1, args.width, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    large = {p: name for name, p in model.named_parameters() if p.numel() >= 4096}
    ways = {"nearest": {}, "8bit": {}}
    for states in ways.values():
        states |= {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in large}
    for step in range(1, args.steps + 1):
        places = torch.randint(0, len(data) - LENGTH - 1, (BATCH,)).tolist()
        rows = torch.stack([data[at : at + LENGTH + 1] for at in places]).long()
        logits = model(rows[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        turn = turn_of({"step": torch.tensor(float(step), dtype=torch.float64)})
        for way, states in ways.items():
            for p, name in large.items():
                mean, square = states[p]
                mean = mean.lerp(p.grad, 0.1)
                square = square * 0.999 + p.grad.square() * 0.001
                if step == args.steps:
                    state = optimizer.state[p]
                    exact = update(state["exp_avg"], state["exp_avg_sq"], step).norm()
                    there = state["exp_avg_sq"] > 0
                    roots = (square[there] / state["exp_avg_sq"][there]).sqrt()
                    moved = update(mean, square, step).norm() / exact
                    print(f"{way:>8} {name:<24} roots {roots.median():.3f} updates {moved:.3f}")
                squares = kept(square, torch.uint8, turn if way == "8bit" else None)
                states[p] = kept(mean, torch.int8, None), squares
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
