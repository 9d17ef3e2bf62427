"""What fills at first use (caches, attributes that are set lazily, types seen): the step is
captured again when it is full, and nothing is compiled where that makes no difference."""

import abc
import functools
import gc
import sys
from collections import defaultdict
from types import ModuleType

import pytest
import torch
from torch import nn

from contract.contract_help import beside_eager


def stepping(scale):
    """A step that multiplies its loss by ``scale(x)``."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean() * scale(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def by_size():
    known = {}

    def scale(x):
        if len(x) not in known:
            known[len(x)] = 1.0 / len(x)
        return known[len(x)]

    return stepping(scale)


def by_type():
    known = {}

    def scale(x):
        kind = known.setdefault(type(x), "one" if isinstance(x, torch.Tensor) else "many")
        return 2.0 if kind == "one" else 3.0

    return stepping(scale)


def by_default():
    known = defaultdict(lambda: 2.0)
    return stepping(lambda x: known["weight"])


def dispatched():
    @functools.singledispatch
    def scale(x):
        return 1.0

    @scale.register
    def _(x: torch.Tensor):
        return 2.0

    return stepping(scale)


def cached_property():
    class Scales:
        @functools.cached_property
        def scale(self):
            return 2.0

    scales = Scales()
    return stepping(lambda x: scales.scale)


def lazily():
    class Scales:
        scale = None

        def __call__(self, x):
            if self.scale is None:
                self.scale = 1.0 / x.shape[1]
            return self.scale

    return stepping(Scales())


MEMORIES = [by_size, by_type, by_default, dispatched, cached_property, lazily]


@pytest.mark.parametrize("make", MEMORIES)
def test_what_fills_at_first_use_compiles_nothing_again(make):
    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=4)
    assert step.recompiles == []
    assert len(step.recaptures) == 1


def test_what_was_remembered_counts_still():
    known = []

    def make():
        scales = {}
        known.append(scales)
        return stepping(lambda x: scales.setdefault("scale", 2.0))

    def between(number, model):
        if number == 2:
            for each in known:
                each["scale"] = 3.0

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=4, between=between)
    assert step.recompiles == ["scales has other entries"]  # with a number that is an input


def test_variants_that_run_one_program_leave_what_each_of_them_leaves():
    known = []

    def make():
        state = {"first": True, "calls": 0}
        known.append(state)

        def scale(x):
            if state["first"]:
                state["first"], state["label"] = False, "begun"
            else:
                state["label"] = "going on"
            return 2.0

        return stepping(scale)

    found = []

    def between(number, model):
        state = known[len(found) % 2]
        found.append(state.get("label"))
        if number == 3:
            state["first"] = True

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=5, between=between)
    assert found[::2] == found[1::2] == [None, "begun", "going on", "going on", "begun"]
    assert step.recompiles == []


def test_a_class_that_is_registered_with_an_abstract_one_counts_where_it_is_asked_about(
    monkeypatch,
):
    bases, late = [], []

    def make():
        Base = abc.ABCMeta("Base", (), {})

        class Known:
            pass

        held = Known()
        bases.append((Base, Known))
        return stepping(lambda x: 2.0 if isinstance(held, Base) else 3.0)

    def between(number, model):
        for base, known in bases:
            if number == 1:
                base.register(type("Other", (), {}))
                gc.collect()
            if number == 2:  # as a library does that is imported late
                monkeypatch.setitem(sys.modules, "late_library", ModuleType("late_library"))
                late.append(base.register(type("Late", (), {"__module__": "late_library"})))
            if number == 3:
                base.register(known)

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=5, between=between)
    assert len(step.recompiles) == 1
    assert step.recompiles[0].endswith("Base: its contents changed")


def test_a_change_at_every_call_that_makes_no_difference_is_told():
    box = {"note": ""}

    def make():
        def scale(x):
            return 2.0 if box["note"] != "stop" else 0.0

        return stepping(scale)

    def between(number, model):
        box["note"] = f"call {number}"

    with pytest.warns(RuntimeWarning, match="captured again for the 4th time"):
        step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=5, between=between)
    assert step.recompiles == []
    assert step.recaptures[0] == "box['note']: 'call 0' became 'call 1'"
