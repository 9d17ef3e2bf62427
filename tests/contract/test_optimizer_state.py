"""Steps that look at the state of their optimizer."""

import pytest
import torch
from torch import nn

import treadle


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5)


KEYS = {adam: "exp_avg", momentum: "momentum_buffer", rmsprop: "square_avg", plain: "none"}


def norms_after(model, optimizer, key):
    """As logged: one number for each parameter."""
    found = [optimizer.state[p].get(key) for p in model.parameters()]
    return [each.norm() for each in found if each is not None]


def norms_of_all(model, optimizer, key):
    return {
        at: {k: v.float().sum() for k, v in state.items()}
        for at, (_, state) in enumerate(optimizer.state.items())
    }


def counts(model, optimizer, key):
    steps = [s["step"].item() for s in optimizer.state.values() if "step" in s]
    return steps, len(optimizer.state)


def as_groups_have_them(model, optimizer, key):
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [torch.as_tensor(key in optimizer.state[p]) for p in every if p in optimizer.state]


def damped(model, optimizer, key):
    """Written to in place."""
    for p in model.parameters():
        if key in optimizer.state[p]:
            optimizer.state[p][key].mul_(0.5)
    return torch.zeros(())


def masked(model, optimizer, key):
    """The key is set to the very tensor, as Python does after ``*=``."""
    for p in model.parameters():
        if key in optimizer.state[p]:
            optimizer.state[p][key] *= (p > 0).to(p.dtype)
    return torch.zeros(())


def replaced(model, optimizer, key):
    """By another tensor, twice; the old one keeps its values, as in eager."""
    found = []
    for p in model.parameters():
        state = optimizer.state[p]
        if key in state:
            old = state[key]
            state[key] = torch.zeros_like(p, requires_grad=False)
            state[key] = old * 0.5 + state[key]
            state[key].add_(1e-4)
            found.append(old.norm() - state[key].norm())
    return found


LOOKS = (norms_after, norms_of_all, counts, as_groups_have_them, damped, masked, replaced)


def made(make, look, when):
    torch.manual_seed(1)
    model = nn.Linear(5, 2)
    optimizer = make(model.parameters())

    def step(x):
        found = [look(model, optimizer, KEYS[make])] if when == "before" else []
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found += [look(model, optimizer, KEYS[make])] if when == "after" else []
        optimizer.zero_grad()
        return loss.detach(), found

    return model, optimizer, step


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("make", "look"),
    [(adam, look) for look in LOOKS]
    + [(make, look) for make in KEYS if make is not adam for look in (damped, replaced)],
)
def test_values_are_those_of_the_call(make, look, when):
    model, optimizer, step = made(make, look, when)
    twin, other, eager = made(make, look, when)
    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    for _ in range(4):
        x = torch.randn(3, 5)
        torch.testing.assert_close(compiled(x), eager(x), rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(
        list(model.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-6
    )
    # Eager leaves empty dicts where it looked.
    there = [[p in o.state for p in m.parameters()] for m, o in ((model, optimizer), (twin, other))]
    assert there[0] == there[1]
    ours, theirs = ([v for v in o.state.values() if v] for o in (optimizer, other))
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)
    reasons = compiled.recompiles + compiled.recaptures
    assert len(reasons) == (when == "before" and make is not plain), reasons
    assert all("the state of" in each for each in reasons)


def test_state_that_comes_back_is_looked_at_again():
    """``optimizer.load_state_dict`` and a cleared state are other answers."""
    model, optimizer, step = made(adam, counts, "before")
    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    seen = []
    for number in range(5):
        if number == 3:
            optimizer.state.clear()
        seen.append(compiled(torch.randn(3, 5))[1][0])
    assert seen == [([], 0), ([1.0] * 2, 2), ([2.0] * 2, 2), ([], 0), ([1.0] * 2, 2)]
    assert len(compiled.recompiles) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, p: optimizer.state[p].update(exp_avg=p),
        lambda optimizer, p: optimizer.state[p].update(exp_avg=p.detach()[:1]),
        lambda optimizer, p: optimizer.state[p].update(exp_avg=p.detach().double()),
        lambda optimizer, p: optimizer.state[p].update(exp_avg=None),
        lambda optimizer, p: optimizer.state[p].update(step=optimizer.state[p]["step"] * 2),
        lambda optimizer, p: optimizer.state[p].pop("exp_avg"),
        lambda optimizer, p: optimizer.state.clear(),
        lambda optimizer, p: optimizer.state[p].clear(),
        lambda optimizer, p: optimizer.state[p].update(mine=[p]),
        lambda optimizer, p: optimizer.state.__setitem__(p, {}),
        lambda optimizer, p: optimizer.state.pop(p),
    ],
)
def test_the_form_s_entries_stay(change):
    """Which there are, and that none is another tensor's memory."""

    def look(model, optimizer, key):
        change(optimizer, next(model.parameters()))

    model, optimizer, step = made(adam, look, "after")
    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    with pytest.raises(treadle.CaptureError, match="TR-125") as caught:
        compiled(torch.randn(3, 5))
    assert "lambda optimizer, p" in caught.value.where
    assert not optimizer.state


WHOLE = {
    "len": len,
    "list": lambda state: len(list(state)),
    "reversed": lambda state: len(list(reversed(state))),
    "keys": lambda state: len(state.keys()),
    "values": lambda state: len(list(state.values())),
    "items": lambda state: len(dict(state.items())),
    "dict": lambda state: len(dict(state)),
    "stars": lambda state: len({**state}),
    "copy": lambda state: len(state.copy()),
    "or": lambda state: len({} | state),
    "equal": lambda state: float(state == {"own": 4.0}),
    "branch": lambda state: 2.0 if len(state) > 1 else 1.0,
}


@pytest.mark.parametrize("ask", WHOLE.values(), ids=WHOLE)
def test_a_question_for_all_entries_hears_of_a_new_one(ask):
    def made():
        torch.manual_seed(0)
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            loss = (model(x) * ask(optimizer.state[model.weight])).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, step

    model, optimizer, step = made()
    model_, optimizer_, train = made()
    ours = treadle.compile(train, model=model_, optimizer=optimizer_)
    for number in range(5):
        if number == 3:
            optimizer.state[model.weight]["own"] = optimizer_.state[model_.weight]["own"] = 4.0
        x = torch.randn(3, 2)
        torch.testing.assert_close(ours(x), step(x))
    assert len(ours.recompiles) <= 2  # the first state, and the entry
