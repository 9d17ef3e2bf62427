"""What a step reads and changes outside of its function and its models' tensors, beside eager."""

import collections
import copy
import functools
import heapq
import logging
import os
import random
import types
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import treadle
from treadle.capture.python_state.external_state import reachable
from treadle.capture.python_state.reads.guarded_parts import GuardedParts


class Stateful(nn.Module):
    """Keeps an auxiliary loss, a hidden state, the last size, and an average as a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.hidden = None
        self.aux = None
        self.scale = 1.0
        self.unread = 0
        self.kept = {}
        self.first = True
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("before", torch.ones(5))

    def forward(self, x):
        y = self.layer(x) * self.scale
        if self.first:
            y, self.first = y + 0.5, False
        self.rows = len(x)
        self.aux = {"squares": y.square().mean(), "rows": self.rows}
        self.average, self.before = 0.9 * self.average + 0.1 * y.detach().mean(0), self.average
        self.hidden = y.detach().sum(0) + (0 if self.hidden is None else 0.5 * self.hidden)
        self.kept["last"] = self.before + 1
        return y + self.hidden

    def left(self):
        return [
            self.hidden, self.aux["squares"], self.aux["rows"], self.rows, self.first,
            self.kept["last"], self.average, self.before,
        ]  # fmt: skip


def stateful():
    torch.manual_seed(0)
    model = Stateful()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean() + model.aux["squares"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            assert type(a) is type(b)
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
        else:
            assert a == b


def test_what_modules_keep():
    (function, model, optimizer), (eager, twin, _) = stateful(), stateful()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    average = model.average
    for call in range(6):
        x = torch.randn(3 + call % 2, 5)
        model.unread = twin.unread = call
        if call == 4:
            model.scale = twin.scale = 2.0
        same([step(x)], [eager(x)])
        same(model.left(), twin.left())
    same(model.parameters(), twin.parameters())
    assert model.average is average
    assert "left outside: hidden, aux, rows" in step.explain()
    # the second size, which brings a hidden state: nothing else compiles again
    assert [each.split(":")[0] for each in step.recompiles] == ["argument x"]


def test_a_step_may_be_compared_with_eager_where_modules_keep_something():
    function, model, optimizer = stateful()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    step(torch.randn(3, 5))
    step(torch.randn(3, 5))
    before = [copy.deepcopy(each) for each in model.left()]
    assert step.verify([(torch.randn(3, 5),)] * 2) is None
    same(model.left(), before)


def test_buffers_may_change_places():
    model = nn.Module()
    model.register_buffer("a", torch.tensor(1.0))
    model.register_buffer("b", torch.tensor(2.0))

    def step(x):
        model.a, model.b = model.b, model.a
        return x + model.a

    compiled = treadle.compile(step, model=model)
    for expected in (2.0, 1.0, 2.0):
        assert compiled(torch.zeros(3)).tolist() == [expected] * 3
        assert (float(model.a), float(model.b)) == (expected, 3.0 - expected)


total: object = 0
alpha = 1.0


def doubled(x):
    return 2 * x * alpha


def test_variables():
    global total, alpha
    model, last = nn.Linear(3, 3), torch.zeros(3)

    def step(x):
        global total
        nonlocal last
        y = doubled(model(x)) + last
        total = total + y.detach().sum()
        last = y.detach().mean(0)
        return y.detach()

    compiled = treadle.compile(step, model=model)
    found = []
    for function in (compiled, step):
        total, alpha, last = 0, 1.0, torch.zeros(3)
        torch.manual_seed(0)
        for call in range(4):
            alpha = 2.0 if call > 2 else 1.0
            found.append([function(torch.randn(2, 3)), total, last])
    for ours, theirs in zip(found[:4], found[4:], strict=True):
        same(ours, theirs)
    assert [each.split(":")[0] for each in compiled.recompiles] == ["total"]


def squares(y):
    return y.square().sum()


def test_a_function_that_is_defined_again():
    model, settings = nn.Linear(3, 3), types.SimpleNamespace(inner=types.SimpleNamespace(power=2))

    loss_of = torch.sum

    def step(x):
        return loss_of(model(x)) ** settings.inner.power

    compiled = treadle.compile(step, model=model)
    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), step(x))
    loss_of = squares
    torch.testing.assert_close(compiled(x), step(x))
    settings.inner.power = 3
    torch.testing.assert_close(compiled(x), step(x))
    assert compiled.recompiles == [
        "loss_of: a builtin_function_or_method became a function",
        "settings.inner.power: 2 became 3",
    ]


class Trainer:
    def __init__(self):
        self.model, self.epoch, self.weight = nn.Linear(3, 3), 0, 1.0
        self.logs = collections.OrderedDict(loss=0.0)

    def step(self, x):
        loss = self.model(x).square().mean() * self.weight
        loss.backward()
        self.logs["loss"] = loss.detach()
        self.last = {"rows": len(x), "results": [x.sum(), "text"]}
        return loss.detach()


def test_methods_of_objects():
    trainer = Trainer()
    step = treadle.compile(trainer.step, model=trainer.model)
    for call in range(4):
        trainer.epoch = call
        trainer.weight = 3.0 if call == 3 else 1.0
        trainer.model.zero_grad()
        x = torch.randn(2, 3)
        result = step(x)
        same([trainer.logs["loss"], *trainer.last["results"]], [result, x.sum(), "text"])
        same([result], [trainer.model(x).square().mean() * trainer.weight])
    assert not step.recompiles


def test_attributes_are_read_as_they_are():
    """A tensor among the attributes is the one of the call, and what differs decides."""
    model = nn.Linear(3, 3)
    model.shift = torch.ones(3)
    model.shifts = [torch.ones(3), torch.zeros(3)]

    def step(x):
        return model(x) + model.shift * model.shifts[0] + model.shifts[1]

    compiled = treadle.compile(step, model=model)
    x = torch.randn(2, 3)
    for call in range(6):
        if call == 1:
            model.shift = torch.randn(3)
        if call == 2:
            model.shift.add_(1)
            model.shifts = [torch.randn(3), torch.randn(3)]
        if call == 3:
            model.shifts = [model.shift, model.shift]
        if call == 4:
            model.shift = torch.randn(1)
        if call == 5:
            del model.shift
            model.shift = 2.0
        torch.testing.assert_close(compiled(x), step(x))
    assert len(compiled.recompiles) == 3


def test_modes_with_reads_of_their_own_do_not_compile_again():
    model = nn.Linear(3, 3)
    model.gain = 2.0

    def step(x):
        y = model(x)
        return y * model.gain if model.training else y

    compiled = treadle.compile(step, model=model)
    x = torch.randn(2, 3)
    for call in range(6):
        model.train(call % 2 == 0)
        torch.testing.assert_close(compiled(x), step(x))
    assert len(compiled.recompiles) == 1


def test_parameters_that_are_frozen_from_then_on():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def step(x):
        model(x).sum().backward()
        for each in model[0].parameters():
            each.requires_grad_(False)
        model.eval()

    compiled = treadle.compile(step, model=model)
    for _ in range(2):
        compiled(torch.randn(2, 3))
        assert [each.requires_grad for each in model.parameters()] == [False, False, True, True]
        assert not any(each.training for each in model.modules())


class Meter:
    def __init__(self):
        self.values, self.count, self.holder = [], 0, types.SimpleNamespace()

    def add(self, value):
        self.values.append(value)


def refusals():
    model = nn.Linear(3, 3)
    model.calls = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    meter, recent, counts = Meter(), [], {"calls": 0}

    def past(y):
        heapq.heappush(recent, len(y))

    def part(y):
        model.extra = nn.Linear(2, 2)

    def hidden(y):
        new = Meter()
        new.holder.inner = types.SimpleNamespace(value=lambda: y.detach())  # no copy is another's
        model.meter = new

    changes = past, part, hidden
    found = {each.__name__: each for each in changes}
    return model, optimizer, found, (model, meter, recent, counts, scheduler)


REFUSED = {
    "past": r"TR-117.*recent, a list",
    "part": r"TR-117.*extra",
    "hidden": r"TR-117.*meter",
}


def told(world):
    model, meter, recent, counts, scheduler = world
    groups = scheduler.optimizer.param_groups
    return (
        dict(vars(model)), dict(model._modules), dict(vars(meter)),
        list(meter.values), list(recent), dict(counts), scheduler.state_dict(),
        [group["lr"] for group in groups],
    )  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_happen_only_once_is_refused_and_undone(name):
    model, optimizer, changes, world = refusals()
    before, change = told(world), changes[name]

    def step(x):
        y = model(x)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        change(y)
        return y.detach()

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    with pytest.raises(treadle.CaptureError, match=REFUSED[name]):
        compiled(torch.randn(2, 3))
    assert told(world) == before
    step(torch.randn(2, 3))  # as ever


def test_a_step_that_raises_leaves_nothing_behind():
    function, model, optimizer = stateful()

    def step(x):
        function(x)
        raise KeyError("no")

    before, reading = dict(vars(model)), nn.Module.__getattribute__
    with pytest.raises(KeyError):
        treadle.compile(step, model=model, optimizer=optimizer)(torch.randn(3, 5))
    assert vars(model) == before
    assert model.kept == {}
    assert nn.Module.__getattribute__ is reading
    assert "__getattribute__" not in vars(nn.Module)


def test_arguments_get_what_is_put_in_them():
    model = nn.Linear(3, 3)

    def entry(x, batch):
        batch["y"] = model(x)
        return batch["y"]

    def attribute(x, context):
        context.y = model(x)
        return context.y

    compiled = treadle.compile(entry, model=model), treadle.compile(attribute, model=model)
    for _ in range(3):
        batch, context, x = {}, Meter(), torch.randn(2, 3)
        compiled[0](x, batch)
        compiled[1](x, context)
        torch.testing.assert_close(batch["y"], model(x))
        torch.testing.assert_close(context.y, model(x))


def test_dynamic_sizes_and_what_is_read_outside():
    model = nn.Linear(3, 3)
    model.gain = 1.0

    def step(x):
        loss = (model(x) * model.gain).square().mean()
        loss.backward()
        model.rows = len(x)
        return loss.detach()

    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(2, 64))
    compiled = treadle.compile(step, model=model, shapes=shapes)
    for rows, gain in ((4, 1.0), (9, 1.0), (4, 3.0), (17, 3.0), (9, 1.0)):
        model.gain = gain
        model.zero_grad()
        x = torch.randn(rows, 3)
        found = compiled(x)
        torch.testing.assert_close(found, (model(x) * gain).square().mean().detach())
        assert model.rows == rows


temperature, factor, offset = 1.0, 1.0, 1.0


def shifted(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args) + offset

    return call


class Heated(nn.Linear):
    def forward(self, x):
        return self.scaled(super().forward(x))

    def scaled(self, y):
        return y / temperature

    def unused(self):
        return factor


def test_globals_that_forwards_helpers_and_decorated_functions_read():
    global temperature, factor, offset
    model = Heated(3, 3)
    holders = [{"inner": types.SimpleNamespace(power=1)}]

    @shifted
    def step(x):
        return model(x) ** holders[0]["inner"].power

    compiled = treadle.compile(step, model=model)
    x = torch.rand(2, 3)
    for call in range(6):
        temperature = 2.0 if call == 1 else 1.0
        offset = 3.0 if call == 2 else 1.0
        holders[0]["inner"].power = 2 if call == 3 else 1
        factor = float(call)  # read by nothing that runs
        torch.testing.assert_close(compiled(x), step(x))
    assert not compiled.recompiles


def test_objects_that_are_left_are_the_same_objects():
    model, pool = nn.Linear(3, 3), [Meter(), Meter()]
    for each in pool:
        each.tensor = torch.ones(1)
    model.pool, model.current = pool, None

    def step(x, which):
        model.current = model.pool[which]
        return model(x) * model.current.tensor

    compiled = treadle.compile(step, model=model)
    for which in (0, 1, 0):
        x = torch.rand(2, 3)
        torch.testing.assert_close(compiled(x, which), step(x, which))
        assert model.current is pool[which]


def draws():
    ours, theirs = random.Random(3), np.random.default_rng(3)
    held = types.SimpleNamespace(legacy=np.random.RandomState(3))
    return {
        "python": random.random,
        "numpy": np.random.rand,
        "own": lambda: ours.random(),
        "own generator": lambda: theirs.random(),
        "held": lambda: held.legacy.rand(),
    }


@pytest.mark.parametrize("name", draws())
def test_random_numbers_of_python_and_numpy_are_refused_and_put_back(name):
    model, draw, twin = nn.Linear(3, 3), draws()[name], draws()[name]

    def step(x):
        return model(x) * draw()

    random.seed(5), np.random.seed(5)
    with pytest.raises(treadle.CaptureError, match="TR-119"):
        treadle.compile(step, model=model)(torch.randn(2, 3))
    after = draw()
    random.seed(5), np.random.seed(5)
    assert after == twin()


def test_autocast_around_a_step_is_part_of_its_key():
    model = nn.Linear(3, 3)
    compiled = treadle.compile(lambda x: model(x), model=model)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert compiled(torch.randn(2, 3)).dtype is dtype
    assert len(compiled.recompiles) == 1


def test_gradients_of_arguments_are_added_to_those_that_are_there():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    compiled = treadle.compile(step, model=model)
    for there in (None, torch.ones(2, 3), None):
        mine = torch.randn(2, 3).requires_grad_()
        other = mine.detach().clone().requires_grad_()
        mine.grad, other.grad = (None if there is None else there.clone() for _ in range(2))
        compiled(mine), step(other)
        torch.testing.assert_close(mine.grad, other.grad)
    assert not compiled.recompiles


def test_a_buffer_that_is_returned_is_that_object():
    model = nn.BatchNorm1d(3)

    def step(x):
        model(x)
        return model.running_mean

    compiled = treadle.compile(step, model=model)
    for _ in range(3):
        assert compiled(torch.randn(5, 3)) is model.running_mean


@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.set_float32_matmul_precision("medium"),
    ],
    ids=["default dtype", "grad mode", "deterministic", "matmul precision"],
)
def test_a_switch_that_a_step_leaves_set_is_refused_and_put_back(switch):
    model = nn.Linear(3, 3)

    def step(x):
        y = model(x)
        switch()
        return y

    def states():
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )

    before = states()
    with pytest.raises(treadle.CaptureError, match="at another value") as caught:
        treadle.compile(step, model=model)(torch.randn(2, 3))
    assert caught.value.code == "TR-117"
    assert states() == before


def test_a_module_of_the_library_and_a_logger_count_as_far_as_they_are_read():
    model, logger = nn.Linear(3, 3), logging.getLogger("of a step")
    compiled = treadle.compile(lambda x: model(x) * logger.isEnabledFor(logging.INFO), model=model)
    x, root = torch.randn(2, 3), logging.getLogger()
    level = root.level
    try:
        for each in (logging.WARNING, logging.INFO, logging.INFO):
            root.setLevel(each)
            torch.testing.assert_close(compiled(x), model(x) * (each == logging.INFO))
    finally:
        root.setLevel(level)
    assert len(compiled.recompiles) == 1


def test_the_fourth_recompile_warns_once_at_the_call():
    model, fixed = nn.Linear(3, 3), treadle.Options(dynamic=False)
    compiled = treadle.compile(lambda x: model(x), model=model, options=fixed)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in range(1, 9):
            compiled(torch.ones(rows, 3))
    ours = [each for each in seen if "compiled again for the 4th time" in str(each.message)]
    assert [each.filename for each in ours] == [__file__]
    assert len(compiled.recompiles) == 7


OF_THE_LIBRARY = {
    "environment": (
        lambda: float(os.getenv("TREADLE_TEST_READ", "3")),
        lambda: os.environ.__setitem__("TREADLE_TEST_READ", "2"),
        lambda: os.environ.pop("TREADLE_TEST_READ", None),
    ),
    "home": (
        lambda: float(len(os.path.expanduser("~"))),
        lambda: os.environ.__setitem__("HOME", "/a/home/of/another/length"),
        functools.partial(os.environ.__setitem__, "HOME", os.environ.get("HOME", "/root")),
    ),
    "hooks of all modules": (
        lambda: 1.0,
        lambda: nn.modules.module._global_forward_hooks.__setitem__(-1, lambda m, a, y: y * 3),
        lambda: nn.modules.module._global_forward_hooks.pop(-1, None),
    ),
}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_what_functions_of_the_library_read_of_its_variables(name):
    read, change, back = OF_THE_LIBRARY[name]
    model = nn.Linear(2, 2)

    def step(x):
        return model(x) * read()

    compiled, x = treadle.compile(step, model=model), torch.ones(2)
    try:
        for act in (lambda: None, change):
            act()
            assert torch.equal(compiled(x), step(x))
        assert len(compiled.recompiles) == 1
    finally:
        back()
    assert torch.equal(compiled(x), step(x))


def test_loggers_that_a_step_is_the_first_to_ask_for():
    name = f"treadle.test.{id(object())}"

    def step(x):
        log = logging.getLogger(name)
        return x * (2 if log.isEnabledFor(logging.DEBUG) else 3)

    compiled, x = treadle.compile(step, model=nn.Linear(2, 2)), torch.ones(2)
    assert torch.equal(compiled(x), x * 3)
    logging.getLogger(name).setLevel(logging.DEBUG)
    assert torch.equal(compiled(x), x * 2)
    assert logging.getLogger(name).level == logging.DEBUG


TYPES = {
    "of a parameter": lambda v: float(type(v) is int),
    "of an attribute": lambda v: float(type(types.SimpleNamespace(v=v).v) is int),
    "of an entry": lambda v: float(type([v][0]).__name__ == "float"),
    "by another name": lambda v, kind=type: float(len(kind(v).__name__)),
    "made anew": lambda v: float(type(v)(3.5)),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("place", ["argument", "variable"])
def test_the_type_of_a_number_that_changes(name, place):
    held = types.SimpleNamespace(v=1.0)

    def step(x, v):
        v = v if place == "argument" else held.v
        return x * TYPES[name](v) + x * v

    compiled, x = treadle.compile(step, model=nn.Linear(2, 2)), torch.ones(2)
    for value in (1.0, 2.0, 3.0, 4, 5, 1.0):
        held.v = value
        assert torch.equal(compiled(x, value), step(x, value)), value


def test_a_call_that_finds_everything_as_it_was_arranges_nothing(monkeypatch):
    """Buffers come and go with a call, and stand where they stood."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    for _ in range(3):
        compiled(torch.randn(6, 4))
    monkeypatch.setattr(GuardedParts, "__init__", lambda self, nodes: pytest.fail("arranged again"))
    compiled(torch.randn(6, 4))
    assert not compiled.recompiles


def test_arrays_with_ways_of_their_own():
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    held = {"masked": masked, "constant": np.ma.masked, "matrix": np.matrix([[1.0, 2.0]])}

    def step(x):
        return x * float(held["masked"].sum()) + held["matrix"].shape[1] + len(held)

    compiled, x = treadle.compile(step, model=nn.Linear(2, 2)), torch.ones(2)
    for change in (lambda: None, lambda: masked.mask.__setitem__(1, False), lambda: None):
        change()
        assert torch.equal(compiled(x), step(x))
    masked[0] = 5.0
    assert torch.equal(compiled(x), step(x))
    assert len(compiled.recompiles) == 2


def test_a_step_that_fails_leaves_no_switch_set():
    def step(x):
        torch.set_default_dtype(torch.float64)
        raise ValueError("no data here")

    with pytest.raises(ValueError, match="no data here"):
        treadle.compile(step, model=nn.Linear(2, 2))(torch.ones(2))
    assert torch.get_default_dtype() == torch.float32


def test_nothing_is_watched_any_more_where_the_step_cannot_be_looked_at(monkeypatch):
    def fail(value, label):
        raise RuntimeError("cannot be looked at")

    model, x = nn.Linear(2, 2), torch.ones(2)
    step = treadle.compile(lambda x: model(x), model=model)
    with monkeypatch.context() as patch:
        patch.setattr(reachable, "parts_of", fail)
        with pytest.raises(RuntimeError, match="cannot be looked at"):
            step(x)
    assert "__getattribute__" not in vars(logging.Logger)
    assert "__getattribute__" not in vars(nn.Linear)
    assert torch.equal(step(x), model(x))


def test_ordered_dicts_keep_their_order_of_their_own():
    """They hold an order beside that of the dict: entries that come, go or change places."""
    model = nn.Linear(3, 3)
    model.gains = collections.OrderedDict(a=1.0, b=2.0)
    model.logs = collections.OrderedDict(first=None, second=None)

    def step(x):
        y = model(x)
        for gain in model.gains.values():
            y = (y * gain).tanh() + gain
        model.logs["third"] = y.mean().detach()
        return y.detach()

    compiled = treadle.compile(step, model=model)
    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), step(x))
    assert list(model.logs) == ["first", "second", "third"]
    compiled(x)
    before = len(compiled.recompiles)
    model.gains.move_to_end("a")
    torch.testing.assert_close(compiled(x), step(x))
    assert len(compiled.recompiles) == before + 1
    compiled(x)
    assert len(compiled.recompiles) == before + 1
    del model.logs["third"]
    compiled(x)
    assert list(model.logs) == ["first", "second", "third"]
    assert list(model.logs.items())[-1][1] is model.logs["third"]


def test_a_step_that_fails_after_it_adds_hooks_leaves_the_modules_as_they_were():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    kept = [each._forward_hooks for each in model]

    def step(x):
        for each in model:
            each.register_forward_hook(lambda module, args, result: result)
        return {model(x).sum().item(): 1}

    with pytest.raises(treadle.CaptureError, match="TR-102"):
        treadle.compile(step, model=model)(torch.randn(2, 3))
    for hooks in kept:
        assert not hooks
        assert list(hooks.items()) == []
    model(torch.randn(2, 3))


TEACHER = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).requires_grad_(False)


def test_a_frozen_model_beside_the_one_that_learns():
    student = nn.Linear(4, 4)
    other = copy.deepcopy(student)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (student, other))

    def step(x, model, optimizer):
        loss = (model(x) - TEACHER(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        lambda x: step(x, student, optimizer), model=student, optimizer=optimizer
    )
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x), step(x, other, reference))
        with torch.no_grad():
            TEACHER[0].weight.mul_(1.5)  # its numbers are read at each call
    assert not compiled.recompiles
    torch.testing.assert_close(student.weight, other.weight)
