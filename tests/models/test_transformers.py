"""Ordinary models of ordinary users: five steps of each equal eager's."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import treadle

transformers = pytest.importorskip("transformers")

EXPECTED_CALLS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "scaled_dot_product", "bernoulli", "dropout",
    "embedding_dense_backward", "max_pool",
)  # fmt: skip


def gpt2():
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), _tokens(97)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(97)


def bert():
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=56, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), _tokens(97)


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=7
    )
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.randint(7, (3,))}


def _tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (2, 13))
    return {"input_ids": tokens, "labels": tokens}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(**batch: torch.Tensor) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _compare(ours, batch, *, steps=5):
    """Losses of both ways and the two models after ``steps`` steps from the same seed."""
    ours.train()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (ours, theirs)]
    step = treadle.compile(_step(ours, optimizers[0]), model=ours, optimizer=optimizers[0])
    eager = _step(theirs, optimizers[1])
    step.prepare(**batch)
    torch.manual_seed(1)
    mine = [step(**batch).item() for _ in range(steps)]
    torch.manual_seed(1)
    expected = [eager(**batch).item() for _ in range(steps)]
    return step, mine, expected, theirs


@pytest.mark.parametrize("make", [gpt2, llama, bert, resnet], ids=lambda make: make.__name__)
def test_five_steps_equal_eager(make):
    torch.manual_seed(0)
    ours, batch = make()
    step, mine, expected, theirs = _compare(ours, batch)
    assert mine == pytest.approx(expected, rel=1e-4)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # Adam turns a gradient that is zero but for rounding into a step of up to lr, so biases
        # that start at zero are held to the distance they travelled.
        scale = max(b.abs().max().item(), 0.05)
        assert (a - b).abs().max().item() <= 1e-4 * scale, name
    for call in step.compiled.artifact.fallbacks:
        assert any(name in call.op for name in EXPECTED_CALLS), f"{call.op}: {call.reason}"


@pytest.mark.parametrize("make", [gpt2, bert, resnet], ids=lambda make: make.__name__)
def test_float64_losses_are_eagers(make):
    torch.manual_seed(0)
    ours, batch = make()
    ours.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    _, mine, expected, _ = _compare(ours, batch)
    assert mine == pytest.approx(expected, rel=1e-6)
