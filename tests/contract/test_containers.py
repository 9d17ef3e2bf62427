"""Containers among the arguments: what they hold beside their entries counts as well."""

import collections
import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import treadle
from contract.worlds import OPTIONS


class Settings:
    """A part of a container that is no tensor."""

    def __init__(self, scale: int) -> None:
        self.scale = scale


@dataclasses.dataclass
class Batch:
    x: Tensor


@dataclasses.dataclass
class Posted:
    x: Tensor

    def __post_init__(self) -> None:
        self.extra = 1


class Entries(dict[str, Any]): ...


class Listed(list[Any]): ...


class Words(collections.UserDict[str, Any]): ...


class Pair(collections.namedtuple("Pair", "x y")): ...


class Object:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slots:
    __slots__ = ("__dict__", "extra", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Registered:
    def __init__(self, x: Tensor) -> None:
        self.x = x


pytree.register_pytree_node(
    Registered,
    lambda each: ([each.x], vars(each).get("extra")),
    lambda values, extra: _registered(values[0], extra),
)


def _registered(x: Tensor, extra: Any) -> Registered:
    made = Registered(x)
    if extra is not None:
        made.extra = extra
    return made


CONTAINERS: dict[str, Any] = {
    "data class": Batch,
    "data class that computes": Posted,
    "dict": lambda x: Entries(x=x),
    "list": lambda x: Listed([x]),
    "UserDict": lambda x: Words(x=x),
    "named tuple": lambda x: Pair(x, 1),
    "OrderedDict": lambda x: collections.OrderedDict(x=x),
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "object": Object,
    "slots": Slots,
    "registered class": Registered,
}


def beside_eager(step, batches):
    """Every call with a batch of its own, as eager has it; how often it was compiled again."""
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for batch in batches:
        torch.testing.assert_close(compiled(batch), step(batch))
    return len(compiled.recompiles)


def made(kind, **attributes):
    batch = CONTAINERS[kind](torch.ones(2))
    for name, value in attributes.items():
        setattr(batch, name, value)
    return batch


@pytest.mark.parametrize("kind", CONTAINERS)
def test_attributes_beside_the_entries_are_looked_at(kind):
    def step(batch):
        return torch.ones(2) * getattr(batch, "extra", 0)

    batches = [made(kind), made(kind, extra=3), made(kind, extra=4), made(kind, extra=3)]
    assert beside_eager(step, batches) == 2


@pytest.mark.parametrize("kind", sorted(CONTAINERS.keys() - {"registered class"}))
def test_objects_beside_the_entries_are_followed(kind):
    """(Of a registered class there is what it says when it is taken apart.)"""

    def step(batch):
        return torch.ones(2) * batch.settings.scale

    def batches():
        yield made(kind, settings=Settings(1))
        batch = made(kind, settings=Settings(1))
        for scale in (1, 2, 1, 3):
            batch.settings.scale = scale
            yield batch
        yield made(kind, settings=Settings(3))

    assert beside_eager(step, batches()) <= 2


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_no_code_mentions_may_differ(kind):
    def step(batch):
        return torch.ones(2) * getattr(batch, "extra", 0)

    batches = [made(kind, extra=1, number_of_batch=nth) for nth in range(3)]
    opened = kind in ("namespace", "registered class", "object")  # its numbers are leaves
    assert beside_eager(step, batches) <= opened


@pytest.mark.parametrize("kind", ["data class", "dict", "list", "object"])
def test_all_attributes_at_once(kind):
    def step(batch):
        return torch.ones(2) * len(vars(batch))

    batch = made(kind)
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for name in ("one", "two"):
        torch.testing.assert_close(compiled(batch), step(batch))
        setattr(batch, name, 1)
    torch.testing.assert_close(compiled(batch), step(batch))


def test_attributes_of_its_class():
    class Scaled(Entries):
        scale = 2

    def step(batch):
        return batch["x"] * batch.scale

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for scale in (2, 3, 2):
        Scaled.scale = scale
        batch = Scaled(x=torch.ones(2))
        torch.testing.assert_close(compiled(batch), step(batch))


def test_a_container_within_another_and_one_given_twice():
    def step(first, second):
        return first["a"][0].x * getattr(first["a"][0], "extra", 0) + getattr(second, "extra", 0)

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    one, other = made("data class", extra=1), made("data class", extra=1)
    for a, b in ((one, one), (one, other), (other, one)):
        torch.testing.assert_close(compiled({"a": [a]}, b), step({"a": [a]}, b))
    other.extra = 5
    for a, b in ((one, one), (one, other), (other, one)):
        torch.testing.assert_close(compiled({"a": [a]}, b), step({"a": [a]}, b))


GLOBAL = made("data class")


def test_one_that_is_a_global_as_well():
    def step(batch):
        return batch.x * len(vars(batch))

    assert GLOBAL is not None
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    torch.testing.assert_close(compiled(GLOBAL), step(GLOBAL))
    GLOBAL.extra = 1
    torch.testing.assert_close(compiled(GLOBAL), step(GLOBAL))


class Pieces:
    """Containers of every kind, made alike for eager and for us."""

    def __init__(self, nth: int) -> None:
        x = torch.arange(2.0) + nth
        self.entries = {"x": x, "y": 2 * x, "n": nth}
        self.named = Entries(x=x, n=nth)
        self.words = Words(x=x, n=nth)
        self.listed = [x, 2 * x, nth]
        self.data = Batch(x)
        self.space = types.SimpleNamespace(x=x, n=nth)
        self.object = Object(x)
        self.nested = {"inner": {"x": x}, "batch": [Batch(x)]}


CHANGES: dict[str, Any] = {
    "a new entry": lambda each: each.entries.update(new=5),
    "a new tensor": lambda each: each.entries.update(new=each.entries["x"] * 3),
    "one taken out": lambda each: each.entries.pop("n"),
    "a tensor taken out": lambda each: each.entries.pop("x") * 2,
    "all taken out": lambda each: each.entries.clear(),
    "another number": lambda each: each.entries.update(n=7),
    "a number that is computed": lambda each: each.entries.update(n=each.entries["n"] + 1),
    "two that change places": lambda each: each.entries.update(
        x=each.entries["y"], y=each.entries["x"]
    ),
    "an entry of a subclass": lambda each: each.named.update(new=each.named["x"] + 1),
    "an attribute of a subclass": lambda each: setattr(each.named, "seen", True),
    "an entry of a UserDict": lambda each: each.words.update(new=each.words["x"] + 1),
    "one taken out of a UserDict": lambda each: each.words.pop("n"),
    "an entry of a list": lambda each: each.listed.__setitem__(2, each.listed[0] + 1),
    "a list turned round": lambda each: each.listed.reverse(),
    "a field": lambda each: setattr(each.data, "x", each.data.x * 2),
    "an attribute of a data class": lambda each: setattr(each.data, "seen", 1),
    "a name of a namespace": lambda each: setattr(each.space, "new", each.space.x),
    "a name taken away": lambda each: delattr(each.space, "n"),
    "an attribute of an object": lambda each: setattr(each.object, "seen", each.object.x + 1),
    "deep inside": lambda each: each.nested["inner"].update(y=each.nested["inner"]["x"] + 1),
    "an object deep inside": lambda each: setattr(each.nested["batch"][0], "seen", 1),
    "a container of its own": lambda each: each.entries.update(all=[each.nested, each.data]),
}


def seen(value):
    """All that a container holds, in words and tensors."""
    if isinstance(value, list | tuple):
        return [seen(each) for each in value]
    if isinstance(value, Batch | Object | types.SimpleNamespace | Pieces):
        return seen(dict(vars(value)))
    if isinstance(value, dict | collections.UserDict):
        found = {key: seen(each) for key, each in value.items()}
        if type(value) is not dict:
            found["also"] = {k: seen(v) for k, v in vars(value).items() if k != "data"}
        return found
    return value


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_step_does_to_its_arguments_happens_at_every_call(name):
    change = CHANGES[name]

    def step(entries, named, words, listed, data, space, object, nested):
        given = types.SimpleNamespace(**locals())
        del given.__dict__["change"]
        made = change(given)
        return made if isinstance(made, Tensor) else torch.ones(1)

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for nth in range(4):
        ours, theirs = Pieces(nth), Pieces(nth)
        torch.testing.assert_close(compiled(**vars(ours)), step(**vars(theirs)))
        torch.testing.assert_close(seen(ours), seen(theirs))


def test_labels_are_popped_from_a_batch():
    """As many training steps do; the same batch again is eager's error."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        labels = batch.pop("labels")
        loss = (model(**batch) - labels).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=OPTIONS)
    losses: list[float] = []
    for _ in range(3):
        batch = {"input": torch.ones(4, 2), "labels": torch.ones(4, 1)}
        losses.append(compiled(batch).item())
        assert list(batch) == ["input"]
    assert losses[2] < losses[1] < losses[0]
    assert not compiled.recompiles
    with pytest.raises(KeyError, match="labels"):
        compiled(batch)
    again = {"input": torch.ones(4, 2), "labels": torch.ones(4, 1)}
    assert compiled.verify([(again,)]) is None
    assert list(again) == ["input", "labels"]


@pytest.mark.parametrize("kind", sorted(CONTAINERS.keys() - {"registered class"}))
def test_a_container_that_is_returned_or_left_is_that_one(kind):
    kept = Settings(1)

    def step(batch, plain):
        kept.batch = batch
        return batch, [plain, batch], torch.ones(1)

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for nth in range(3):
        batch, plain = made(kind, extra=nth), {"x": torch.ones(1)}
        result = compiled(batch, plain)
        assert result[0] is batch
        assert result[1][0] is plain
        assert result[1][1] is batch
        assert kept.batch is batch


def test_a_list_that_grows_is_refused():
    def step(given):
        given.append(given[0] * 2)
        return given[0]

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    given = [torch.ones(2)]
    with pytest.raises(treadle.TreadleError, match="an argument") as refused:
        compiled(given)
    assert refused.value.code == "TR-117"
    assert len(given) == 1


class Keyed:
    """A key that looks elsewhere."""

    other = Settings(1)

    @staticmethod
    def get() -> int:
        return 2


class Equal:
    """A key that equals others, and is told apart by what it holds."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1


def test_what_objects_hold_that_are_keys(monkeypatch):
    """In a dict, in a key of two, and deep within: all that can be got from them counts."""
    keys: list[Any] = [Keyed(), (Keyed(), 0), frozenset({Keyed()})]

    def get(key):
        return key.get() * key.other.scale * getattr(key, "own", 1)

    def step(given, x):
        key, pair, several = given["deep"][0]
        return x * get(key) * get(pair[0]) * get(next(iter(several)))

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    given, x = {"deep": [dict.fromkeys(keys, 1)]}, torch.ones(2)
    changes = (
        lambda: monkeypatch.setattr(Keyed, "get", staticmethod(lambda: 6)),
        lambda: setattr(Keyed.other, "scale", 3),
        lambda: setattr(keys[0], "own", 5),
        lambda: setattr(keys[1][0], "own", 7),
        lambda: setattr(next(iter(keys[2])), "own", 11),
    )
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            torch.testing.assert_close(compiled(given, x), step(given, x))
    monkeypatch.setattr(Keyed.other, "scale", 1)


def test_keys_that_are_equal_and_not_the_same():
    def step(given, x):
        (key,) = given
        return x * (key.scale if isinstance(key, Equal) else len(repr(key)))

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    x = torch.ones(2)
    for key in (Equal(2), Equal(3), Equal(2), 0, False, 0.0, -0.0, (0,), (False,)):
        for inside in ([], 1):
            given = {key: inside}
            torch.testing.assert_close(compiled(given, x), step(given, x))
    known = len(compiled.recompiles)
    compiled({Equal(2): 1}, x)
    assert len(compiled.recompiles) == known


@pytest.mark.parametrize("key", [lambda m: m.bias, lambda m: (1, m.bias)])
@pytest.mark.parametrize("clears", [False, True])
def test_a_tensor_that_becomes_a_key_is_the_users(key, clears):
    """And not the traced one."""
    model, kept = nn.Linear(2, 2), {"a": 1}

    def step(x):
        if clears:
            kept.clear()
        kept[key(model)] = x.sum()
        return model(x).sum()

    compiled = treadle.compile(step, model=model)
    for _ in range(3):
        x = torch.randn(1, 2)
        compiled(x)
        *others, (last, value) = kept.items()
        assert others == ([] if clears else [("a", 1)])
        assert last is model.bias or (type(last) is tuple and last[1] is model.bias)
        torch.testing.assert_close(value, x.sum())
    assert not compiled.recompiles


def test_a_dict_of_the_arguments_that_loses_entries_between_calls():
    model = nn.Linear(2, 2)

    def step(x, given):
        return model(x) * float(bool(given)) * len(given)

    compiled = treadle.compile(step, model=model)
    given, x = collections.OrderedDict(z=torch.ones(1), a=2.0), torch.ones(1, 2)
    torch.testing.assert_close(compiled(x, given), step(x, given))
    given.pop("z")
    torch.testing.assert_close(compiled(x, given), step(x, given))
    given.clear()
    torch.testing.assert_close(compiled(x, given), step(x, given))
