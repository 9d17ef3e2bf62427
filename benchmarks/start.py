"""How long a process waits for its first call: the first process that makes a step, and those that
come after it.

    python benchmarks/start.py                    GPT-2 with 12 layers on a GPU, small ones on CPUs
    python benchmarks/start.py --memory 0.5       within half of the fastest plan's peak
    python benchmarks/start.py --rival            torch.compile of model and optimizer beside it

Each line is a process of its own with one cache: seconds of ``import treadle`` with its names,
beyond PyTorch and transformers, of the first call, and of the second one; whether the step was
traced.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch
import transformers


def model_of(device: torch.device) -> transformers.GPT2LMHeadModel:
    small = {"n_embd": 64, "n_head": 4, "vocab_size": 257, "n_positions": 64}
    config = transformers.GPT2Config(**({} if device.type == "cuda" else small))
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(device)


def one(memory: float | None, *, rival: bool) -> None:
    """One process."""
    began = time.perf_counter()
    if not rival:
        import treadle

        assert treadle.compile  # imports the names of the package: it comes without them
    imported = time.perf_counter() - began
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_of(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    if rival:
        model.compile()
        optimizer.step = torch.compile(optimizer.step)
        step = train
    else:
        step = treadle.compile(train, model=model, optimizer=optimizer, memory=memory)
    tokens = torch.randint(0, model.config.vocab_size, (2, 32), device=device)
    seconds: list[float] = []
    for _ in range(2):
        began = time.perf_counter()
        loss = step(tokens).item()
        seconds.append(time.perf_counter() - began)
    traced = "" if rival else ("not traced" if step.compiled.untraced else "traced")
    print(
        f"import {imported:5.2f} s, first call {seconds[0]:6.2f} s, second {seconds[1]:5.3f} s, "
        f"loss {loss:.4f}  {traced}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=float)
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--one", action="store_true", help="one process alone")
    given = parser.parse_args()
    if given.one:
        one(given.memory, rival=given.rival)
        return
    asked = [sys.executable, __file__, "--one", *(["--rival"] if given.rival else [])]
    asked += [] if given.memory is None else ["--memory", str(given.memory)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TREADLE_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        for name in ("first process", "second", "third"):
            print(f"{name:14}", end="", flush=True)
            subprocess.run(asked, env=os.environ | caches, check=True)


if __name__ == "__main__":
    main()
