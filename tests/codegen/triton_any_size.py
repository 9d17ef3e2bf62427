"""One compile for many sizes as Triton modules under the interpreter, compared with eager.

``test_triton_step.py`` runs this file in a process of its own, where ``TRITON_INTERPRET`` was set
before triton was imported. Arguments: a folder for the cache, ``float32`` or ``bfloat16``.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import treadle
from treadle.targets.cpu import CPU
from treadle.targets.cuda import CUDA
from treadle.targets.registry import add_target

sys.path.insert(0, str(Path(__file__).parent))
from triton_whole_step import Net, make_step

SIZES = [(4, 5), (2, 3), (3, 16), (2, 2), (5, 31), (8, 32)]
CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.03},
}


def like_a_gpu() -> None:
    """A target that generates for CPU tensors what GPUs get."""
    add_target(
        replace(
            CPU,
            name="grid",
            language=CUDA.language,
            workers=CUDA.workers,
            draws=CUDA.draws,
            aligned_bytes=CUDA.aligned_bytes,
        )
    )


def main(folder: str, dtype: torch.dtype) -> None:
    like_a_gpu()
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    eager = make_step(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3), dtype)
    named = {"x": ("batch", "time"), "y": ("batch", "time")}
    step = treadle.compile(
        make_step(model, optimizer, dtype),
        model=model,
        optimizer=optimizer,
        shapes=treadle.dynamic(named, batch=(1, 8), time=(2, 60)),
        options=treadle.Options(target="grid", cache_dir=folder),
    )
    for number, size in enumerate(SIZES):
        batch = [torch.randint(19, size) for _ in range(2)]
        torch.manual_seed(number)
        loss = step(*batch)
        torch.manual_seed(number)
        torch.testing.assert_close(loss, eager(*batch), **CLOSE[dtype])
        same_numbers(model, twin, dtype)
    assert step.recompiles == ["compiled for batch in 1..8, time in 2..60"], step.recompiles


def same_numbers(model: nn.Module, twin: nn.Module, dtype: torch.dtype) -> None:
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE[dtype])


if __name__ == "__main__":
    main(sys.argv[1], {"float32": torch.float32, "bfloat16": torch.bfloat16}[sys.argv[2]])
