"""What is found once for equal layers is what each layer alone would give: programs, plans, texts,
sources and numbers of chains of layers that are equal, and of layers that are equal but for one
thing."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.compiler import memory
from treadle.graph.core import values
from treadle.graph.text import canonical, exact
from treadle.schedule.loop_nest import LoopNests

WIDTH = 8


class Layer(nn.Module):
    """``x + scale * dropout(linear(act(norm(x))))``"""

    def __init__(self, *, eps: float = 1e-5, drop: float = 0.25, scale: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop, self.scale = drop, scale
        self.act: Callable[[Tensor], Tensor] = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.act(self.norm(x).reshape(-1, WIDTH)))
        return x + self.scale * F.dropout(y, self.drop, self.training).reshape(x.shape)


class Wide(Layer):
    """In float64 inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).to(x.dtype)


def other_activation() -> Layer:
    layer = Layer()
    layer.act = F.relu
    return layer


def hooked() -> Layer:
    layer = Layer()
    layer.register_forward_hook(lambda module, args, result: result * 1.5)
    return layer


KINDS: dict[str, Callable[[], Layer]] = {
    "equal": Layer,
    "attribute": lambda: Layer(eps=1e-3),
    "constant": lambda: Layer(scale=0.25),
    "one": lambda: Layer(scale=1.0),
    "dropout": lambda: Layer(drop=0.5),
    "no dropout": lambda: Layer(drop=0.0),
    "activation": other_activation,
    "dtype": lambda: Wide().double(),
    "hook": hooked,
    "alias": Layer,  # of the weights of the first
}


def chain(kinds: Sequence[str]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [KINDS[kind]() for kind in kinds]
    for kind, layer in zip(kinds, layers, strict=True):
        if kind == "alias" and layers[0].linear.weight.dtype is torch.float32:
            layer.linear.weight = layers[0].linear.weight
    return nn.Sequential(*layers)


def result_of(kinds: Sequence[str], budget: float | None) -> tuple[bytes, list[Tensor]]:
    """All that a compile stores, with its texts, and the loss and parameters after two calls."""
    model = chain(kinds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with tempfile.TemporaryDirectory() as folder:
        options = treadle.Options(cache_dir=folder, memory=budget)
        step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
        losses = [step(torch.randn(4, 3, WIDTH)) for _ in range(2)]
        return step.compiled.entry, [*losses, *(p.detach() for p in model.parameters())]


class Forgetful(dict[Any, Any]):
    """Knows nothing of what it was told, but until it is asked for it at once."""

    def __contains__(self, key: object) -> bool:
        return False


@contextmanager
def each_alone() -> Iterator[None]:
    """Inside, nothing that was found for a node is used for another."""
    plain = LoopNests.__init__

    def forgetful(nests: LoopNests) -> None:
        plain(nests)
        nests._reducing, nests._placed = Forgetful(), Forgetful()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "known_of", lambda step: None)
        patch.setattr(values, "_key_of", lambda node: None)
        patch.setattr(LoopNests, "__init__", forgetful)
        patch.setattr(exact, "_plain_text", exact._plain_text.__wrapped__)
        patch.setattr(canonical, "_plain_text", canonical._sized_text)
        yield


@settings(deadline=None, max_examples=3, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=4), st.sampled_from([None, 0.3]))
@example(["equal", "equal", "equal", "equal"], 0.3)
@example(["equal", "attribute", "dropout", "equal"], None)
@example(["equal", "constant", "one", "no dropout"], None)
@example(["equal", "dtype", "hook", "alias"], 0.3)
def test_layers_become_what_each_alone_would(kinds, budget):
    stored, numbers = result_of(kinds, budget)
    with each_alone():
        alone, others = result_of(kinds, budget)
    assert stored == alone
    for one, other in zip(numbers, others, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
