"""Whatever decides a call's key gives another key, also where nothing is looked at twice."""

import warnings

import pytest
import torch
from torch import nn

from treadle.session.variants.cached_facts import CachedFact, watch_models, watch_optimizers
from treadle.session.variants.guards import Keys


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def key_of(keys, args, kwargs=None):
    called, _ = keys.called(args, kwargs or {})
    return keys.key(called)


def replace_parameter(model, optimizer):
    model[0].weight = nn.Parameter(torch.zeros(4, 3))


def turned(model, optimizer):
    model[2][0].weight.data = torch.zeros(4, 2).t()


def frozen_without_grad_mode(model, optimizer):
    with torch.no_grad():
        model[0].weight.requires_grad_(False)


def give_grad(model, optimizer):
    model[0].bias.grad = torch.zeros(4)


def group_of_its_own(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def one_more_parameter(model, optimizer):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))


def other_groups(model, optimizer):
    optimizer.param_groups = [{**optimizer.param_groups[0], "maximize": True}]


def registered(model, optimizer):
    model[0].extra = nn.Linear(1, 1)


CHANGES = {
    "training": lambda m, o: m[1].eval(),
    "a parameter": replace_parameter,
    "a layout": turned,
    "a dtype": lambda m, o: m[2].double(),
    "a parameter is frozen": lambda m, o: m[0].weight.requires_grad_(False),
    "a parameter is frozen without grad mode": frozen_without_grad_mode,
    "a buffer's dtype": lambda m, o: m[1].register_buffer("running_mean", torch.zeros(4).double()),
    "a buffer": lambda m, o: m[0].register_buffer("more", torch.zeros(1)),
    "a gradient": give_grad,
    "a module": registered,
    "a forward hook": lambda m, o: m[0].register_forward_hook(print),
    "a forward pre-hook": lambda m, o: m[0].register_forward_pre_hook(print),
    "a backward hook": lambda m, o: m[0].register_full_backward_hook(print),
    "a tensor's hook": lambda m, o: m[0].weight.register_hook(print),
    "a hook after a gradient": lambda m, o: m[0].weight.register_post_accumulate_grad_hook(print),
    "a step's hook": lambda m, o: o.register_step_pre_hook(print),
    "an option": lambda m, o: o.param_groups[0].__setitem__("amsgrad", True),
    "a group": group_of_its_own,
    "a parameter of a group": one_more_parameter,
    "all groups": other_groups,
}


@pytest.mark.parametrize("again", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_another_key(change, again):
    model, optimizer = model_and_optimizer()
    keys = Keys({"": model}, {"": optimizer})
    batch = (torch.zeros(2, 3),)
    for _ in range(1 + again):
        before = key_of(keys, batch)
    CHANGES[change](model, optimizer)
    after = key_of(keys, batch)
    fresh = key_of(Keys({"": model}, {"": optimizer}), batch)
    assert after != before
    assert after == fresh


def test_what_decides_nothing_gives_the_same_objects():
    model, optimizer = model_and_optimizer()
    keys = Keys({"": model}, {"": optimizer})
    batch = (torch.zeros(2, 3),)
    before = key_of(keys, batch)
    with torch.no_grad():
        model[0].weight.add_(1)
    optimizer.param_groups[0]["lr"] = 0.2
    after = key_of(keys, (torch.ones(2, 3),))
    assert after == before
    assert after.parameters is before.parameters
    assert after.optimizers is before.optimizers
    assert after.modes[2] is before.modes[2]


def test_a_switch_of_the_process_gives_another_key():
    model, optimizer = model_and_optimizer()
    keys = Keys({"": model}, {"": optimizer})
    before = key_of(keys, ())
    with torch.no_grad():
        assert key_of(keys, ()) != before
    with torch.autocast("cpu"):
        assert key_of(keys, ()) != before
    torch.set_float32_matmul_precision("high")
    try:
        assert key_of(keys, ()) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64)
    try:
        assert key_of(keys, ()) != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert key_of(keys, ()) == before


def test_arguments_are_flattened_as_pytree_does():
    model, optimizer = model_and_optimizer()
    keys = Keys({"": model}, {"": optimizer})
    x, y = torch.zeros(2), torch.ones(3)
    calls = [
        ((x, 1, "a", None), {}),
        ((x,), {"b": y, "a": 2.5}),
        ((x,), {"a": 2.5, "b": y}),
        (([x, y], {"k": 1}), {}),
        ((x, [y]), {"a": (1, 2)}),
        ((), {}),
    ]
    for args, kwargs in [*calls, *calls]:
        called, given = keys.called(args, kwargs)
        key = keys.key(called)
        leaves = given.leaves
        expected = torch.utils._pytree.tree_flatten_with_path((args, kwargs))[0]
        assert all(a is b for a, (_, b) in zip(leaves, expected, strict=True))
        assert len(key.arguments) == len(leaves)
        assert not given.containers  # lists and dicts are no more than their entries
    paths = [path for path, _ in key_of(keys, (x,), {"b": y}).arguments]
    assert paths == ["args[0]", "b"]


def test_what_cannot_be_watched_is_not():
    model, optimizer = model_and_optimizer()
    assert watch_models({"": model}) is not None
    model[0].register_forward_hook(print)
    assert watch_models({"": model}) is not None
    model[0].register_forward_hook(str)  # of two the order may change
    assert watch_models({"": model}) is None
    with warnings.catch_warnings(action="ignore"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert watch_models({"": scripted}) is None
    assert watch_optimizers({"": optimizer}) is not None
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert watch_optimizers({"": optimizer}) is None


def test_after_an_error_nothing_is_known():
    """What was watched before is as it was again, and the value is of another time."""
    now = ["first"]
    fails = []

    class Watch:
        def __init__(self):
            if fails:
                raise MemoryError
            self.seen = now[0]

        def is_same(self):
            return self.seen == now[0]

    steady = CachedFact(lambda: now[0], Watch)
    assert steady.get() == "first"
    now[0] = "second"
    fails.append(True)
    with pytest.raises(MemoryError):
        steady.get()
    now[0] = "first"
    fails.clear()
    assert steady.get() == "first"


class Written:
    """A watch that says whether ``writes`` is as it was when it was made."""

    def __init__(self, writes):
        self._writes, self._then = writes, list(writes)

    def is_same(self):
        return self._writes == self._then


def test_watches_in_vain_are_made_less_often():
    writes, watches, computed = [], [], []

    def watch():
        watches.append(Written(writes))
        return watches[-1]

    fact = CachedFact(lambda: computed.append(0) or len(writes) // 50, watch)
    for at in range(100):
        writes.append(at)
        assert fact.get() == (at + 1) // 50  # known anew at every call
    assert len(watches) < 20
    assert len(computed) == 100
    for _ in range(20):  # nothing is written any more
        assert fact.get() == 2
    assert len(computed) <= 100 + 17
    before = len(computed)
    assert [fact.get() for _ in range(5)] == [2] * 5
    assert len(computed) == before
    writes.append(0)  # a single time: it is watched again at once
    fact.get()
    fact.get()
    assert len(computed) == before + 1
