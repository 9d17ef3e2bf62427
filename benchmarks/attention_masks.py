"""What the masks of attention are proved to be, model by model.

::

    python benchmarks/attention_masks.py         prints the table; CPU, nothing is trained

Each architecture as it is by default, and decoders once more as they are called in training:
without a cache of keys and values, with the batch's padding, packed, with a sliding window.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

import treadle
from treadle.compiler.cleaning import clean
from treadle.lower.elements import Elements
from treadle.passes.attention.proved_masks import MaskReport, ProveAttentionMasks, reports

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))
from architectures import ALL, SMALL, tokens

LLAMA = SMALL | {"num_key_value_heads": 2}


def gpt2_without_cache():
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokens()


def llama_without_cache():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, use_cache=False)
    ), tokens()


def llama_padded():
    model, batch = llama_without_cache()
    return model, batch | {"attention_mask": torch.ones(2, 13, dtype=torch.int64)}


def llama_packed():
    model, batch = llama_without_cache()
    positions = torch.cat([torch.arange(6), torch.arange(7)])
    return model, batch | {"position_ids": positions.expand(2, -1)}


def mistral_with_a_window():
    config = transformers.MistralConfig(**LLAMA, sliding_window=5)
    return transformers.MistralForCausalLM(config), tokens()


EXTRA = (
    gpt2_without_cache, llama_without_cache, llama_padded, llama_packed, mistral_with_a_window
)  # fmt: skip


def captured_masks(make: Callable[[], tuple]) -> tuple[MaskReport, ...]:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def training(**batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(training, model=model, optimizer=optimizer)
    step.prepare(**batch)
    return reports(clean(step.compiled.captured.step), ProveAttentionMasks(Elements))


def rows(name: str, found: tuple[MaskReport, ...]) -> Iterator[str]:
    """One line for each kind of answer; what is said of a node is said without its name."""
    if not found:
        yield f"| {name} | 0 | | | no call of a fused kernel |"
    counts = Counter(
        (each.mask, each.becomes, each.reason.replace(each.call.split()[0], "it")) for each in found
    )
    for (mask, becomes, reason), count in counts.items():
        yield f"| {name} | {count} | {mask} | {becomes} | {reason} |"


def main() -> None:
    print("| model | calls of attention | mask | becomes | why not more |")
    print("|---|---|---|---|---|")
    for make in (*ALL, *EXTRA):
        for row in rows(make.__name__, captured_masks(make)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
