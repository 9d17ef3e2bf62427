"""A call that differs in nothing from the last one is served after one pass over everything, and
any difference, whatever it is, is found as by the first look."""

import pytest
import torch
from torch import nn

import treadle
from treadle.guards import watching
from treadle.session.variants.guards import Keys

OPTIONS = treadle.Options(codegen=False)
SETTINGS = {"scale": 2.0}


def made(options=OPTIONS):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).sum() * SETTINGS["scale"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    for _ in range(3):
        compiled(torch.ones(2, 3))
    return compiled, model, optimizer


@pytest.fixture
def keys(monkeypatch):
    """The calls of which the whole key was made."""
    if watching.comparison() is None:
        pytest.skip("there is no C compiler")
    found, key = [], Keys.key

    def noted(self, called):
        found.append(called)
        return key(self, called)

    monkeypatch.setattr(Keys, "key", noted)
    return found


def step_counter(model, optimizer):
    optimizer.state[model.weight]["step"].fill_(7)


def scaled(model, optimizer):
    SETTINGS["scale"] = 3.0


def given_grad(model, optimizer):
    model.weight.grad = torch.ones(3, 3)


def another_step(model, optimizer):
    optimizer.step = lambda: None


CHANGES = {
    "mode": lambda m, o: m.eval(),
    "hook": lambda m, o: m.register_forward_hook(lambda *_: None),
    "numbers elsewhere": lambda m, o: setattr(m.weight, "data", m.weight.data.clone()),
    "frozen": lambda m, o: m.weight.requires_grad_(False),
    "gradient": given_grad,
    "counter": step_counter,
    "option": lambda m, o: o.param_groups[0].__setitem__("amsgrad", True),
    "rate that may change unseen": lambda m, o: o.param_groups[0].update(lr=torch.tensor(0.2)),
    "what is read": scaled,
    "how it steps": another_step,
    "switch": lambda m, o: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_looked_at(change, keys, monkeypatch, tmp_path):
    monkeypatch.setitem(SETTINGS, "scale", 2.0)
    # of another process there may be a variant that takes the scale as an input
    compiled, model, optimizer = made(treadle.Options(codegen=False, cache_dir=tmp_path))
    keys.clear()
    compiled.prepare(torch.ones(2, 3))
    if not keys:  # otherwise every call looks at all of it
        batch = torch.ones(2, 3)
        CHANGES[change](model, optimizer)
        try:
            compiled.prepare(batch)
        finally:
            torch.set_default_dtype(torch.float32)
        assert keys


def test_other_arguments_are_looked_at(keys):
    compiled, *_ = made()
    keys.clear()
    compiled.prepare(torch.ones(2, 3))
    known = len(keys)
    compiled.prepare(torch.ones(4, 3))
    compiled(torch.ones(4, 3), update=False)
    assert len(keys) >= known + 2


@pytest.mark.skipif(
    watching.watch_dicts([{}]).__class__ is watching.PolledDicts, reason="dicts are asked"
)
def test_the_same_again_is_one_pass(keys):
    compiled, _, optimizer = made()
    keys.clear()
    for _ in range(3):
        compiled(torch.ones(2, 3))
    assert not keys
    for _ in range(3):
        optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler does; an input: the same variant
        compiled(torch.ones(2, 3))
    assert not keys
    assert len(compiled.recompiles) == 0


LOOP = """
import torch
import treadle

torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
factor = 2.0


def step(x):
    loss = model(x).sum() * factor * max(1.0, 0.5)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


compiled = treadle.compile(step, model=model, optimizer=optimizer, options=OPTIONS)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
total = 0.0
for i in range(6):
    if i == 3:
        keys.clear()
    total += compiled(torch.ones(2, 3)).item()
    scheduler.step()
    globals()[f"beside {i}"] = i
known = len(keys)
CHANGE
expected = model(torch.ones(2, 3)).sum() * factor * max(1.0, 0.5)
changed = compiled(torch.ones(2, 3))
"""


@pytest.mark.skipif(
    watching.watch_dicts([{}]).__class__ is watching.PolledDicts, reason="dicts are asked"
)
@pytest.mark.parametrize(
    ("change", "again"), [("factor = 3.0", 1), ("max = lambda a, b: a + b", 1), ("beside = 1", 0)]
)
def test_globals_that_a_loop_writes_are_looked_at_by_name(change, again, keys):
    found = {"OPTIONS": OPTIONS, "keys": keys, "__name__": "script"}
    exec(LOOP.replace("CHANGE", change), found)
    assert found["known"] == 0
    assert len(keys) == again
    torch.testing.assert_close(found["changed"], found["expected"].detach())


def beside():
    """A compiled step and the same one in eager, after as many calls as it takes until inputs are
    looked at together with all else."""
    steps = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = step
        if is_compiled:
            call = treadle.compile(step, model=model, optimizer=optimizer, options=OPTIONS)
        steps.append((call, model, optimizer))
    for _ in range(20):
        run(steps)
    return steps


def run(steps):
    """One call of each: the same numbers."""
    batch = torch.randn(2, 3)
    losses = [call(batch) for call, *_ in steps]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(model.weight for _, model, _ in steps))
    state = [optimizer.state[model.weight] for _, model, optimizer in steps]
    torch.testing.assert_close(*state)


def vouched(compiled):
    """What is looked at together with all else."""
    again = compiled._dispatcher.variants._again
    return () if again is None else again.vouched


def other_state(model, optimizer):
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"] + 1.0


def state_elsewhere(model, optimizer):
    mean = optimizer.state[model.weight]["exp_avg"]
    mean.data = mean.data + 1.0


def transposed_state(model, optimizer):
    mean = optimizer.state[model.weight]["exp_avg"]
    mean.data = mean.data.t().contiguous().t()


def other_precision(model, optimizer):
    state = optimizer.state[model.bias]
    state["exp_avg"].data = state["exp_avg"].data.double()


def parameter_elsewhere(model, optimizer):
    model.weight.data = model.weight.data + 1.0


INPUTS = [other_state, state_elsewhere, transposed_state, parameter_elsewhere]


@pytest.mark.parametrize("change", INPUTS)
def test_inputs_that_are_others_are_found_where_they_were_looked_at_with_all_else(change):
    if watching.comparison() is None:
        pytest.skip("there is no C compiler")
    steps = beside()
    (compiled, *_), _ = steps
    known = vouched(compiled)
    assert known
    for _, *objects in steps:
        change(*objects)
    for _ in range(3):
        run(steps)
    assert vouched(compiled) is not known


def test_state_of_another_precision_is_refused_where_it_was_looked_at_with_all_else():
    steps = beside()
    (compiled, *objects), _ = steps
    other_precision(*objects)
    with pytest.raises(treadle.TreadleError, match="TR-126"):
        compiled(torch.randn(2, 3))


def test_inputs_that_are_others_at_every_call_are_prepared_for_less_and_less():
    if watching.comparison() is None:
        pytest.skip("there is no C compiler")
    steps = beside()
    (compiled, *_), _ = steps
    prepared = 0
    for _ in range(100):
        for _, model, optimizer in steps:
            other_state(model, optimizer)
        known = vouched(compiled)
        run(steps)
        prepared += vouched(compiled) != known and bool(vouched(compiled))
    assert prepared <= 2
    for _ in range(300):
        run(steps)
    assert vouched(compiled)
