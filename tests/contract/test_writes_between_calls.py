"""Whoever writes to a weight between two calls, however, the next call reads what is there.

Some of these writes move neither PyTorch's version counter nor an address: nothing could tell a
copy of the weight that it is stale, which is why none outlives a call.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import treadle
from contract.contract_help import training

SHAPE = (6, 4)
NEW = torch.linspace(-1, 1, 24).view(SHAPE)
Write = Callable[[nn.Linear], object]


def under_no_grad(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(NEW)


def by_an_optimizer(layer: nn.Linear, *, fused: bool = False) -> None:
    layer.weight.grad = (layer.weight - NEW).detach()
    torch.optim.SGD([layer.weight], lr=1.0, fused=fused).step()
    layer.weight.grad = None


def by_a_compiled_step(layer: nn.Linear) -> None:
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    new = NEW.clone()
    other = training(lambda: 0.5 * (layer.weight - new).square().sum(), optimizer)
    treadle.compile(other, model=layer, optimizer=optimizer)()


def by_its_storage(layer: nn.Linear) -> None:
    layer.weight.untyped_storage().copy_(NEW.untyped_storage())


def by_a_vector(layer: nn.Linear) -> None:
    vector = torch.cat([NEW.flatten(), layer.bias.detach()])
    nn.utils.vector_to_parameters(vector, layer.parameters())


SEEN: dict[str, Write] = {
    "no_grad": under_no_grad,
    "state_dict": lambda layer: layer.load_state_dict({"weight": NEW, "bias": layer.bias}),
    "optimizer": by_an_optimizer,
    "detach": lambda layer: layer.weight.detach().copy_(NEW),
    "vector": by_a_vector,
    "data is set": lambda layer: setattr(layer.weight, "data", NEW.clone()),
}
UNSEEN: dict[str, Write] = {
    "data": lambda layer: layer.weight.data.copy_(NEW),
    "NumPy": lambda layer: layer.weight.detach().numpy().__setitem__(slice(None), NEW.numpy()),
    "DLPack": lambda layer: torch.from_dlpack(layer.weight.detach()).copy_(NEW),
    "storage": by_its_storage,
    "compiled step": by_a_compiled_step,
}
"""Of those that anybody may do, the ones of which neither counter nor address tells."""
WRITES = {**SEEN, **UNSEEN, "fused optimizer": lambda layer: by_an_optimizer(layer, fused=True)}


def made() -> tuple[nn.Linear, Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(SHAPE[1], SHAPE[0])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float().square().mean()

    return layer, training(loss_of, optimizer), optimizer


@pytest.mark.parametrize("name", WRITES)
def test_the_next_call_reads_what_was_written(name):
    layer, eager, _ = made()
    other, function, optimizer = made()
    step = treadle.compile(function, model=other, optimizer=optimizer)
    x = torch.randn(8, SHAPE[1])
    for _ in range(2):
        torch.testing.assert_close(step(x), eager(x), rtol=1e-2, atol=1e-3)
    before = step(x)
    eager(x)
    for each in (layer, other):
        WRITES[name](each)
        torch.testing.assert_close(each.weight.detach(), NEW, rtol=1e-6, atol=1e-6)
    after = step(x)
    assert abs(float(after - before)) > 0.1, "another weight gives another loss"
    torch.testing.assert_close(after, eager(x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", [*SEEN, *UNSEEN])
def test_which_writes_a_counter_or_an_address_tells_of(name):
    """Where this changes, decision 13 is to be looked at again."""
    layer, _, _ = made()
    before = layer.weight._version, layer.weight.data_ptr()
    WRITES[name](layer)
    assert ((layer.weight._version, layer.weight.data_ptr()) == before) == (name in UNSEEN)
