"""Attention that is written out, as one call of the library: which models, and what it is worth.

::

    python benchmarks/attention_written_out.py            times, on a CPU, with and without the pass
    python benchmarks/attention_written_out.py --device cuda --batch 16 --heads 12 --dtypes bfloat16
    python benchmarks/attention_written_out.py --table    what becomes of each softmax of models,
                                                          with --device cuda in bf16 autocast

Times are medians of the whole step (forward, backward, SGD) of one layer: the attention and a
product each for what goes in and what comes out; the three ways in turns. On a CPU they are seconds
of the processor and not of the clock, so that what else runs on the machine counts little; of one
thread.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.capture.step import capture
from treadle.compiler import cleaning
from treadle.passes.attention.fuse import AttentionFinding, FuseAttention, findings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))

WIDTH = 64
ROUNDS = 31


class Attention(nn.Module):
    """Attention as a textbook writes it. ``mask``: ``"causal"``, which no input decides, or
    ``"given"``, which an input does, and which is a large number to add."""

    def __init__(self, heads: int, width: int = WIDTH, *, mask: str = "", length: int = 0) -> None:
        super().__init__()
        self.heads, self.mask = heads, mask
        self.register_buffer("kept", torch.ones(length, dtype=torch.bool))
        self.qkv = nn.Linear(heads * width, 3 * heads * width)
        self.out = nn.Linear(heads * width, heads * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self.mask == "causal":
            scores = scores.masked_fill(~causal, float("-inf"))
        if self.mask == "given":
            least = torch.finfo(x.dtype).min
            zero = torch.zeros((), dtype=x.dtype, device=x.device)
            scores = scores + zero.where(causal & self.kept, least)
        mixed = scores.softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class ByTorch(nn.Module):
    """``nn.MultiheadAttention`` that returns its weights' mean, which nobody reads."""

    def __init__(self, heads: int, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(heads * width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class WithBuffer(nn.Module):
    """nanoGPT's: its mask is a buffer, and the softmax is in f32."""

    def __init__(self, heads: int, width: int = WIDTH, length: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(heads * width, 3 * heads * width)
        self.c_proj = nn.Linear(heads * width, heads * width)
        self.register_buffer("bias", torch.ones(length, length).tril().view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        query, key, value = (
            each.view(shape).transpose(1, 2) for each in self.c_attn(x).split(width, dim=2)
        )
        scores = (query @ key.transpose(-2, -1)) * (1.0 / shape[-1] ** 0.5)
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        mixed = weights @ value
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))


Step = Callable[..., Tensor]


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step that makes the result of ``model`` small."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@contextmanager
def fusing(passes: tuple[FuseAttention, ...]) -> Iterator[None]:
    """Inside, steps are compiled with these instead of the pass as it is by default."""
    before = cleaning.FUSE
    cleaning.FUSE = passes
    try:
        yield
    finally:
        cleaning.FUSE = before


def compiled(model: nn.Module, x: Tensor, passes: tuple[FuseAttention, ...]) -> Step:
    """A compiled step that has run once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = treadle.Options(cache_dir=Path(tempfile.mkdtemp()), progress=False)
    with fusing(passes):
        step = treadle.compile(
            training(model, optimizer), model=model, optimizer=optimizer, options=options
        )
        step(x)
    return step


def now(device: str) -> float:
    """Seconds: of the processor, or of the clock when a GPU has done all it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _rotated(steps: list[tuple[int, Step]], by: int) -> list[tuple[int, Step]]:
    """The step behind eager's begins on a GPU that has waited for the host: it is each in turn."""
    at = by % len(steps)
    return steps[at:] + steps[:at]


def medians(steps: list[Step], x: Tensor, rounds: int = ROUNDS) -> list[float]:
    """Seconds of each, in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 2):
        for which, step in _rotated(list(enumerate(steps)), number):
            start = now(x.device.type)
            step(x)
            if number >= 2:
                times[which].append(now(x.device.type) - start)
    return [statistics.median(each) for each in times]


def time_one(length: int, mask: str, dtype: torch.dtype, given: argparse.Namespace) -> str:
    """A row of the table of times."""
    torch.manual_seed(0)
    heads, width = given.heads, given.width
    model = Attention(heads, width, mask=mask, length=length).to(given.device, dtype)
    x = torch.randn(given.batch, length, heads * width, dtype=dtype, device=given.device)
    models = [copy.deepcopy(model) for _ in range(3)]
    eager = training(models[2], torch.optim.SGD(models[2].parameters(), lr=1e-3))
    fused = compiled(models[0], x, (FuseAttention(everywhere=True),))
    steps = [fused, compiled(models[1], x, ()), eager]
    with_pass, without, by_eager = (1e3 * each for each in medians(steps, x))
    peaks = [step.compiled.artifact.peak_bytes / 2**20 for step in steps[:2]]
    return (
        f"| {length} | {heads} x {width} | {mask or 'none'} | {str(dtype)[6:]} "
        f"| {with_pass:.2f} | {without:.2f} | {by_eager:.2f} | {with_pass / without:.2f} "
        f"| {with_pass / by_eager:.2f} | {peaks[0]:.1f} | {peaks[1]:.1f} |"
    )


def show_times(lengths: list[int], dtypes: list[torch.dtype], given: argparse.Namespace) -> None:
    """With and without the pass, and eager."""
    print(
        "| T | heads | mask | dtype | fused ms | not ms | eager ms | / not | / eager | MiB | not |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for dtype in dtypes:
        for mask in ("", "causal", "given"):
            for length in lengths:
                print(time_one(length, mask, dtype, given), flush=True)


def of_transformers(
    name: str, *, padded: bool = False
) -> tuple[nn.Module, Step, dict[str, Tensor]]:
    """A small model as it is written out, without dropout, and its step. ``padded``: with a mask in
    the batch that says which tokens count."""
    import architectures

    model, batch = getattr(architectures, name)()
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model.set_attn_implementation("eager")
    for each in model.modules():
        for attribute, value in vars(each).items():
            if isinstance(value, float) and ("dropout" in attribute or attribute == "p"):
                setattr(each, attribute, 0.0)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**given: Tensor) -> Tensor:
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step, batch


def of_module(make: Callable[[], nn.Module]) -> tuple[nn.Module, Step, dict[str, Tensor]]:
    """A layer of this file, and its step."""
    model = make()
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, step, {"x": torch.randn(2, 13, 32)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Step, dict[str, Tensor]]]] = {
    "BERT": partial(of_transformers, "bert"),
    "GPT-2": partial(of_transformers, "gpt2"),
    "BERT, padded": partial(of_transformers, "bert", padded=True),
    "GPT-2, padded": partial(of_transformers, "gpt2", padded=True),
    "ViT": partial(of_transformers, "vit"),
    "T5": partial(of_transformers, "t5"),
    "Whisper": partial(of_transformers, "whisper"),
    "Llama": partial(of_transformers, "llama"),
    "MultiheadAttention": partial(of_module, partial(ByTorch, 4, 8)),
    "nanoGPT": partial(of_module, partial(WithBuffer, 4, 8)),
}


def softmaxes(name: str, device: str) -> tuple[AttentionFinding, ...]:
    """What becomes of each softmax of a model's training step."""
    torch.manual_seed(0)
    model, step, batch = MODELS[name]()
    model.to(device)
    batch = {key: each.to(device) for key, each in batch.items()}
    optimizer = next(
        cell.cell_contents
        for cell in step.__closure__ or ()
        if isinstance(cell.cell_contents, torch.optim.Optimizer)
    )

    def autocast(**given: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            return step(**given)

    captured = capture(
        autocast, models={"": model}, optimizers={"": optimizer}, args=(), kwargs=dict(batch)
    )
    return findings(cleaning.clean(captured.step), everywhere=True)


def show_table(device: str) -> None:
    """Which of the attentions of each model become calls, and why others do not."""
    print("| model | fused | refused, and why |")
    print("|---|---|---|")
    for name in MODELS:
        try:
            found = softmaxes(name, device)
        except treadle.TreadleError as error:  # as some of its versions are written
            print(f"| {name} | not captured | {error.message} |", flush=True)
            continue
        why = dict.fromkeys(each.refused for each in found if each.refused)
        fused = sum(each.fused for each in found)
        print(f"| {name} | {fused} of {len(found)} | {'; '.join(why)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--lengths", default="16,32,64,128,256,512")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--dtypes", default="float32")
    given = parser.parse_args()
    if given.table:
        show_table(given.device)
        return
    torch.set_num_threads(1)
    lengths = [int(each) for each in given.lengths.split(",")]
    dtypes = [getattr(torch, each) for each in given.dtypes.split(",")]
    show_times(lengths, dtypes, given)


if __name__ == "__main__":
    main()
