"""How long a process waits for its first call: the first process that makes a step, and those that
come after it; treadle, and beside it torch.compile of model and optimizer.

    python benchmarks/start.py                    GPT-2 on a GPU, with small layers on CPUs
    python benchmarks/start.py --layers 8         of so many layers
    python benchmarks/start.py --memory 0.5       within half of the fastest plan's peak
    python benchmarks/start.py --lengths          each call with a length that none had before
    python benchmarks/start.py --only treadle     or torch.compile, or eager

Each line is a process of its own, those of one compiler with one cache. ``import``: seconds of
treadle's names beyond PyTorch and transformers; ``first`` and ``second``: of the first call and of
the second one; ``cpu``: the processor's seconds of the import and the first call, in all threads,
without compilers that are processes of their own. Treadle's lines say whether the step was traced.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import transformers

RIVALS = ("treadle", "torch.compile", "eager")
PROCESSES = ("first process", "second", "third")


def model_of(device: torch.device, layers: int) -> transformers.GPT2LMHeadModel:
    ends = {"bos_token_id": None, "eos_token_id": None}
    small = {"n_embd": 64, "n_head": 4, "vocab_size": 257, "n_positions": 64, **ends}
    sizes = {} if device.type == "cuda" else small
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, **sizes)
    return transformers.GPT2LMHeadModel(config).to(device)


def training(
    model: transformers.GPT2LMHeadModel, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step with clipping."""

    def train(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return train


def one(rival: str, layers: int, memory: float | None, lengths: tuple[int, int]) -> None:
    """One process. ``lengths``: of its two calls."""
    began, busy = time.perf_counter(), time.process_time()
    if rival == "treadle":
        import treadle

        assert treadle.compile  # imports what a step needs: the package comes without
    imported, busy = time.perf_counter() - began, time.process_time() - busy
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_of(device, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = train = training(model, optimizer)
    if rival == "treadle":
        step = treadle.compile(train, model=model, optimizer=optimizer, memory=memory)
    elif rival == "torch.compile":
        model.compile()
        optimizer.step = torch.compile(optimizer.step)
    first_tokens, second_tokens = (
        torch.randint(0, model.config.vocab_size, (2, length), device=device) for length in lengths
    )
    busy -= time.process_time()
    began = time.perf_counter()
    loss = step(first_tokens).item()
    first, busy = time.perf_counter() - began, busy + time.process_time()
    began = time.perf_counter()
    step(second_tokens).item()
    second = time.perf_counter() - began
    traced = ""
    if rival == "treadle":
        traced = "not traced" if step.compiled.untraced else "traced"
    print(
        f"import {imported:5.2f}, first {first:6.2f}, cpu {busy:6.2f}, second {second:5.3f} s, "
        f"loss {loss:.4f}  {traced}",
        flush=True,
    )


def several(rival: str, layers: int, memory: float | None, *, many: bool) -> None:
    """Processes of one compiler, one after another, with a cache. ``many``: of many lengths."""
    asked = [sys.executable, __file__, "--one", rival, "--layers", str(layers)]
    asked += [] if memory is None else ["--memory", str(memory)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TREADLE_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        environment = os.environ | caches
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
        for number, name in enumerate(PROCESSES):
            lengths = (40 - number, 30 - number) if many else (32, 32)
            print(f"{rival:14}{name:14}", end="", flush=True)
            given = [*asked, "--of", *map(str, lengths)]
            subprocess.run(given, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=float)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--only", choices=RIVALS, action="append", help="may be given several times"
    )
    parser.add_argument("--lengths", action="store_true", help="of each call another one")
    parser.add_argument("--one", choices=RIVALS, help="one process alone")
    parser.add_argument("--of", type=int, nargs=2, default=(32, 32), help="lengths of its calls")
    given = parser.parse_args()
    if given.one:
        one(given.one, given.layers, given.memory, tuple(given.of))
        return
    for rival in given.only or RIVALS:
        several(rival, given.layers, given.memory, many=given.lengths)


if __name__ == "__main__":
    main()
