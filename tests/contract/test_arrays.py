"""NumPy arrays as batches: inputs like tensors, and beside eager whatever the step does to them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from treadle import Options

AS_INPUTS = {
    "from_numpy": lambda a: torch.from_numpy(a),
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "asarray": torch.asarray,
    "another dtype": lambda a: torch.as_tensor(a, dtype=torch.float64).float(),
    "a device": lambda a: torch.tensor(a, dtype=torch.float32, device="cpu"),
    "astype": lambda a: torch.from_numpy(a.astype("float64").astype(np.float32)),
    "scaled": lambda a: torch.from_numpy(1 - (a * 2 + 1) / 3),
    "reshaped": lambda a: torch.from_numpy(a.reshape(-1)).view(a.shape),
    "rows": lambda a: torch.from_numpy(a[1:5].copy()),
    "its size": lambda a: torch.from_numpy(a) / (len(a) * a.shape[1] * a.ndim),
    "checked": lambda a: torch.from_numpy(a) if isinstance(a, np.ndarray) else a,
}
LOOKED_AT = {
    "a number": lambda a: torch.from_numpy(a) * float(a[0, 0]),
    "a branch": lambda a: torch.from_numpy(a) * (2 if a.sum() > 0 else 3),
    "a function of NumPy's": lambda a: torch.from_numpy(np.tanh(a)),
    "an index": lambda a: torch.from_numpy(a[a[:, 0].argsort()]),
    "its type": lambda a: torch.from_numpy(a) * (2 if type(a) is np.ndarray else 3),
    "the old constructor": lambda a: torch.Tensor(a),
    "a loop": lambda a: torch.stack([torch.tensor(row) for row in a]),
    "a sum of two": lambda a: torch.from_numpy(a + a.copy()),
}


def make(read):
    torch.manual_seed(0)
    ours = nn.Linear(4, 2)
    theirs = copy.deepcopy(ours)

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            rows = read(x)
            loss = (model(rows) - read(y)[..., :2]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), rows

        return step, optimizer

    step, optimizer = step_of(ours)
    options = Options(codegen=False)
    compiled = treadle.compile(step, model=ours, optimizer=optimizer, options=options)
    return compiled, step_of(theirs)[0]


def batches(count, rows=6):
    random = np.random.default_rng(0)
    for _ in range(count):
        yield tuple(random.standard_normal((rows, 4)).astype("float32") for _ in range(2))


@pytest.mark.parametrize("name", AS_INPUTS)
def test_arrays_are_inputs(name):
    step, eager = make(AS_INPUTS[name])
    for x, y in batches(4):
        torch.testing.assert_close(step(x, y), eager(x, y))
    assert not step.recompiles


@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_is_looked_at_counts(name):
    step, eager = make(LOOKED_AT[name])
    for x, y in batches(2):
        torch.testing.assert_close(step(x, y), eager(x, y))
        torch.testing.assert_close(step(x, y), eager(x, y))


def test_another_kind_of_array_compiles_again():
    step, eager = make(torch.as_tensor)
    for rows in (6, 6, 3, 6):
        for batch in batches(1, rows):
            torch.testing.assert_close(step(*batch), eager(*batch))
    for x, y in batches(1):
        turned = np.asfortranarray(x)
        torch.testing.assert_close(step(turned, y), eager(turned, y))
    assert step.recompiles == [
        "argument x: <f4, shape (6, 4), strides (16, 4) became <f4, (3, 4), (16, 4)",
        "argument x: <f4, shape (6, 4), strides (16, 4) became <f4, (6, 4), (4, 24)",
    ]


def test_a_name_of_ones_own_for_from_numpy():
    """A function in C that asks no mode gets the array itself: right, if compiled at each call."""
    from torch import from_numpy

    step, eager = make(from_numpy)
    for x, y in batches(2):
        torch.testing.assert_close(step(x, y), eager(x, y))


def test_arrays_that_are_written_to():
    """``as_tensor`` shares memory with its array, which may be that of another argument."""
    model = nn.Linear(4, 4)

    def step(x, y):
        a, b = torch.as_tensor(x), torch.as_tensor(y)
        with torch.no_grad():
            a.mul_(2)
        return model(b).detach()

    compiled = treadle.compile(step, model=model, options=Options(codegen=False))
    for x, y in batches(3):
        mine, theirs = x.copy(), x.copy()
        torch.testing.assert_close(compiled(mine, y), step(theirs, y))
        np.testing.assert_array_equal(mine, theirs)
        assert not np.array_equal(mine, x)
    assert not compiled.recompiles
    whole = np.ones((8, 4), "float32")
    for pair in ((x, x), (whole[:5], whole[3:]), (x, torch.from_numpy(x))):
        with pytest.raises(treadle.CaptureError, match="TR-112"):
            compiled(*pair)
    assert np.array_equal(whole, np.ones((8, 4)))


def test_parts_of_one_array_that_are_written_to():
    model = nn.Linear(4, 4)

    def step(x):
        a, b = torch.as_tensor(x[:4]), torch.as_tensor(x[2:])
        a.mul_(2)
        return model(b).detach()

    with pytest.raises(treadle.CaptureError, match="TR-112"):
        treadle.compile(step, model=model)(np.ones((6, 4), "float32"))


def test_arrays_that_are_returned_and_kept():
    model = nn.Linear(4, 4)
    model.last = model.rows = None

    def step(x):
        model.last = x
        model.rows = torch.as_tensor(x)
        return x, model(torch.as_tensor(x)).detach()

    compiled = treadle.compile(step, model=model, options=Options(codegen=False))
    for x, _ in batches(3):
        same, _ = compiled(x)
        assert same is x
        assert model.last is x
        torch.testing.assert_close(model.rows, torch.from_numpy(x))


def test_an_array_of_objects_that_the_step_writes_to_is_as_it_was_after_the_refusal():
    model = nn.Linear(2, 1)
    held = np.array([None, [1, 2], 3], dtype=object)
    before = list(held)

    def step(x):
        held[1] = x
        return model(x).sum()

    with pytest.raises(treadle.TreadleError, match="TR-117"):
        treadle.compile(step, model=model)(torch.randn(2, 2))
    assert all(one is other for one, other in zip(held, before, strict=True))
