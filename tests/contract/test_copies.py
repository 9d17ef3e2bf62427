"""``copy.copy`` and ``copy.deepcopy`` in a step: of tensors, state dicts, models, and batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treadle


class Deep(nn.Module):
    """Modules in modules, a weight in two places, running statistics and a recurrent layer."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)) for _ in range(2)]
        self.blocks = nn.ModuleList([nn.ModuleDict({"block": each}) for each in blocks])
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for each in self.blocks:
            x = each["block"](x)
        x = self.other(self.one(x).tanh())
        return self.out(self.recurrent(x[:, None])[0][:, 0])


class World:
    """A model, what trains it, and what a step keeps."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Deep()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.kept = None
        self.best = 1e9
        self.history = []

    def train(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def state_dict(world, x, y, number):
    loss = world.train(x, y)
    if number % 2 == 0:
        world.kept = copy.deepcopy(world.model.state_dict())
    return loss


def best(world, x, y, number):
    loss = world.train(x, y)
    if loss.item() < world.best:
        world.best = loss.item()
        world.kept = {"model": copy.deepcopy(world.model.state_dict()), "loss": world.best}
    return loss


def optimizer_state(world, x, y, number):
    loss = world.train(x, y)
    world.kept = copy.deepcopy(world.optimizer.state_dict())["state"]
    return loss


def model(world, x, y, number):
    loss = world.train(x, y)
    if number % 2 == 0:
        world.kept = copy.deepcopy(world.model)
    return loss


def teacher(world, x, y, number):
    """Made at the first call, and drawn after the model at the others."""
    loss = world.train(x, y)
    if world.kept is None:
        world.kept = copy.deepcopy(world.model).requires_grad_(False)
    with torch.no_grad():
        pairs = zip(world.kept.parameters(), world.model.parameters(), strict=True)
        for slow, fast in pairs:
            slow.mul_(0.9).add_(fast, alpha=0.1)
    return loss, world.kept.eval()(x)


class Average:
    """Not a module, and holds one beside a tensor."""

    def __init__(self, model):
        self.module = copy.deepcopy(model)
        self.count = torch.zeros(())


def in_an_object(world, x, y, number):
    loss = world.train(x, y)
    if world.kept is None:
        world.kept = Average(world.model)
    world.kept.count += 1
    return loss, world.kept.module.eval()(x)


def in_a_list(world, x, y, number):
    loss = world.train(x, y)
    world.history.append(copy.deepcopy(world.model))
    return loss


def returned(world, x, y, number):
    return {"loss": world.train(x, y), "model": copy.deepcopy(world.model)}


def before(world, x, y, number):
    old, weight = copy.deepcopy(world.model), copy.deepcopy(world.model.out.weight.data)
    loss = world.train(x, y)
    return loss, old.eval()(x), (world.model.out.weight.data - weight).norm()


def batch(world, x, y, number):
    copied = copy.deepcopy({"x": x, "rows": x[:2]})
    copied["x"].mul_(2)
    return world.train(copied["x"], y), copied


def one_memory(world, x, y, number):
    """Copies of what shares memory share it as well."""
    whole = x * 2
    copied, row = copy.deepcopy([whole, whole[1]])
    row.zero_()
    return copied, whole, world.train(x, y)


def leaf(world, x, y, number):
    made = (x * 2).requires_grad_()
    made.square().sum().backward()
    made.note = 7
    copied = copy.deepcopy(made)
    return copied, copied.grad, copied.note, world.train(x, y)


def shallow(world, x, y, number):
    """Of the same memory, and a leaf."""
    whole = x * 2
    copied = copy.copy(whole)
    copied.add_(1)
    weight = copy.copy(world.model.out.weight)
    kinds = isinstance(weight, nn.Parameter), weight.is_leaf, weight.requires_grad
    return whole, kinds, copy.copy(world.model).eval()(x), world.train(x, y)


def seen(value):
    """What can be compared."""
    match value:
        case nn.Module():
            kinds = [(isinstance(p, nn.Parameter), p.requires_grad) for p in value.parameters()]
            return seen([dict(value.state_dict()), kinds, value.one.weight is value.other.weight])
        case torch.Tensor():
            return value.detach().clone()
        case dict():
            return {key: seen(each) for key, each in value.items()}
        case list() | tuple():
            return [seen(each) for each in value]
        case Average():
            return seen([value.module, value.count])
        case _:
            return value


def calls(step, compiled):
    world = World()

    def run(x, y, number):
        return step(world, x, y, number)

    called = run
    if compiled:
        options = treadle.Options(codegen=False)
        called = treadle.compile(run, model=world.model, optimizer=world.optimizer, options=options)
    found = []
    for number in range(5):
        torch.manual_seed(number)
        result = called(torch.randn(3, 4), torch.randn(3, 1), number)
        kept = world.kept, world.best, world.history
        found.append(seen([result, *kept, world.model]))
        if isinstance(world.kept, dict) and "out.bias" in world.kept:
            world.kept["out.bias"].zero_()  # nobody else's memory
    return found, getattr(called, "recompiles", [])


MOST_RECOMPILES = [
    (state_dict, 1), (best, 1), (optimizer_state, 0), (model, 1), (teacher, 1), (in_an_object, 1),
    (in_a_list, 0), (returned, 0), (before, 0), (batch, 0), (one_memory, 0), (leaf, 0),
    (shallow, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "most"), MOST_RECOMPILES, ids=lambda each: getattr(each, "__name__", "")
)
def test_copies_are_those_of_eager(step, most):
    (found, recompiles), (want, _) = calls(step, True), calls(step, False)
    torch.testing.assert_close(found, want)
    assert len(recompiles) <= most, recompiles


def test_only_leaves_are_copied_deep():
    def step(x):
        return copy.deepcopy(x.requires_grad_() * 2)

    compiled = treadle.compile(step, model=nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="graph leaves") as found:
        compiled(torch.ones(2))
    assert found.value.code == "TR-132"


def test_a_copy_in_two_places_is_refused():
    """Each place would get one of its own."""
    model, kept = nn.Linear(2, 2), {}

    def step(x):
        kept["one"] = copied = copy.deepcopy(model)
        kept["more"] = [copied]
        return x.sum()

    compiled = treadle.compile(step, model=model)
    with pytest.raises(treadle.CaptureError, match=r"TR-117.*second place"):
        compiled(torch.ones(2))
    assert kept == {}
