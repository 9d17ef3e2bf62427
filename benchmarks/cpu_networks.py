"""Training steps of seven networks on one CPU core: eager, ``torch.compile`` and treadle.

::

    OMP_NUM_THREADS=1 python benchmarks/cpu_networks.py [--model gpt2,llama] [--repeats 15]

float32, AdamW (fused in eager and ``torch.compile``), medium sizes. The variants alternate in one
process, each with a model and an optimizer of its own from one seed, and processor time is
counted, so that other work on the machine slows all alike. The ratio is treadle's median over the
better of the other two. ``distance`` is the largest relative difference of a loss from eager's.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from networks import Batch, Network, language_model, lstm, noise_prediction
from torch import Tensor, nn
from torch.nn import functional as F

import treadle

Step = Callable[[Batch], Tensor]


def _gpt2() -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=256, n_head=4, n_layer=4, vocab_size=8000, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return language_model(GPT2LMHeadModel(config), (4, 128))


def _llama() -> Network:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=8000, use_cache=False,
    )  # fmt: skip
    return language_model(LlamaForCausalLM(config), (4, 128))


def _bert() -> Network:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=256, num_attention_heads=4, num_hidden_layers=4, intermediate_size=1024,
        vocab_size=8000,
    )  # fmt: skip
    return language_model(BertForMaskedLM(config), (4, 128))


def _mamba() -> Network:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_heads=8, head_dim=64,
        state_size=32, n_groups=1, chunk_size=32, use_cache=False,
    )  # fmt: skip
    return language_model(Mamba2ForCausalLM(config), (4, 128))


def _resnet18() -> Network:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512],
        embedding_size=64, num_labels=1000,
    )  # fmt: skip
    return (
        ResNetForImageClassification(config),
        lambda: (torch.randn(8, 3, 96, 96), torch.randint(1000, (8,))),
        lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
    )


NETWORKS: dict[str, Callable[[], Network]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "resnet18": _resnet18,
    "unet": partial(noise_prediction, rows=4, width=64, factors=(1, 2)),
    "mamba": _mamba,
    "lstm": partial(lstm, words=8000, width=256, shape=(16, 65)),
}


def step_of(name: str, variant: str) -> tuple[Step, list[Batch]]:
    """A training step from the benchmark's seed, and its batches."""
    torch.manual_seed(0)
    model, batch_of, loss_of = NETWORKS[name]()
    model.train()
    batches = [batch_of() for _ in range(4)]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, fused=None if variant == "treadle" else True
    )
    forward: Any = torch.compile(model) if variant == "compile" else model
    step = partial(_train, forward, model, optimizer, loss_of)
    if variant != "treadle":
        return step, batches

    def whole(batch: Batch) -> Tensor:
        return _train(model, model, optimizer, loss_of, batch)

    return treadle.compile(whole, model=model, optimizer=optimizer), batches


def _train(
    forward: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any, Batch], Tensor],
    batch: Batch,
) -> Tensor:
    loss = loss_of(forward, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(name: str, variants: list[str], repeats: int) -> float | None:
    """Print one line; treadle's time over the better of the others, if there are others."""
    steps: dict[str, tuple[Step, list[Batch]]] = {}
    losses: dict[str, list[float]] = {}
    for variant in variants:
        steps[variant] = step_of(name, variant)
        torch.manual_seed(1)
        step, batches = steps[variant]
        losses[variant] = [step(batch).item() for batch in batches]
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for at in range(repeats):
        for variant, (step, batches) in steps.items():
            began = time.process_time()
            step(batches[at % 4])
            times[variant].append(1e3 * (time.process_time() - began))
    middle = {variant: statistics.median(times[variant]) for variant in variants}
    others = [middle[variant] for variant in variants if variant != "treadle"]
    ratio = middle["treadle"] / min(others) if others and "treadle" in middle else None
    expected = losses[variants[0]]
    distance = max(
        abs(a - b) / abs(b)
        for variant in variants
        for a, b in zip(losses[variant], expected, strict=True)
    )
    columns = "".join(f"{middle[variant]:10.1f}" for variant in variants)
    told = f"{ratio:8.3f}" if ratio else " " * 8
    print(f"{name:10}{columns}{told}{distance:10.1e}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=",".join(NETWORKS))
    parser.add_argument("--only", default="eager,compile,treadle")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    variants = args.only.split(",")
    titles = "".join(f"{variant:>10}" for variant in variants)
    print(f"{'ms':10}{titles}{'ratio':>8}{'distance':>10}")
    ratios = [measure(name, variants, args.repeats) for name in args.model.split(",")]
    known = [ratio for ratio in ratios if ratio]
    if known:
        mean = math.exp(statistics.mean(math.log(ratio) for ratio in known))
        print(f"geometric mean {mean:.3f}, largest {max(known):.3f}")


if __name__ == "__main__":
    main()
