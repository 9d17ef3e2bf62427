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


BESIDE = {
    "a number": lambda x, i, j, mask: x[0, i],
    "in front of one": lambda x, i, j, mask: x[i, 0],
    "ellipsis": lambda x, i, j, mask: (x[..., i], x[i, ...], x[..., i, :2]),
    "mask": lambda x, i, j, mask: (x[mask, i].sum(0), x.transpose(0, 1)[i, mask].sum(0)),
    "none": lambda x, i, j, mask: (x[None, i], x[i, None, j]),
    "apart": lambda x, i, j, mask: (x[i, :, j], x[i, 1, j], x[0, :, i]),
    "tensor": lambda x, i, j, mask: x[torch.tensor([0, 2]), i],
    "argmax": lambda x, i, j, mask: sum(x[n, k, 0] for n, k in enumerate(x[:, :, 0].argmax(1))),
}
WRITES = {
    "a number": lambda x, i, j: x.__setitem__((0, i), 1.0),
    "in front of one": lambda x, i, j: x.__setitem__((i, 0), x[1, 1] * 2),
    "ellipsis": lambda x, i, j: x.__setitem__((..., i), 5.0),
    "two": lambda x, i, j: x.__setitem__((0, i, j), 3.0),
    "none": lambda x, i, j: x.__setitem__((None, i), 7.0),
    "row": lambda x, i, j: x.__setitem__((0, slice(None), i), torch.arange(4.0)),
    "added": lambda x, i, j: x.__setitem__((1, i), x[1, i] + 2),
}
PLACES = [(0, 2), (1, -1), (2, 0)]


def places(i, j):
    return torch.tensor(i), torch.tensor(j)


@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_entries(name):
    mask = torch.tensor([True, False, True])
    step = treadle.compile(lambda *x: BESIDE[name](*x), model=nn.Linear(1, 1), options=LIBRARY)
    for i, j in PLACES:
        x = torch.randn(3, 4, 5)
        want = BESIDE[name](x, *places(i, j), mask)
        torch.testing.assert_close(step(x, *places(i, j), mask), want)
    assert step.recompiles == []


@pytest.mark.parametrize("name", WRITES)
def test_writes_beside_other_entries(name):
    def write(x, i, j):
        x = x * 1
        WRITES[name](x, i, j)
        return x

    step = treadle.compile(write, model=nn.Linear(1, 1), options=LIBRARY)
    for i, j in PLACES:
        x = torch.randn(3, 4, 5)
        torch.testing.assert_close(step(x, *places(i, j)), write(x, *places(i, j)))
    assert step.recompiles == []


@pytest.mark.parametrize("kind", ["Normal", "Exponential", "Bernoulli"])
def test_checks_of_distributions_of_chosen_rows(kind):
    made = {
        "Normal": lambda h: torch.distributions.Normal(h, 1.0),
        "Exponential": lambda h: torch.distributions.Exponential(h.exp()),
        "Bernoulli": lambda h: torch.distributions.Bernoulli(logits=h),
    }[kind]

    def make():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])

        def loss(x):
            found = made(model(x)[rows > 0])
            return -found.log_prob(torch.ones(3)).mean()

        return training(loss, optimizer), model, optimizer

    beside_eager(make, lambda _: (torch.randn(5, 3),), steps=3, options=LIBRARY)
