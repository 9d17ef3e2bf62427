"""What a step asks of tensors beside their values: their attributes, and their class."""

import pytest
import torch
from torch import nn

import treadle

OUTSIDE = torch.ones(3)


def plain(number):
    return torch.full((3,), number + 1.0)


def given(**attributes):
    """``attributes``: by name what to make of the number of the call."""

    def make(number):
        x = plain(number)
        for name, of in attributes.items():
            value = of(number)
            if value is not None:
                setattr(x, name, value)
        return x

    return make


def between(number):
    OUTSIDE.weight = float(number)
    return plain(number)


def kept():
    entries = [0.0]

    def make(number):
        entries[0] = float(number)
        return given(entries=lambda _: entries)(number)

    return make


READS = {
    "number": (lambda x: x * x.tag, given(tag=float), 3),
    "text": (lambda x: x * 2 if x.kind == "a" else x * 3, given(kind=lambda n: "ab"[n % 2]), 1),
    "tensor": (lambda x: x * x.other, given(other=lambda n: torch.full((3,), n + 2.0)), 0),
    "list": (lambda x: x * x.entries[0], kept(), 3),
    "length": (lambda x: x * len(x.names_), given(names_=lambda n: ["a"] * n), 3),
    "asked for": (
        lambda x: x * 3 if hasattr(x, "mask") else x,
        given(mask=lambda n: True if n % 2 else None),
        1,
    ),
    "with a default": (
        lambda x: x * getattr(x, "factor", 1.0),
        given(factor=lambda n: 3.0 if n % 2 else None),
        1,
    ),
    "of one from outside": (lambda x: x * OUTSIDE * OUTSIDE.weight, between, 3),
    "the same": (lambda x: x * x.tag, given(tag=lambda n: 2.5), 0),
    "nobody reads it": (lambda x: x * 2, given(other=float, kind=str), 0),
}


@pytest.mark.parametrize("name", READS)
def test_an_attribute_is_that_of_the_call(name):
    step, make, compiles = READS[name]
    compiled = treadle.compile(step, model=nn.Linear(3, 3), options=treadle.Options(codegen=False))
    for number in (0, 1, 2, 3):
        found = compiled(make(number))
        torch.testing.assert_close(found, step(make(number)))
    assert len(compiled.recompiles) <= compiles
    if not compiles:
        assert compiled.recompiles == []


class Asking(nn.Module):
    """Its forward and what it calls ask classes."""

    def __init__(self):
        super().__init__()
        self.a, self.own = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        found = [each for each in self._parameters.values() if isinstance(each, nn.Parameter)]
        return self.a(x) * found[0] * (2 if type(x) is torch.Tensor else 5)


def doubled(tree):
    """As collating functions and loops over nests are written."""
    if type(tree) is torch.Tensor:
        return tree * 2
    return [doubled(each) for each in tree]


CLASSES = {
    "is": lambda model, x: type(x) is torch.Tensor,
    "equal": lambda model, x: type(x) == torch.Tensor,  # noqa: E721
    "name": lambda model, x: f"{type(x).__name__} {type(model.own).__name__}",
    "among": lambda model, x: {torch.Tensor: "tensor"}[type(x)],
    "made": lambda model, x: type(torch.zeros(3)) is torch.Tensor,
    "result": lambda model, x: type(model(x)) is torch.Tensor,
    "parameter": lambda model, x: (
        isinstance(model.own, nn.Parameter),
        type(model.own) is nn.Parameter,
        type(model.own) is torch.Tensor,
        isinstance(x, nn.Parameter),
        isinstance(model.own * 2, nn.Parameter),
        type(model.own.detach()) is nn.Parameter,
    ),
    "listed": lambda model, x: [
        name for name, each in model.named_parameters() if isinstance(each, nn.Parameter)
    ],
    "subclass": lambda model, x: issubclass(type(model.own), torch.Tensor),
    "nest": lambda model, x: [each.sum().detach() for each in doubled([x, x + 1])],
    "number": lambda model, x: type(x.shape[0]) is int,
}


def trained(ask, compiled):
    torch.manual_seed(0)
    model = Asking()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        found = ask(model, x)
        model(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.own -= 0.1 * model.own.grad
            model.a.weight *= 0.9
        optimizer.zero_grad()
        return found

    if compiled:
        step = treadle.compile(
            step, model=model, optimizer=optimizer, options=treadle.Options(codegen=False)
        )
    found = [step(plain(number)) for number in range(3)]
    assert type(model.own) is nn.Parameter
    return found, list(model.parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_a_tensor_is_of_the_class_that_it_has(name):
    (found, ours), (want, theirs) = (trained(CLASSES[name], compiled) for compiled in (True, False))
    torch.testing.assert_close(ours, theirs)
    if name == "nest":
        torch.testing.assert_close(found, want)
    else:
        assert found == want
