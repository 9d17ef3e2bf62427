"""``x.numpy()`` of what a step computes: returned, kept, added up."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treadle


class World:
    """A classifier, and what steps keep of its predictions."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.kept, self.hits, self.count, self.total = [], 0, 0, None
        self.sum, self.floats, self.narrow, self.average, self.chosen = 0.0, 0.0, 0.0, 0.0, 0
        self.sums = {"loss": 0.0}

    def train(self, x, y):
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), logits.detach()


def returned(world, x, y):
    loss, logits = world.train(x, y)
    return loss.cpu().numpy(), logits.cpu().numpy(), loss.numpy().item()


def appended(world, x, y):
    loss, logits = world.train(x, y)
    world.kept.append(logits.cpu().numpy())
    world.kept.extend(logits.softmax(1).numpy())
    return loss


def accuracy(world, x, y):
    loss, logits = world.train(x, y)
    chosen = logits.argmax(1).numpy()
    world.hits += (chosen == (y + 0).numpy()).sum()
    world.count += len(chosen)
    return loss, world.hits / world.count


def arithmetic(world, x, y):
    """A running sum, functions of NumPy's, rows and columns."""
    loss, logits = world.train(x, y)
    logits = logits.numpy()
    world.total = logits if world.total is None else world.total + logits
    rows = np.argmax(logits, axis=1), np.sqrt(np.abs(logits)), logits[0, 1:], logits.mean(0).copy()
    return (
        loss,
        f"{logits.shape}: {logits[0, 0]:.2f}",
        rows,
        -logits * 2,
        logits.tolist(),
        logits.T.astype("float64"),
    )


def running_sums(world, x, y):
    """Of arrays of one number, as figures of an epoch are summed."""
    loss, logits = world.train(x, y)
    value = loss.cpu().numpy()
    world.sum += value
    world.sums["loss"] += value * len(x)
    world.average = 0.9 * world.average + 0.1 * value
    world.floats += float(value)
    world.chosen += int(logits.argmax(1)[0].numpy())
    world.narrow += np.float32(loss.item())
    figures = world.sum, world.sums["loss"], world.average, world.floats, world.narrow
    return loss, figures, world.chosen, np.float64(loss.item()) / 2


def decided(world, x, y):
    """The number of an array is one of the graph's."""
    loss, _ = world.train(x, y)
    if float(loss.numpy()) > 1e6 or loss.numpy().item() > 1e6:
        world.hits += 1
    return loss, logits_over(loss, loss.numpy().item())


def logits_over(loss, number):
    return loss / (number + 1)


def written_later(world, x, y):
    """An array is of the tensor's memory."""
    _, logits = world.train(x, y)
    found = logits.numpy()
    logits.mul_(2)
    return found


def calls(step, compiled):
    world = World()

    def run(x, y):
        return step(world, x, y)

    called = run
    if compiled:
        options = treadle.Options(codegen=False)
        called = treadle.compile(run, model=world.model, optimizer=world.optimizer, options=options)
    found = []
    for at in range(4):
        torch.manual_seed(at)
        result = called(torch.randn(5, 4), torch.randint(3, (5,)))
        found.append([result, list(world.kept), world.hits, world.total])
    return found, getattr(called, "recompiles", [])


def seen(value):
    if isinstance(value, list | tuple):
        return [seen(each) for each in value]
    if isinstance(value, torch.Tensor):
        return "tensor", value.tolist()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.tolist()
    return type(value).__name__, value


def numbers(value):
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in numbers(each)]
    return [value]


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (returned, 0),
        (appended, 0),
        (accuracy, 1),
        (arithmetic, 1),
        (written_later, 0),
        (decided, 0),
        (running_sums, 0),
    ],
)
def test_arrays_are_those_of_eager(step, most):
    (found, recompiles), (want, _) = calls(step, True), calls(step, False)
    ours, theirs = numbers(seen(found)), numbers(seen(want))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        assert mine == (pytest.approx(other, abs=1e-5) if isinstance(other, float) else other)
    assert len(recompiles) <= most, recompiles


@pytest.mark.parametrize(
    "look",
    [
        lambda x, model: model.weight.detach().numpy(),  # of memory that the user writes to
        lambda x, model: 1 if (x * 2).numpy().any() else 2,
        lambda x, model: (x * 2).numpy()[(x * 3).numpy() > 0],
        lambda x, model: np.unique((x * 2).numpy()),
        lambda x, model: torch.from_numpy((x * 2).numpy()),
        lambda x, model: np.concatenate([(x * 2).numpy()]),
    ],
)
def test_what_depends_on_the_numbers_is_refused(look):
    model = nn.Linear(2, 2)
    compiled = treadle.compile(lambda x: look(x, model), model=model)
    with pytest.raises(treadle.CaptureError, match="TR-102"):
        compiled(torch.ones(3))


def test_numpy_of_what_needs_a_gradient_is_an_error_of_pytorch():
    model = nn.Linear(2, 2)
    compiled = treadle.compile(lambda x: model(x).numpy(), model=model)
    with pytest.raises(RuntimeError, match="detach"):
        compiled(torch.ones(2))


def hits(model, hits):
    def step(x, y):
        out = model(x)
        out.square().mean().backward()
        guess, truth = out.detach().argmax(1).cpu().numpy(), y.detach().cpu().numpy()
        hits.append(int((guess == truth).sum()))
        hits.append(float(np.mean(truth[1:] * 2)) + truth.shape[0])
        return x[:2].numpy(), y.numpy()

    return step


def test_arrays_of_arguments_are_in_their_memory():
    models = [nn.Linear(3, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    both = [], []
    eager, function = map(hits, models, both)
    step = treadle.compile(function, model=models[1])
    for _ in range(4):
        x, y = torch.randn(5, 3), torch.randint(0, 4, (5,))
        ours, theirs = step(x, y), eager(x, y)
        x += 1
        y.zero_()
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    assert both[0] == both[1]
    assert step.recompiles == ["weight.grad is set now"]


def test_an_array_of_an_argument_that_the_step_writes_to_is_refused():
    model = nn.Linear(3, 4)

    def step(x):
        total = x.numpy().sum()
        x.mul_(2)
        return model(x), total

    x = torch.ones(5, 3)
    with pytest.raises(treadle.CaptureError, match="TR-102") as caught:
        treadle.compile(step, model=model)(x)
    assert "x.numpy()" in caught.value.where
    assert torch.equal(x, torch.ones(5, 3))
