"""Lists, dicts, sets and deques outside of a step that it puts something in or takes something
from, beside eager: done again at every call, and compiled again only for what was read of them."""

import collections
import copy
import types

import pytest
import torch
from torch import nn

import treadle
from treadle.capture.python_state.containers.container_recorders import (
    RECORDED,
    OperationLog,
    as_plain,
)


def plain(value):
    """Nested containers as lists and dicts, which compare with tolerances."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, set):
        return dict.fromkeys(sorted(value), 0)
    if isinstance(value, list | tuple | collections.deque):
        return [plain(each) for each in value]
    return value


def scalar(model, x):
    return model(x).square().mean().detach()


def appends(model):
    history = []

    def step(x):
        history.append(scalar(model, x))
        history.extend([x.sum(), len(x)])

    return step, history


def adds_in_place(model):
    model.history, pairs = [], []

    def step(x):
        model.history += [scalar(model, x)]
        pairs.append((scalar(model, x), {"rows": len(x), "sum": x.sum()}))

    return step, [model.history, pairs]


def entries(model):
    cache, logs, holder = {}, {"loss": 0.0}, types.SimpleNamespace(outs={})

    def step(x):
        cache["out"] = model(x).detach()
        logs["loss"] = scalar(model, x)
        for name, each in model.named_parameters():
            holder.outs[name] = each.detach() * x.sum()
        return cache["out"] + 1

    return step, [cache, logs, holder.outs]


def last_of_many(model):
    recent = collections.deque(maxlen=3)

    def step(x):
        recent.append(scalar(model, x))

    return step, recent


def of_lists(model):
    metrics, plain_one = collections.defaultdict(list), {}

    def step(x):
        metrics["loss"].append(scalar(model, x))
        metrics["size"].append(x.abs().sum())
        plain_one.setdefault("loss", []).append(scalar(model, x))

    return step, [metrics, plain_one]


def members(model):
    seen = {"before"}

    def step(x):
        seen.add("now")
        seen.update({"then", "before"})
        seen.discard("then")
        return scalar(model, x)

    return step, seen


def hooked(model):
    features = []
    model.register_forward_hook(lambda module, given, out: features.append(out))

    def step(x):
        features.clear()
        model(x)
        model(2 * x)
        return torch.stack(features).mean() + sum(each.sum() for each in features) + len(features)

    return step, []


def own_entries(model):
    history, cache = [], {}

    def step(x):
        history.append(scalar(model, x))
        cache["y"] = model(x)
        loss = history[-1] + cache["y"].sum()
        del cache["y"]
        return loss

    return step, [history, cache]


def the_very_list(model):
    history = []

    def step(x):
        history.append(scalar(model, x))
        return {"history": history}

    return step, history


def moved(model):
    model.now, model.before = torch.zeros(()), torch.ones(())
    kept = {"now": torch.zeros(()), "before": torch.zeros(())}

    def step(x):
        model.before, model.now = model.now, scalar(model, x)
        kept["before"] = kept["now"]
        kept["now"] = kept["last"] = scalar(model, x)
        return model.before + kept["before"]

    return step, kept


def ordered(model):
    recent = collections.OrderedDict(a=torch.zeros(()), b=torch.zeros(()))

    def step(x):
        recent["a"] = scalar(model, x)
        recent.move_to_end("a")
        recent.pop("c", None)
        recent.update(d=x.sum())

    return step, recent


STEPS = [
    appends, adds_in_place, entries, last_of_many, of_lists, members, hooked, own_entries,
    the_very_list, moved, ordered,
]  # fmt: skip


def beside_eager(make, calls=5):
    """The recompiles of a step that ``make`` makes, and what its containers are of."""
    models = [nn.Linear(3, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    (eager, theirs), (function, ours) = map(make, models)
    step = treadle.compile(function, model=models[1])
    for _ in range(calls):
        x = torch.randn(4, 3)
        torch.testing.assert_close(plain(step(x)), plain(eager(x)))
        assert type(ours) is type(theirs)
        torch.testing.assert_close(plain(ours), plain(theirs))
    return step.recompiles


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_what_is_put_in_is_put_in_at_every_call(make):
    assert beside_eager(make) == []


def test_an_optimizer_and_a_trainers_own_lists():
    class Trainer:
        def __init__(self, model):
            self.model, self.losses, self.logs = model, [], collections.defaultdict(list)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(self, x):
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.detach())
            self.logs["loss"].append(loss.detach())
            return loss.detach()

    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.load_state_dict(first.state_dict())
    eager, ours = Trainer(first), Trainer(second)
    step = treadle.compile(ours.step, model=second, optimizer=ours.optimizer)
    for call in range(6):
        x = torch.randn(4, 3)
        assert torch.allclose(step(x), eager.step(x))
        if call == 2:  # a new epoch
            ours.losses, eager.losses = [], []
    torch.testing.assert_close(ours.losses, eager.losses)
    torch.testing.assert_close(dict(ours.logs), dict(eager.logs))
    assert len(ours.losses) == 3
    assert step.recompiles == []


def queue(model):
    waiting = []

    def step(x):
        waiting.append(scalar(model, x))
        if len(waiting) > 2:
            return waiting.pop(0)
        return x.sum()

    return step, waiting


def trimmed(model):
    history = []

    def step(x):
        history.append(scalar(model, x))
        history[:] = history[-2:]
        return sum(history)

    return step, history


def meter(model):
    recent = collections.deque(maxlen=2)

    def step(x):
        recent.append(scalar(model, x))
        return torch.stack(list(recent)).mean() / len(recent)

    return step, recent


@pytest.mark.parametrize("make", [queue, trimmed, meter], ids=lambda make: make.__name__)
def test_what_is_read_counts_until_it_is_as_it_was(make):
    found = beside_eager(make, calls=7)
    assert len(found) <= 2  # of lengths 0, 1 and 2


def test_a_length_that_is_read_says_so():
    found = beside_eager(queue, calls=4)
    assert found
    assert all(each.startswith("a branch on len(waiting) was ") for each in found)


def test_a_failed_call_puts_nothing_in():
    model, history = nn.Linear(3, 3), []

    def step(x):
        history.append(scalar(model, x))
        assert (x > 0).all()

    compiled = treadle.compile(step, model=model)
    compiled(torch.ones(2, 3))
    with pytest.raises(AssertionError):
        compiled(-torch.ones(2, 3))
    assert len(history) == 2  # by the step itself, which raised


def test_verify_puts_containers_back():
    model, history = nn.Linear(3, 3), []

    def step(x):
        history.append(scalar(model, x))

    compiled = treadle.compile(step, model=model)
    compiled(torch.randn(2, 3))
    assert compiled.verify([(torch.randn(2, 3),)]) is None
    assert len(history) == 1


def test_stand_ins_answer_as_what_they_stand_for():
    """Every method of every kind gives what the kind's own gives, and leaves what it leaves."""
    for kind in RECORDED:
        real = kind() if kind is not collections.defaultdict else kind(list)
        filled = real.update if hasattr(real, "update") else real.extend
        filled({"a": 1, "b": 2} if isinstance(real, dict) else [3, 1, 2])
        log = OperationLog()
        made = log.stand_in(real, "it")
        log.settle()
        assert isinstance(made, kind)
        assert made == real
        assert len(made) == len(real)
        assert sorted(made) == sorted(real)
        assert repr(as_plain(made)) == repr(real)
        for name, *args in OPERATIONS[kind]:
            getattr(made, name)(*args)
            getattr(real, name)(*args)
            assert made == real, name
        assert log.is_complete(log.recorders[0])


_OF_SEQUENCES = [
    ("append", 5), ("extend", [1, 7]), ("__setitem__", 0, 9), ("pop",), ("remove", 1),
    ("reverse",), ("__delitem__", 0), ("insert", 1, 8), ("__iadd__", [1, 1]), ("__imul__", 2),
    ("copy",), ("count", 1), ("index", 1), ("__contains__", 3), ("clear",), ("append", 1),
]  # fmt: skip
_OF_DICTS = [
    ("__setitem__", "c", 3), ("update", {"d": 4}), ("pop", "c"), ("pop", "x", None), ("get", "a"),
    ("setdefault", "e", 5), ("__delitem__", "a"), ("__ior__", {"z": 1}), ("popitem",), ("keys",),
    ("__contains__", "b"), ("copy",), ("clear",), ("__setitem__", "q", 1),
]  # fmt: skip
OPERATIONS = {
    list: [*_OF_SEQUENCES, ("__setitem__", slice(None), [2, 1]), ("sort",)],
    collections.deque: [
        *_OF_SEQUENCES, ("appendleft", 3), ("rotate", 1), ("extendleft", [4, 5]), ("popleft",),
    ],
    dict: _OF_DICTS,
    collections.OrderedDict: [*_OF_DICTS, ("update", {"r": 2}), ("move_to_end", "q")],
    collections.defaultdict: _OF_DICTS,
    set: [
        ("add", 5), ("discard", 5), ("update", {7, 8}), ("remove", 7), ("union", {1}),
        ("__contains__", 3), ("__ior__", {11}), ("__isub__", {11}), ("clear",), ("add", 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_steps_that_share_a_dict_of_logs(kind):
    """What one step appends is nothing that the other has read."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    found = []

    def made(logs):
        def first(x):
            loss = models[0](x).sum()
            logs["first"].append(loss.item())
            return loss

        def second(x):
            loss = models[1](x).sum()
            logs["second"].append(loss.item())
            logs["nested"]["count"].append(len(x))
            return loss

        found.append(logs)
        return first, second

    fresh = kind(first=[], second=[], nested={"count": [], "names": ["a"]})
    functions = made(copy.deepcopy(fresh))
    compiled = made(fresh)
    steps = [treadle.compile(f, model=m) for f, m in zip(compiled, models, strict=True)]
    for _ in range(4):
        x = torch.randn(4, 3)
        for step, function in zip(steps, functions, strict=True):
            torch.testing.assert_close(step(x), function(x))
    assert [step.recompiles + step.recaptures for step in steps] == [[], []]
    expected, logs = found
    assert logs["first"] == pytest.approx(expected["first"])
    assert logs["second"] == pytest.approx(expected["second"])
    assert logs["nested"] == expected["nested"]


def test_a_dict_of_logs_of_which_another_entry_is_read():
    model = nn.Linear(3, 2)

    def made(logs):
        def step(x):
            loss = model(x).sum() * sum(logs["scale"])
            logs["losses"].append(loss.item())
            return loss

        return step

    both = [{"losses": [], "scale": [2.0]} for _ in range(2)]
    compiled, step = treadle.compile(made(both[0]), model=model), made(both[1])
    for at in range(4):
        for logs in both:
            logs["scale"] += [0.5] if at == 2 else []
            logs["other"] = at
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x), step(x))
        assert both[0]["losses"] == pytest.approx(both[1]["losses"])
    assert len(compiled.recompiles + compiled.recaptures) == 1
