"""Training steps of language models on one GPU: treadle against eager and ``torch.compile``.

::

    python benchmarks/language_models.py [--model gpt2] [--batch 16] [--length 1024] [--steps 20]
        [--timed 30] [--budget 7GiB] [--only eager,compile,treadle,budget] [--graphs]
        [--dropout 0.1] [--tune] [--profile] [--skip GroupHeads,...] [--chunks 4] [--plan h200]
        [--attention eager] [--offload]

``--model``: ``gpt2`` (124M), ``llama-271m``, ``llama-1.2b``, ``llama-7b``, ``qwen3`` or ``mistral``
(a window of 1,024 tokens): those of ``transformers`` with random weights, and a batch of their own
unless another is given. ``--attention eager``: written out instead of a call of PyTorch's.

All variants start from the same weights and see the same batches: bf16 autocast, float32
parameters, AdamW (fused in eager and ``torch.compile``). Losses are compared with eager's. Memory
is the peak that PyTorch's allocator reports over the timed steps. Prints a table, and writes
``language_models.json`` into ``$OUT`` (or the current folder).

``--dropout``: of embeddings and residuals; attention has none, so that its kernel stays the same.
``--only counter`` is treadle with ``rng="counter"``. ``compile`` and ``counter`` draw other masks.
``--only fp8`` is treadle with ``numerics="fp8"``; ``8bit`` with ``optimizer_state="8bit"``, and
``8bit-budget`` with that and ``--budget``.

``--plan h200`` runs nothing: it prints what ``treadle.plan`` says of the step on that device,
there or not.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import treadle
from treadle.compat.dynamo import captured_graphs

GIB = 2**30
Step = Callable[[Tensor], Tensor]


@dataclass
class Result:
    """What one variant did. ``worst_loss`` is the largest relative distance to eager's losses."""

    name: str
    losses: list[float] = field(default_factory=list[float])
    worst_loss: float | None = None
    first_call_seconds: float = 0.0
    median_ms: float = 0.0
    spread_ms: tuple[float, float] = (0.0, 0.0)
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


@dataclass(frozen=True)
class Preset:
    """A model with random weights, and the batch it is measured with."""

    make: Callable[[argparse.Namespace], nn.Module]
    batch: int
    length: int
    vocabulary: int
    layers: int


def _gpt2(args: argparse.Namespace) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"embd_pdrop": args.dropout, "attn_pdrop": 0.0, "resid_pdrop": args.dropout}
    return GPT2LMHeadModel(GPT2Config(n_layer=args.layers, use_cache=False, **rates))


def _llama(args: argparse.Namespace, **sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    depth = {"num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **depth, **sizes))


def _llama_271m(args: argparse.Namespace) -> nn.Module:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return _llama(args, hidden_size=1024, intermediate_size=2816, **heads)


def _llama_1b(args: argparse.Namespace) -> nn.Module:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    return _llama(args, hidden_size=2048, intermediate_size=8192, **heads)


def _llama_7b(args: argparse.Namespace) -> nn.Module:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    return _llama(args, hidden_size=4096, intermediate_size=11008, **heads)


def _qwen3(args: argparse.Namespace) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": True}
    depth = {"num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    return Qwen3ForCausalLM(Qwen3Config(use_cache=False, **heads, **sizes, **depth))


def _mistral(args: argparse.Namespace) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 1024}
    sizes = {"hidden_size": 2048, "intermediate_size": 7168, "max_position_embeddings": args.length}
    depth = {"num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    return MistralForCausalLM(MistralConfig(use_cache=False, **heads, **sizes, **depth))


PRESETS = {
    "gpt2": Preset(_gpt2, batch=16, length=1024, vocabulary=50257, layers=12),
    "llama-271m": Preset(_llama_271m, batch=8, length=2048, vocabulary=32000, layers=16),
    "llama-1.2b": Preset(_llama_1b, batch=8, length=4096, vocabulary=128256, layers=16),
    "llama-7b": Preset(_llama_7b, batch=1, length=4096, vocabulary=32000, layers=32),
    "mistral": Preset(_mistral, batch=4, length=4096, vocabulary=32000, layers=8),
    "qwen3": Preset(_qwen3, batch=4, length=2048, vocabulary=151936, layers=12),
}


def make_model(args: argparse.Namespace) -> nn.Module:
    """The model that ``args`` names, on the CPU. Its weights are those of the seed on a device."""
    torch.manual_seed(0)
    with torch.device("meta" if args.plan else args.device):
        model = PRESETS[args.model].make(args).to("meta" if args.plan else "cpu")
    if args.attention:
        model.set_attn_implementation(args.attention)
    return model


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, forward: Any) -> Step:
    """One step as a user writes it. ``forward`` is the model, or its compiled form."""
    device = next(model.parameters()).device.type

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_optimizer(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)


def eager(model: nn.Module, _: argparse.Namespace, __: Result) -> Step:
    return make_step(model, make_optimizer(model, fused=_fused(model)), model)


def inductor(model: nn.Module, args: argparse.Namespace, _: Result) -> Step:
    mode = "reduce-overhead" if args.graphs else "default"
    compiled = torch.compile(model, mode=mode)
    return make_step(model, make_optimizer(model, fused=_fused(model)), compiled)


def ours(model: nn.Module, args: argparse.Namespace, result: Result) -> Step:
    return _treadle(model, args, result, None)


def budgeted(model: nn.Module, args: argparse.Namespace, result: Result) -> Step:
    return _treadle(model, args, result, args.budget)


def float8(model: nn.Module, args: argparse.Namespace, result: Result) -> Step:
    return _treadle(model, args, result, None, numerics="fp8")


def eight_bits(model: nn.Module, args: argparse.Namespace, result: Result) -> Step:
    return _treadle(model, args, result, None, optimizer_state="8bit")


def eight_bits_budgeted(model: nn.Module, args: argparse.Namespace, result: Result) -> Step:
    return _treadle(model, args, result, args.budget, optimizer_state="8bit")


def counter(model: nn.Module, args: argparse.Namespace, result: Result) -> Step:
    return _treadle(model, args, result, None, "counter")


def _treadle(
    model: nn.Module,
    args: argparse.Namespace,
    result: Result,
    budget: str | None,
    rng: str = "eager",
    numerics: str = "default",
    optimizer_state: str = "default",
) -> Step:
    optimizer = make_optimizer(model, fused=False)
    chunks = None
    if args.chunks:
        rows, row_bytes = args.batch * args.length, 2 * args.vocabulary
        chunks = 0 if args.chunks == 1 else -(-rows // args.chunks) * row_bytes
    options = treadle.Options(
        memory=budget,
        rng=rng,
        numerics=numerics,
        optimizer_state=optimizer_state,
        tune=args.tune,
        cache_dir=Path(args.cache),
        skip=tuple(filter(None, args.skip.split(","))),
        chunk_logits=chunks,
        planner=treadle.Planner(offload=args.offload),
    )
    step = treadle.compile(
        make_step(model, optimizer, model), model=model, optimizer=optimizer, options=options
    )
    compiled = step.prepare(_batch(args, 0))
    artifact = compiled.artifact
    launches = sum(1 for each in artifact.steps if hasattr(each, "function"))
    result.notes = {
        "seconds": {name: round(s, 2) for name, s in compiled.seconds.items()},
        "promised_peak_gib": round(artifact.peak_bytes / GIB, 3),
        "arena_gib": round(artifact.arena_bytes / GIB, 3),
        "on_host_gib": round(artifact.host_bytes / GIB, 3),
        "launches": launches,
        "library_calls": len(artifact.steps) - launches,
        "fallbacks": sorted({each.op for each in artifact.fallbacks}),
    }
    return step


def _fused(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def _batch(args: argparse.Namespace, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(args.vocabulary, (args.batch, args.length), generator=generator)
    return ids.to(args.device)


def measure(
    name: str, build: Callable[..., Step], start: nn.Module, args: argparse.Namespace
) -> Result:
    """Losses of ``args.steps`` steps, then times and memory of ``args.timed`` more."""
    result = Result(name)
    model = copy.deepcopy(start).to(args.device).train()
    on_gpu = args.device == "cuda"
    began = time.perf_counter()
    step = build(model, args, result)
    graphs = captured_graphs()
    losses = [step(_batch(args, 0))]
    if build is inductor and captured_graphs() == graphs:
        raise SystemExit("torch.compile captured nothing: its row would be eager's")
    _synchronise(on_gpu)
    result.first_call_seconds = time.perf_counter() - began
    losses += [step(_batch(args, number)) for number in range(1, args.steps)]
    result.losses = [float(loss) for loss in losses]
    _synchronise(on_gpu)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    batches = [_batch(args, args.steps + number) for number in range(4)]
    times: list[float] = []
    for number in range(args.timed):
        _synchronise(on_gpu)
        began = time.perf_counter()
        step(batches[number % 4])
        _synchronise(on_gpu)
        times.append(1000 * (time.perf_counter() - began))
    times.sort()
    result.median_ms = statistics.median(times)
    result.spread_ms = (times[len(times) // 10], times[-1 - len(times) // 10])
    if on_gpu:
        result.peak_gib = torch.cuda.max_memory_allocated() / GIB
        result.reserved_gib = torch.cuda.max_memory_reserved() / GIB
        result.notes["between steps GiB"] = round(torch.cuda.memory_allocated() / GIB, 3)
    if args.profile and on_gpu:
        result.notes["profile"] = _profile(step, batches[0])
    return result


def _profile(step: Step, batch: Tensor) -> list[tuple[str, int, float]]:
    """Device time by kernel over three steps: name, count, milliseconds per step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(3):
            step(batch)
        torch.cuda.synchronize()
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    rows = [(e.key[:90], e.count // 3, e.self_device_time_total / 3000) for e in events]
    return [(name, count, round(ms, 3)) for name, count, ms in rows[:60]]


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _free() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _distance(ours: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def planned(args: argparse.Namespace) -> str:
    """The frontier of the step on the device ``args.plan``, of a model that is not allocated."""
    model = make_model(args).train()
    with torch.device("meta"):
        ids = torch.empty(args.batch, args.length, dtype=torch.int64)
    optimizer = make_optimizer(model, fused=False)
    step = make_step(model, optimizer, model)
    return treadle.plan(step, ids, model=model, optimizer=optimizer, device=args.plan).table()


def show(results: list[Result]) -> str:
    lines = [
        f"{'variant':<18} {'median ms':>10} {'p10..p90 ms':>18} {'peak GiB':>9} "
        f"{'first call s':>12} {'loss vs eager':>14}"
    ]
    for each in results:
        if each.error:
            lines.append(f"{each.name:<18} failed: {each.error.splitlines()[-1][:120]}")
            continue
        spread = f"{each.spread_ms[0]:.2f}..{each.spread_ms[1]:.2f}"
        distance = "" if each.worst_loss is None else f"{each.worst_loss:.2e}"
        lines.append(
            f"{each.name:<18} {each.median_ms:>10.2f} {spread:>18} {each.peak_gib:>9.3f} "
            f"{each.first_call_seconds:>12.1f} {distance:>14}"
        )
        for key, value in each.notes.items():
            if key == "profile":
                rows = [f"      {ms:8.3f} ms {n:5d}x {kernel}" for kernel, n, ms in value[:25]]
                lines += ["    profile (per step):", *rows]
            else:
                lines.append(f"    {key}: {value}")
    return "\n".join(lines)


VARIANTS = {"eager": eager, "compile": inductor, "treadle": ours, "budget": budgeted}
EXTRA = {
    "counter": counter,
    "fp8": float8,
    "8bit": eight_bits,
    "8bit-budget": eight_bits_budgeted,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, default="gpt2")
    for name in ("batch", "length", "layers", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="default: the model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timed", type=int, default=30)
    parser.add_argument("--budget", default="7GiB")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--attention", help="of transformers' names, such as eager")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs in torch.compile")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tune", action="store_true", help="try other schedules")
    parser.add_argument("--skip", default="", help="rewrites that treadle leaves out")
    parser.add_argument("--offload", action="store_true", help="activations on the host, if needed")
    parser.add_argument("--chunks", type=int, help="in how many the logits are computed")
    parser.add_argument("--plan", help="predict the step on this device, and run nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", default="/tmp/treadle-benchmark")
    args = parser.parse_args()
    preset = PRESETS[args.model]
    for name in ("batch", "length", "layers", "vocabulary"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))
    return args


def main() -> int:
    args = parse()
    if args.plan:
        print(planned(args))
        return 0
    torch.set_float32_matmul_precision("high")
    start = make_model(args)
    results: list[Result] = []
    out = Path(os.environ.get("OUT", ".")) / "language_models.json"
    for name in args.only.split(","):
        try:
            result = measure(name, (VARIANTS | EXTRA)[name], start, args)
        except Exception:
            result = Result(name, error=traceback.format_exc())
            print(result.error, file=sys.stderr, flush=True)
        if results and results[0].name == "eager" and result.losses:
            result.worst_loss = _distance(result.losses, results[0].losses)
        results.append(result)
        print(show([result]), flush=True)
        out.write_text(json.dumps(_record(args, results), indent=1))
        _free()
    print("\n" + show(results))
    return int(any(each.error for each in results))


def _record(args: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "torch": torch.__version__,
        "arguments": vars(args),
        "results": [asdict(each) for each in results],
    }


if __name__ == "__main__":
    sys.exit(main())
