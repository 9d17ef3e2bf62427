"""All calls that give the parameters of a step the same values are one call."""

import functools
import inspect
import random

import pytest
import torch
from torch import nn

import treadle


class Trained:
    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def update(self, x, y, scale, *more):
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean() * scale
        for each in more:
            loss = loss + each.sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def plain(t):
    def step(x, y, scale=1.0, mode=None):
        return t.update(x, y, scale)

    return step


def placed_only(t):
    def step(x, y, scale=1.0, /, mode=None):
        return t.update(x, y, scale)

    return step


def named_only(t):
    def step(x, *, y, scale=1.0, mode="mean"):
        return t.update(x, y, scale)

    return step


def more(t):
    def step(x, y, scale=1.0, *others, mode=None, **rest):
        return t.update(x, y, scale, *others, *rest.values())

    return step


def method(t):
    class Trainer:
        def step(self, x, y, scale=1.0):
            return t.update(x, y, scale)

    return Trainer().step


def class_method(t):
    class Trainer:
        @classmethod
        def step(cls, x, y, scale=1.0):
            return t.update(x, y, scale)

    return Trainer.step


def called(t):
    class Trainer:
        def __call__(self, x, y, scale=1.0):
            return t.update(x, y, scale)

    return Trainer()


def partial_by_place(t):
    def step(trained, x, y, scale=1.0):
        return trained.update(x, y, scale)

    return functools.partial(step, t)


def partial_by_name(t):
    def step(x, trained, y, scale=1.0):
        return trained.update(x, y, scale)

    return functools.partial(step, trained=t)


def objects_as_defaults(t):
    def step(x, y, trained=t, sizes=(), scale=1.0):
        return trained.update(x, y, scale)

    return step


MADE = [
    plain, placed_only, named_only, more, method, class_method, called, partial_by_place,
    partial_by_name, objects_as_defaults,
]  # fmt: skip


def forms(signature, x, y, number):
    """Calls with the same values: each parameter by place or by name, defaults given or not."""
    rng = random.Random(number)
    args, kwargs = [], {}
    for each in signature.parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if each.default is not each.empty and rng.random() < 0.5:
            continue
        value = {"x": x, "y": y}.get(each.name, each.default)
        skips = len(args) < list(signature.parameters).index(each.name)
        if each.kind is each.KEYWORD_ONLY or (
            each.kind is each.POSITIONAL_OR_KEYWORD and (skips or rng.random() < 0.5)
        ):
            kwargs[each.name] = value
        elif not skips:
            args.append(value)
    names = list(kwargs)
    rng.shuffle(names)
    return args, {name: kwargs[name] for name in names}


@pytest.mark.parametrize("make", MADE, ids=lambda each: each.__name__)
def test_all_forms_are_one_variant(make):
    trained, other = Trained(), Trained()
    eager = make(other)
    step = treadle.compile(make(trained), model=trained.model, optimizer=trained.optimizer)
    for number in range(12):
        x, y = torch.randn(3, 4), torch.randn(3, 2)
        args, kwargs = forms(inspect.signature(eager), x, y, number)
        if "trained" in kwargs:
            kwargs["trained"] = trained
        args = [trained if each is other else each for each in args]
        given = [other if each is trained else each for each in args]
        named = {k: other if v is trained else v for k, v in kwargs.items()}
        torch.testing.assert_close(step(*args, **kwargs), eager(*given, **named))
    assert step.recompiles == step.recaptures == []


@pytest.mark.parametrize("make", MADE, ids=lambda each: each.__name__)
def test_wrong_calls_are_pythons_errors(make):
    trained = Trained()
    eager = make(trained)
    step = treadle.compile(eager, model=trained.model, optimizer=trained.optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    right = ((x,), {"y": y}) if make is not placed_only else ((x, y), {})
    step(*right[0], **right[1])
    wrong = [((), {}), ((x,), {}), ((), {"y": y})]
    if make is not more:
        wrong += [((x, y, 1.0, None, 2, 3, 4), {}), ((x,), {"y": y, "other": 1})]
        wrong += [((x, y), {"x": x}), ((x,), {"x": x, "y": y})]
    else:
        wrong += [((x, y), {"x": x}), ((x, y, 1.0, y), {"scale": 2.0})]
    for args, kwargs in wrong:
        with pytest.raises(TypeError) as expected:
            eager(*args, **kwargs)
        with pytest.raises(TypeError) as found:
            step(*args, **kwargs)
        assert str(found.value) == str(expected.value)
    step(*right[0], **right[1])
    assert step.recompiles == []


def test_what_is_not_the_default_is_given():
    trained, other = Trained(), Trained()
    eager = objects_as_defaults(other)
    function = objects_as_defaults(trained)
    step = treadle.compile(function, model=trained.model, optimizer=trained.optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    for kwargs in ({}, {"scale": 2.0}, {"sizes": (1,)}, {"scale": 2.5, "sizes": ()}):
        torch.testing.assert_close(step(x, y, **kwargs), eager(x, y=y, **kwargs))
    assert step.recompiles == ["argument scale: 1.0 became 2.0"]
    assert step.recaptures == ["argument sizes[0] is new"]  # nothing reads it


def test_defaults_and_code_that_are_set_are_the_ones_that_count():
    trained, other = Trained(), Trained()
    function, eager = plain(trained), plain(other)
    step = treadle.compile(function, model=trained.model, optimizer=trained.optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    torch.testing.assert_close(step(x, y), eager(x, y))
    function.__defaults__ = eager.__defaults__ = (3.0, None)
    torch.testing.assert_close(step(x, y), eager(x, y))

    def turned(t):
        def step(y, x, scale=1.0, mode=None):
            return t.update(x, y, scale)

        return step

    function.__code__ = eager.__code__ = turned(trained).__code__
    torch.testing.assert_close(step(y, x=x), eager(y, x=x))
    torch.testing.assert_close(step(x=x, y=y), eager(x=x, y=y))


def test_a_wrapper_that_looks_at_names_gets_what_the_call_has():
    trained, other = Trained(), Trained()

    def make(t):
        inner = plain(t)

        @functools.wraps(inner)
        def step(*args, **kwargs):
            return inner(*args, **kwargs) * (2 if "y" in kwargs else 1)

        return step

    eager = make(other)
    step = treadle.compile(make(trained), model=trained.model, optimizer=trained.optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    for args, kwargs in [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})] * 2:
        torch.testing.assert_close(step(*args, **kwargs), eager(*args, **kwargs))


def test_a_signature_that_says_something_else_is_not_believed():
    trained, other = Trained(), Trained()

    def make(t):
        def step(*args, **kwargs):
            return t.update(*args, *kwargs.values(), 1.0) * (2 if kwargs else 1)

        step.__signature__ = inspect.signature(plain(t))
        return step

    eager = make(other)
    step = treadle.compile(make(trained), model=trained.model, optimizer=trained.optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    for args, kwargs in [((x, y), {}), ((x,), {"y": y}), ((x, y), {})]:
        torch.testing.assert_close(step(*args, **kwargs), eager(*args, **kwargs))


def test_update_is_the_calls_own():
    trained = Trained()
    step = treadle.compile(plain(trained), model=trained.model, optimizer=trained.optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    step(x, y=y, update=False)
    step(x, y, update=False)
    step(y=y, x=x)
    step(x, y, update=True)
    assert step.recompiles == ["update=False became update=True"]


def test_a_reason_compares_with_a_call_of_as_many_arguments():
    """States that are passed back: the first call has none, later ones have others' sizes."""
    model = nn.Linear(4, 4)

    def step(x, states):
        joined = torch.cat([*states, model(x)])
        return joined.square().mean(), joined.detach()

    options = treadle.Options(codegen=False, dynamic=False)
    compiled = treadle.compile(step, model=model, options=options)
    x, states = torch.randn(2, 4), ()
    for _ in range(3):
        loss, kept = compiled(x, states)
        torch.testing.assert_close(loss, step(x, states)[0])
        states = (kept,)
    new, grown = compiled.recompiles
    assert new == "argument states[0] is new"
    assert "states[0]: shape [2, 4] became [4, 4]" in grown
