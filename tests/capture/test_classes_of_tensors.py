"""What Python asks of the class of a traced tensor, and of a class of the user's own."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import treadle
from treadle.util.errors import CaptureError


class Weight(nn.Parameter):
    """A parameter with methods and attributes of its own, one of which PyTorch has as well."""

    factor = 3.0

    @property
    def doubled(self):
        return self * 2

    def double(self):
        return self * self.factor

    def clamp(self, low):
        return super().clamp(low) + 1


class Image(Tensor):
    """A tensor whose operations give tensors of its class."""

    def brighter(self):
        return self + 1


class Heard(nn.Parameter):
    """A parameter that hears of what is done to it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.nn.functional.relu else result


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Weight(torch.arange(3.0))
        self.plain = nn.Parameter(torch.ones(3))
        self.heard = Heard(torch.full((3,), 2.0))
        self.register_buffer("image", torch.ones(3).as_subclass(Image))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        return (x * self.own + self.plain * self.heard).as_subclass(Tensor)


def matched(value):
    match value:
        case Weight():
            return "weight"
        case nn.Parameter():
            return "parameter"
        case Image():
            return "image"
        case Tensor():
            return "tensor"


def hooked(model, x):
    seen = []
    y = x * model.own
    y.register_hook(lambda grad: seen.append(grad.__class__))
    y.sum().backward()
    return seen


ASKED = {
    "class of a tensor": lambda model, x: (x.__class__, (x * 2).__class__, model.mean.__class__),
    "class of a parameter": lambda model, x: (model.plain.__class__, model.own.__class__),
    "class of one made": lambda model, x: nn.Parameter(x.detach()).__class__,
    "class of a gradient": hooked,
    "type": lambda model, x: (type(model.own), type(model.plain), type(x), type(model.image)),
    "instance": lambda model, x: [
        isinstance(each, kind)
        for each in (model.own, model.plain, model.heard, model.image, x, x * 2)
        for kind in (Weight, Heard, nn.Parameter, Image, Tensor)
    ],
    "match": lambda model, x: [
        matched(each) for each in (model.own, model.plain, model.image, model.image * 2, x)
    ],
    "attribute": lambda model, x: x * model.own.factor,
    "property": lambda model, x: x * model.own.doubled,
    "method": lambda model, x: x * model.own.double(),
    "super": lambda model, x: x * model.own.clamp(1.0),
    "hears": lambda model, x: x * torch.nn.functional.relu(model.heard),
    "result": lambda model, x: [(x * model.image).__class__, model.image.brighter().sum()],
    "returned": lambda model, x: [x * model.image, model.own * 2],
    "deep copy": lambda model, x: (copy.deepcopy(model.own), copy.deepcopy(model.plain)),
    "copy": lambda model, x: (copy.copy(model.own).__class__, copy.copy(x).__class__),
    "itself": lambda model, x: model.own,
}


def steps(asks):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        found = asks(model, x)
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, found

    return step, treadle.compile(step, model=model, optimizer=optimizer)


def leaves(found):
    if isinstance(found, list | tuple):
        return [leaf for each in found for leaf in leaves(each)]
    return [found]


@pytest.mark.parametrize("name", ASKED)
def test_class_is_that_of_the_users_tensor(name):
    (eager, _), (_, ours) = steps(ASKED[name]), steps(ASKED[name])
    for number in range(3):
        want, got = (step(torch.full((3,), number + 1.0)) for step in (eager, ours))
        for one, other in zip(leaves(want), leaves(got), strict=True):
            assert type(one) is type(other)
            if isinstance(one, Tensor):
                torch.testing.assert_close(one, other)  # kernels round a product and a sum once
            else:
                assert one == other
    assert ours.recompiles == []


def test_attributes_of_the_class_are_read():
    _, ours = steps(ASKED["attribute"])
    x = torch.ones(3)
    assert ours(x)[1].tolist() == [3.0] * 3
    try:
        Weight.factor = 4.0
        assert ours(x)[1].tolist() == [4.0] * 3
    finally:
        Weight.factor = 3.0


def test_batches_have_a_class():
    def step(x):
        named = x.__class__.__name__, isinstance(x, Image)
        return *named, (x + 1).__class__, x + 1, x.as_subclass(Tensor) * 2

    ours = treadle.compile(step, model=nn.Linear(1, 1))
    for kind in (Image, Tensor):
        x = torch.ones(2).as_subclass(kind)
        assert ours(x)[:3] == step(x)[:3]
        assert list(map(type, ours(x)[3:])) == [kind, Tensor]


def test_values_are_not_pickled():
    _, ours = steps(lambda model, x: pickle.dumps(model.own))
    with pytest.raises(CaptureError) as refused:
        ours(torch.ones(3))
    assert refused.value.code == "TR-102"
