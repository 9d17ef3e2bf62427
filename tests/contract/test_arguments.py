"""What may stand among the arguments and results of a step, beside eager."""

import collections
import copy
import dataclasses
import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import treadle
from contract.contract_help import beside_eager
from treadle.capture.python_state.flatten import FlatCalls, flatten_with_paths


@dataclasses.dataclass
class Batch:
    x: Tensor
    times: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor


@dataclasses.dataclass
class Nested:
    inner: dict[str, list[Batch]]

    @property
    def x(self):
        return self.inner["a"][0].x


class Dotted(dict[str, Tensor]):
    @property
    def x(self):
        return self["x"]


class Listed(list[Tensor]):
    @property
    def x(self):
        return self[0]


class Words(collections.UserDict[str, Tensor]):
    """What tokenizers return."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    @property
    def x(self):
        return self["x"]


class Plain:
    def __init__(self, x):
        self.x, self.source = x, object()


OBJECTS = {
    "data class": Batch,
    "frozen": Frozen,
    "slots": Slotted,
    "nested": lambda x: Nested({"a": [Batch(x)]}),
    "dict": lambda x: Dotted(x=x),
    "list": lambda x: Listed([x]),
    "user dict": lambda x: Words({"x": x}, encodings=[object()]),
    "namespace": lambda x: types.SimpleNamespace(x=x, name="a"),
    "object": Plain,
}


def long(number: int) -> Tensor:
    """Its printed form is that of any other: only the middle differs."""
    x = torch.zeros(500, 5)
    x[200:210] = number + 1.0
    return x


@pytest.mark.parametrize("kind", OBJECTS)
def test_tensors_in_objects_are_read_at_every_call(kind):
    def make():
        model = nn.Linear(5, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            loss = model(batch.x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, model, optimizer

    step = beside_eager(make, lambda number: (OBJECTS[kind](long(number)),))
    assert step.recompiles == []


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_are_results_as_well(kind):
    model = nn.Linear(5, 5)
    step = treadle.compile(lambda x: OBJECTS[kind](model(x) * 2), model=model)
    for number in range(2):
        found = step(long(number))
        assert type(found) is type(OBJECTS[kind](torch.zeros(1)))
        assert type(found.x) is Tensor
        torch.testing.assert_close(found.x, model(long(number)) * 2)


def test_an_object_of_the_user_s_is_left_alone():
    model, batch = nn.Linear(5, 5), Batch(long(0), times=2.0)
    x, held = batch.x, dict(vars(batch))
    treadle.compile(lambda b: model(b.x).sum() * b.times, model=model)(batch)
    assert vars(batch) == held
    assert batch.x is x


def test_one_object_may_change_between_calls():
    model = nn.Linear(5, 5)

    def step(batch):
        return model(batch.x).sum() * batch.times

    compiled = treadle.compile(step, model=model)
    batch = Batch(long(0))
    for number, times in ((0, 1.0), (1, 1.0), (2, 3.0)):
        batch.x, batch.times = long(number), times
        torch.testing.assert_close(compiled(batch), step(batch), rtol=1e-5, atol=1e-3)
    assert compiled.recompiles == ["argument batch.times: 1.0 became 3.0"]


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, int, np.int16])
def test_a_number_that_changes_is_named_with_its_values(kind):
    model = nn.Linear(5, 5)
    step = treadle.compile(lambda x, factor: model(x).sum() * factor, model=model)
    for number, value in enumerate((2, 3, 5, 7)):
        step(long(number), kind(value))
    name = "" if kind in (int, float) else f"{kind.__name__} "
    old, new = f"{name}{kind(2).real}", f"{name}{kind(3).real}"
    assert step.recompiles == [f"argument factor: {old} became {new}"]


class Settings:
    def __init__(self):
        self.scale = 1.0


def test_an_object_without_tensors_is_itself_and_what_it_holds():
    model, settings = nn.Linear(5, 5), Settings()

    def step(x, settings):
        return model(x).sum() * settings.scale

    compiled = treadle.compile(step, model=model)
    for scale in (1.0, 2.0, 1.0):
        settings.scale = scale
        torch.testing.assert_close(
            compiled(long(0), settings), step(long(0), settings), rtol=1e-5, atol=1e-3
        )
    assert not compiled.recompiles


def middle(number: int) -> Any:
    array = np.zeros(2000, dtype=np.float32)
    array[1000] = number
    return array


CHANGES = {
    "zeros": (0.0, -0.0, lambda s: math.copysign(1.0, s)),
    "one and true": (1, True, lambda s: 2.0 if s is True else 3.0),
    "one and one": (1, 1.0, lambda s: 2.0 if isinstance(s, int) else 3.0),
    "list and tuple": ([1], (1,), lambda s: 2.0 if isinstance(s, list) else 3.0),
    "none of both": ([], {}, lambda s: 2.0 if isinstance(s, list) else 3.0),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, lambda s: float(next(iter(s.values())))),
    "sets": ({1}, {1, 2}, lambda s: float(len(s))),
    "arrays": (middle(0), middle(1), lambda s: 2.0 if s[1000] else 3.0),
    "arrays' bytes": (middle(0), middle(1), lambda s: float(len(s.tobytes().rstrip(b"\0")))),
    "slices": (slice(0, 2), slice(0, 3), lambda s: float(s.stop)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_that_look_alike_are_not_one(name):
    first, second, use = CHANGES[name]
    model = nn.Linear(5, 5)

    def step(x, value):
        return model(x).sum() * use(value)

    compiled = treadle.compile(step, model=model)
    for value in (first, second, copy.copy(first), copy.copy(second)):
        torch.testing.assert_close(
            compiled(long(0), value), step(long(0), value), rtol=1e-5, atol=1e-3
        )
    assert len(compiled.recompiles) == 1


def test_nan_is_nan():
    model = nn.Linear(5, 5)
    step = treadle.compile(lambda x, s: model(x).sum() * s, model=model)
    for _ in range(3):
        assert step(long(0), float("nan")).isnan()
    assert step.recompiles == []


def test_whether_an_argument_needs_a_gradient_is_part_of_the_key():
    model = nn.Linear(5, 5)

    def step(x):
        loss = model(x).square().sum()
        return torch.autograd.grad(loss, x)[0] if x.requires_grad else x * 0

    compiled = treadle.compile(step, model=model)
    for needs in (False, True, False, True):
        x = torch.randn(4, 5, requires_grad=needs)
        torch.testing.assert_close(compiled(x), step(x).detach())
    assert compiled.recompiles == ["argument x: requires_grad=False became True"]


def test_what_can_be_neither_compared_nor_read_is_refused():
    model = nn.Linear(5, 5)

    with pytest.raises(treadle.CaptureError, match=r"TR-116.*odd: generator"):
        treadle.compile(lambda x, odd: model(x).sum(), model=model)(long(0), (i for i in range(3)))


class Uncopied:
    def __init__(self, x):
        self.x = x

    def __reduce_ex__(self, protocol):
        raise TypeError("no copies")


def test_an_object_with_tensors_that_cannot_be_copied_is_refused():
    model, x = nn.Linear(5, 5), torch.randn(2, 5)
    with pytest.raises(treadle.CaptureError, match=r"TR-116.*Uncopied.*no copies"):
        treadle.compile(lambda batch: model(batch.x), model=model)(Uncopied(x))
    with pytest.raises(treadle.CaptureError, match=r"TR-116.*Uncopied"):
        treadle.compile(lambda x: Uncopied(model(x)), model=model)(x)
    held = Uncopied(x)  # of the step's own: not copied
    step = treadle.compile(lambda x: model(x) + held.x, model=model)
    for _ in range(2):
        held.x = torch.randn(2, 5)
        torch.testing.assert_close(step(x), model(x) + held.x)


FIRST = {
    "times": lambda a, x: a * x,
    "minus": lambda a, x: a - x,
    "over": lambda a, x: a / (2 + x.square()),
    "plus": lambda a, x: a + x,
    "mul": lambda a, x: torch.mul(a, x),
    "sub": lambda a, x: torch.sub(a, x),
    "div": lambda a, x: torch.div(a, 2 + x.square()),
    "add": lambda a, x: torch.add(a, x),
}


@pytest.mark.parametrize("value", [0.3, 1.0, 0, 2])
@pytest.mark.parametrize("name", FIRST)
def test_a_number_before_a_tensor(name, value):
    """As an argument, a constant, and one of a loss, which has no dims."""
    function = FIRST[name]
    model = nn.Linear(5, 5)

    def step(x, given):
        y = function(given, function(value, function(1.0, model(x))))
        loss = function(given, function(1, y.square().mean()))
        loss.backward()
        gradient, model.weight.grad, model.bias.grad = model.weight.grad, None, None
        return y.detach(), loss.detach(), gradient

    x = torch.randn(3, 5)
    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    torch.testing.assert_close(compiled(x, value), step(x, value))


@pytest.mark.parametrize("value", [np.arange(3.0), np.float64(0.5), np.int64(2), np.bool_(True)])
def test_arrays_and_numbers_of_numpy_are_leaves(value):
    """Their structure is known from how many arguments there are: to take each call apart takes
    longer than a small step."""
    calls, x = FlatCalls(("x", "at")), torch.ones(2)
    arguments, paths, structure = calls.of((x, value), {"more": value})
    pairs, spec = flatten_with_paths(((x, value), {"more": value}), ("x", "at"))
    assert paths == tuple(path for path, _ in pairs) == ("x", "at", "more")
    assert structure == (spec, ())
    assert all(a is b for a, (_, b) in zip(arguments.leaves, pairs, strict=True))
    assert calls.of((x, value), {"more": value})[2] is structure
