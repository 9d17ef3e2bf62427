"""State that a step reads where it is easily overlooked: in PyTorch's and Python's own modules, as
keys, through metaclasses, in classes that are arguments, in threads; and in the operating system.
"""

import builtins
import collections
import contextvars
import dataclasses
import datetime
import functools
import logging
import os
import secrets
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import treadle

OPTIONS = treadle.Options(codegen=False, progress=False)


class Holder:
    def get(self):
        return self.v


class Over:
    v = 5


class One:
    def get(self):
        return 1


class Two(One):
    def get(self):
        return 2


class Meta(type):
    v = None


class Made(metaclass=Meta):
    pass


class Given:
    v = None


@dataclasses.dataclass(frozen=True)
class Key:
    number: int


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fourth recompile
        yield


def compare(step, *changes, make=lambda: (torch.tensor([1.0, -2.0]),)):
    """Ours after each change gives what eager gives, and compiles nothing without one."""
    compiled = treadle.compile(step, model=nn.Module(), options=OPTIONS)
    for _ in range(3):
        assert torch.equal(compiled(*make()), step(*make()))
    assert compiled.recompiles == []
    for change in changes:
        change()
        assert torch.equal(compiled(*make()), step(*make()))


def in_module(monkeypatch, module, value):
    monkeypatch.setattr(module, "hidden_in_test", value, raising=False)
    return value


def test_a_tuple_among_the_builtins(monkeypatch):
    held = in_module(monkeypatch, builtins, (Over(), [2]))
    compare(
        lambda x: x * hidden_in_test[0].v * len(hidden_in_test[1]),  # noqa: F821
        lambda: setattr(held[0], "v", 7),
        lambda: held[1].append(3),
    )


def test_a_bound_method_among_the_builtins(monkeypatch):
    holder = Holder()
    holder.v = Over()
    in_module(monkeypatch, builtins, holder.get)
    compare(lambda x: x * hidden_in_test().v, lambda: setattr(holder.v, "v", 7))  # noqa: F821


def test_a_function_with_defaults_among_the_builtins(monkeypatch):
    held = in_module(monkeypatch, builtins, lambda x, v=[2]: x * v[0])
    compare(
        lambda x: hidden_in_test(x),  # noqa: F821
        lambda: held.__defaults__[0].insert(0, 5),
    )


def test_a_generators_seed_among_the_builtins(monkeypatch):
    held = in_module(monkeypatch, builtins, (1, torch.Generator()))
    compare(
        lambda x: x * (hidden_in_test[1].initial_seed() % 97),  # noqa: F821
        lambda: held[1].manual_seed(5),
        lambda: held[1].manual_seed(6),
    )


def test_an_object_in_a_module_of_torch(monkeypatch):
    holder = in_module(monkeypatch, torch, Holder())
    holder.v = 3
    compare(lambda x: x * torch.hidden_in_test.get(), lambda: setattr(holder, "v", 4))


def test_a_function_in_a_module_of_torch(monkeypatch):
    factor = [2.0]
    in_module(monkeypatch, torch, lambda x, by=factor: x * by[0])
    compare(lambda x: torch.hidden_in_test(x), lambda: factor.insert(0, 3.0))


def told():
    return 1


def test_attributes_of_functions_and_ordered_dicts(monkeypatch):
    """Which have no ``__dict__`` until somebody asks for it."""
    held = collections.OrderedDict(a=1)

    def step(x):
        return x * getattr(told, "factor", 1) + getattr(held, "offset", 0)

    compiled, x = treadle.compile(step, model=nn.Identity(), options=OPTIONS), torch.ones(2)

    def check():
        for _ in range(3):
            assert torch.equal(compiled(x), step(x))

    check()
    known = len(compiled.recompiles)
    assert vars(told) == vars(held) == {}  # made here, and nothing is in them
    check()
    assert len(compiled.recompiles) == known
    told.factor = 2
    check()
    held.offset = 3
    check()
    told.__dict__ = {"factor": 5}
    check()
    held.__dict__ = {"offset": 7}
    check()
    told.__dict__["factor"] = 6
    check()
    del told.factor, held.offset
    check()


def test_keys_that_are_equal_and_not_the_same():
    holder = Holder()
    holder.v = {0: 1}
    compare(
        lambda x: x * len(repr(next(iter(holder.v)))),
        lambda: setattr(holder, "v", {False: 1}),
        lambda: setattr(holder, "v", {0.0: 1}),
        lambda: setattr(holder, "v", {-0.0: 1}),
    )


def test_tensors_as_keys():
    holder = Holder()
    holder.v = {torch.ones(2): 1}
    compare(
        lambda x: x * next(iter(holder.v)),
        lambda: setattr(holder, "v", {torch.full((2,), 2.0): 1}),
        lambda: setattr(holder, "v", {torch.full((2,), 3.0): 1}),
    )


def test_objects_as_keys():
    holder = Holder()
    holder.v = {Key(1): 1}
    compare(
        lambda x: x * next(iter(holder.v)).number * next(iter(holder.v.values())),
        lambda: setattr(holder, "v", {Key(1): 2}),
        lambda: setattr(holder, "v", {Key(1): 1}),
        lambda: setattr(holder, "v", {Key(2): 1}),
    )


def test_objects_with_parts_of_their_own_as_keys():
    def key(number):
        module = nn.Identity()
        module.v = [0, number]
        return module

    holder = Holder()
    holder.v = {key(1): 1}
    compare(
        lambda x: x * next(iter(holder.v)).v[1] * sum(holder.v.values()),
        lambda: setattr(holder, "v", {key(1): 1}),
        lambda: (holder.v.clear(), holder.v.update({key(2): 1})),
        lambda: setattr(holder, "v", {key(2): 3}),
    )


def test_attributes_of_a_metaclass_before_code_that_reflects():
    def other():
        return globals()["OPTIONS"] is not None

    def step(x):
        return x * sum(dict(Made.v)["k"].get() for _ in (0,)) * other()

    Meta.v = collections.ChainMap({"a": 0}, {"k": Two()})
    compare(step, lambda: Made.v.maps[1].update(k=One()), lambda: Made.v.maps[1].update(k=Two()))


def test_a_class_as_an_argument():
    Given.v = {1}
    compare(
        lambda x, kind: x * sum(kind.v),
        lambda: Given.v.add(5),
        lambda: setattr(Given, "v", {3}),
        make=lambda: (torch.ones(2), Given),
    )


class Cached:
    def __init__(self, size):
        self.size = size

    @functools.cached_property
    def v(self):
        return self.size


def test_shapes_stay_shapes():
    cached, layer = Cached(torch.Size((2, 3))), nn.Linear(4, 2)

    def step(x, size):
        left = len(repr(cached.v))
        return x.shape, layer(x).size(), {"given": size}, x.reshape(size) * left

    compiled = treadle.compile(step, model=layer, options=OPTIONS)
    for rows in (3, 5, 3):
        given = torch.ones(rows, 4), torch.Size((4, rows))
        assert repr(compiled(*given)) == repr(step(*given))
    assert repr(cached.v) == "torch.Size([2, 3])"


@pytest.mark.parametrize("shapes", [None, treadle.dynamic({"x": ("rows", None)}, rows=(1, 16))])
def test_a_step_of_sizes_alone(shapes):
    def step(x):
        return x.shape, len(x)

    compiled = treadle.compile(step, model=nn.Linear(4, 2), options=OPTIONS, shapes=shapes)
    for rows in (3, 5):
        assert repr(compiled(torch.ones(rows, 4))) == repr(step(torch.ones(rows, 4)))


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


BEFORE = torch.ones(2)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.tanh(),
        lambda x: BEFORE * 2,
        lambda x: torch.randn(2),
        lambda x: x.add_(1),
        lambda x: BEFORE.mul_(2),
    ],
    ids=["traced", "outside", "random", "in place", "outside in place"],
)
def test_operations_in_a_thread_of_the_step_are_refused(compute):
    compiled = treadle.compile(
        lambda x: x * in_thread(lambda: compute(x)), model=nn.Module(), options=OPTIONS
    )
    with pytest.raises(treadle.TreadleError, match="another thread") as found:
        compiled(torch.ones(2))
    assert found.value.code == "TR-122"
    assert __file__ in found.value.where


def test_traced_tensors_in_a_pool_from_before_the_step_are_refused():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        compiled = treadle.compile(
            lambda x: x * pool.submit(torch.tanh, x).result(), model=nn.Module(), options=OPTIONS
        )
        with pytest.raises(treadle.TreadleError, match="TR-122"):
            compiled(torch.ones(2))


def test_what_a_step_misses_of_a_failed_thread_is_not_the_error():
    def step(x):
        found = []
        thread = threading.Thread(target=lambda: found.extend([x + 1] * 0))
        thread.start()
        thread.join()
        return x * found[0]

    compiled = treadle.compile(step, model=nn.Module(), options=OPTIONS)
    with pytest.raises(treadle.TreadleError, match="TR-122"):
        compiled(torch.ones(2))


def test_python_values_may_come_from_a_thread():
    holder = Holder()
    holder.v = 2
    compare(
        lambda x: x * in_thread(lambda: holder.get()),
        lambda: setattr(holder, "v", 3),
    )


def test_threads_that_live_beside_the_step_compile_nothing():
    step = treadle.compile(lambda x: x * in_thread(lambda: 2), model=nn.Module(), options=OPTIONS)
    end, others = threading.Event(), []
    for _ in range(4):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
        others.append(threading.Thread(target=end.wait))
        others[-1].start()
    end.set()
    for each in others:
        each.join()
    assert step.recompiles == []


def test_threads_of_others_may_compute_while_a_step_is_captured():
    stop, done = threading.Event(), []

    def work():
        while not stop.is_set():
            done.append(torch.ones(3).sum())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        compare(lambda x: x * 2)
    finally:
        stop.set()
        thread.join()
    assert done


def asking(call):
    """A step that multiplies by what ``call`` answers."""
    return lambda x: x * float(call())


def written(path):
    with path.open("a") as file:
        return file.write("1")


QUESTIONS = {
    "time.time": lambda path: time.time(),
    "time.perf_counter": lambda path: time.perf_counter(),
    "datetime.now": lambda path: datetime.datetime.now().timestamp(),
    "date.today": lambda path: datetime.date.today().day,
    "os.urandom": lambda path: secrets.token_bytes(1)[0],
    "io.open": lambda path: path.read_text(),
    "os.stat": lambda path: os.path.getsize(path),
    "os.listdir": lambda path: len(os.listdir(path.parent)),
    "os.mkdir": lambda path: os.mkdir(path.parent / "new") or 1,
    "posixsubprocess.fork_exec": lambda path: subprocess.run(["true"], check=True).returncode,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_to_the_operating_system_are_refused(name, tmp_path):
    path = tmp_path / "number"
    path.write_text("2.0")
    compiled = treadle.compile(
        asking(lambda: QUESTIONS[name](path)), model=nn.Module(), options=OPTIONS
    )
    with pytest.raises(treadle.TreadleError, match=name) as found:
        compiled(torch.ones(2))
    assert found.value.code == "TR-123"
    assert __file__ in found.value.where


def test_a_file_that_only_ends_like_python_s_own_is_the_step_s(tmp_path):
    """Python's ``inspect.py`` may ask, to show a line; ``my_inspect.py`` is the user's."""
    space = {"time": time}
    code = compile("def now():\n    return time.time()", str(tmp_path / "my_inspect.py"), "exec")
    exec(code, space)
    compiled = treadle.compile(asking(space["now"]), model=nn.Module(), options=OPTIONS)
    with pytest.raises(treadle.TreadleError, match="TR-123"):
        compiled(torch.ones(2))


def test_writing_a_file_is_refused(tmp_path):
    path = tmp_path / "log"
    compiled = treadle.compile(asking(lambda: written(path)), model=nn.Module(), options=OPTIONS)
    with pytest.raises(treadle.TreadleError, match="TR-123"):
        compiled(torch.ones(2))


def test_what_asks_the_operating_system_nothing_is_captured(tmp_path, capsys):
    logger = logging.getLogger("quiet")
    logger.addHandler(logging.FileHandler(tmp_path / "log"))

    def step(x):
        print("a line")
        logger.warning("logged %s", os.fspath(tmp_path / "a" / ".." / "b"))
        warnings.warn("heard", stacklevel=1)
        time.sleep(0)
        return x * len(os.path.join("a", "b")) * len(os.getcwd())

    compare(step)
    assert "a line" in capsys.readouterr().out


def test_a_tensor_that_is_returned_twice_is_one():
    def step(x):
        y = x * 2
        return [y, y, {"a": y, "x": x, "again": x}]

    compiled = treadle.compile(step, model=nn.Module(), options=OPTIONS)
    x = torch.ones(2)
    for _ in range(3):
        one, two, rest = compiled(x)
        assert one is two is rest["a"]
        assert rest["x"] is rest["again"] is x
        assert torch.equal(one, torch.full((2,), 2.0))


def test_a_refused_step_leaves_a_context_variable_as_it_was():
    variable = contextvars.ContextVar("variable", default=0)

    def step(x):
        variable.set(variable.get() + 1)
        return x * 2

    compiled = treadle.compile(step, model=nn.Module(), options=OPTIONS)
    with pytest.raises(treadle.TreadleError, match="TR-117"):
        compiled(torch.ones(2))
    assert variable.get() == 0


def test_the_line_of_a_seed_is_the_callers():
    def step(x):
        y = x * 2
        torch.manual_seed(7)
        return y

    compiled = treadle.compile(step, model=nn.Module(), options=OPTIONS)
    with pytest.raises(treadle.TreadleError, match="TR-120") as found:
        compiled(torch.ones(2))
    assert "contextlib" not in found.value.where


CHANGES = {
    "class": lambda o, k: setattr(o, "__class__", (nn.ReLU, nn.Tanh)[k]),
    "attribute": lambda o, k: setattr(o, "gain", 1.0 + k),
    "space": lambda o, k: setattr(o, "__dict__", {**vars(o), "gain": 1.0 + k}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_taken_back_and_done_again(name):
    """What one variant saw while another one ran is not what it was made for."""
    model = nn.Sequential(nn.ReLU())
    model[0].gain = 1.0

    def step(x):
        return model(-x) * model[0].gain

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.randn(5)
    for k in (0, 1, 0, 1, 0, 0, 1, 1, 0, 1):
        CHANGES[name](model[0], k)
        torch.testing.assert_close(compiled(x), step(x))


class Scale:
    __slots__ = ("factor",)


class OtherScale:
    __slots__ = ("factor",)


def test_an_object_with_slots_that_gets_another_class():
    held = Scale()
    held.factor = 2.0
    model = nn.Linear(2, 2)

    def step(x):
        return x * held.factor

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.ones(2)
    assert torch.equal(compiled(x), step(x))
    held.__class__ = OtherScale
    held.factor = 3.0
    assert torch.equal(compiled(x), step(x))
    assert "a Scale became an OtherScale" in compiled.recompiles[0]


class Lazy:
    """Its value is made at the first question, and kept."""

    def __init__(self, value):
        self.made = value

    @functools.cached_property
    def value(self):
        return self.made


def test_a_cached_value_of_another_type_of_tensor():
    held = Lazy({"k": torch.ones(2)})

    def step(x):
        return x * float(held.value["k"].requires_grad) + held.value["k"].numel()

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=treadle.Options(codegen=False))
    x = torch.ones(2)
    assert torch.equal(compiled(x), step(x))
    for other in ({"k": torch.ones(1, dtype=torch.float64)}, {}, torch.ones(3), 5):
        held.made = other
        vars(held).pop("value", None)
        try:
            expected = step(x)
        except (TypeError, KeyError, IndexError) as error:
            vars(held).pop("value", None)
            with pytest.raises(type(error)):
                compiled(x)
        else:
            vars(held).pop("value", None)
            assert torch.equal(compiled(x), expected)


def test_a_circle_that_a_step_leaves_is_refused():
    """And an error that is as deep as Python's stack is told like any other."""
    circle = [torch.ones(2)]
    circle.append(circle)
    held = Lazy(circle)

    def step(x):
        return x * held.value[1][0]

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=treadle.Options(codegen=False))
    with pytest.raises(treadle.TreadleError) as refused:
        compiled(torch.ones(2))
    assert refused.value.code == "TR-116"

    def deep(x):
        return deep(x) + 1

    compiled = treadle.compile(deep, model=nn.Linear(1, 1), options=treadle.Options(codegen=False))
    with pytest.raises(RecursionError):
        compiled(torch.ones(2))
