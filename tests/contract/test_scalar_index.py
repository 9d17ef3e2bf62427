"""Places that an integer tensor says: ring buffers, a row by its number."""

import pytest
import torch
from torch import nn

import treadle
from contract.contract_help import beside_eager, training
from treadle.options import Options

LIBRARY = Options(codegen=False)


class Ring(nn.Module):
    """Entries in a ring; the place is a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body = kind, nn.Linear(3, 3)
        self.register_buffer("entries", torch.zeros(5, 3))
        self.register_buffer("i", torch.tensor(3))

    def forward(self, x):
        h = self.body(x)
        with torch.no_grad():
            if self.kind == "row":
                self.entries[self.i] = h.mean(0)
            elif self.kind == "column":
                self.entries.T[1:, self.i] = h.mean(0)[1:]
            elif self.kind == "number":
                self.entries[self.i, self.i % 3] = 2.5
            elif self.kind == "adds":
                self.entries[self.i] += h.sum(0)
            self.i.add_(1).remainder_(5)
        return h - self.entries[self.i - 5] - self.entries[:, self.i % 3].sum()


@pytest.mark.parametrize("kind", ["row", "column", "number", "adds"])
def test_a_ring_buffer_whose_place_is_a_buffer(kind):
    def make():
        model = Ring(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return training(lambda x: model(x).square().mean(), optimizer), model, optimizer

    beside_eager(make, lambda _: (torch.randn(4, 3),), steps=7, options=LIBRARY)


def test_writing_to_what_is_a_view_in_eager_is_refused():
    model = Ring("none")

    def step(x):
        model.entries[model.i].add_(1.0)
        return model(x)

    with pytest.raises(treadle.CaptureError, match=r"TR-107.*view") as caught:
        treadle.compile(step, model=model, options=LIBRARY)(torch.randn(4, 3))
    assert "add_" in caught.value.where
