"""``.grad`` before and after a step: what the step ignores of it is not part of the key."""

import pytest
import torch
from torch import nn

import treadle
from contract.contract_help import beside_eager, training
from treadle.runtime.execute.call_frame import CallFrame


def clear_by_hand(model, optimizer):
    for each in model.parameters():
        each.grad = None


def clear_some(model, optimizer):
    for each in model[0].parameters():
        each.grad = None


CLEARING = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": clear_by_hand,
    "twice": lambda model, optimizer: (model.zero_grad(), optimizer.zero_grad()),
}
KEEPING = {
    "nothing": lambda model, optimizer: None,
    "some": clear_some,
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "looks first": lambda model, optimizer: (
        sum(p.grad.sum() for p in model.parameters() if p.grad is not None),
        optimizer.zero_grad(),
    ),
}


def making(clear):
    def make():
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x):
            before = clear(model, optimizer)
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach(), before[0] if isinstance(before, tuple) else None

        return step, model, optimizer

    return make


@pytest.mark.parametrize("name", CLEARING)
def test_gradients_that_are_cleared_first_do_not_compile_again(name):
    step = beside_eager(making(CLEARING[name]), lambda _: (torch.randn(4, 5),), steps=4)
    assert step.recompiles == []


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def derivative_in_the_loss():
    model = net(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x):
        x = x.clone().requires_grad_()
        u = model(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        loss = (slope + u).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def penalty_on_gradients_of_parameters():
    model = net(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(each.square().sum() for each in grads)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def two_networks():
    making, judging = net(3, 3), net(3, 1)
    first = torch.optim.Adam(judging.parameters(), lr=0.01)
    second = torch.optim.Adam(making.parameters(), lr=0.01)

    def step(x):
        judging.zero_grad()
        judging(x).mean().backward()
        made = making(x.flip(0))
        judged = judging(made.detach()).square().mean()
        judged.backward()
        first.step()
        making.zero_grad()  # after the backward of the other network
        loss = judging(made).square().mean()
        loss.backward()
        second.step()
        return judged.detach(), loss.detach()

    return step, [making, judging], [first, second]


def gradients_that_are_assigned():
    model = net(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        loss = model(x).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        for each, grad in zip(model.parameters(), found, strict=True):
            each.grad = grad
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


LATE = [
    derivative_in_the_loss,
    penalty_on_gradients_of_parameters,
    two_networks,
    gradients_that_are_assigned,
]


@pytest.mark.parametrize("make", LATE)
def test_gradients_that_are_replaced_before_anything_is_added_to_them(make):
    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=3)
    assert step.recompiles == []


@pytest.mark.parametrize("name", KEEPING)
def test_gradients_that_are_used_do(name):
    step = beside_eager(making(KEEPING[name]), lambda _: (torch.randn(4, 5),), steps=4)
    where = "2.weight" if name == "some" else "0.weight"
    assert step.recompiles == [f"{where}.grad is set now"]


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize(("looks", "times"), [(False, 0), (True, 1)])
def test_gradients_of_parameters_that_the_step_holds_itself(looks, times, by_model):
    def make():
        model = nn.Linear(5, 2)
        own = list(model.parameters())

        def step(x):
            before = torch.zeros(())
            for each in own:
                if looks and each.grad is not None:
                    before = before + each.grad.abs().sum()
                if not by_model:
                    each.grad = None
            if by_model:
                model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach(), before

        return step, model, []

    step = beside_eager(make, lambda _: (torch.randn(4, 5),), steps=4)
    assert len(step.recompiles) == times


def test_a_stale_gradient_of_a_frozen_parameter_counts_where_it_is_clipped():
    def make():
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
        model(torch.ones(1, 5)).sum().backward()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach(), norm

        return step, model, optimizer

    def between(number, model):
        if number == 2:
            model[0].zero_grad()

    step = beside_eager(make, lambda _: (torch.randn(4, 5),), steps=5, between=between)
    assert step.recompiles == ["0.weight.grad was set, and is None now"]


def test_a_first_call_that_fails_puts_gradients_back(monkeypatch):
    function, model, optimizer = making(CLEARING["optimizer"])()
    model(torch.ones(1, 5)).sum().backward()
    before = [each.grad for each in model.parameters()]
    step = treadle.compile(function, model=model, optimizer=optimizer)
    compiled = step.prepare(torch.randn(4, 5))

    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(type(compiled.executable), "run", fails)
    with pytest.raises(RuntimeError, match="no"):
        step(torch.randn(4, 5))
    assert all(each.grad is old for each, old in zip(model.parameters(), before, strict=True))


def test_old_gradients_are_gone_while_a_step_runs(monkeypatch):
    function, model, optimizer = making(CLEARING["optimizer"])()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    step(torch.randn(4, 5))
    assert all(each.grad is not None for each in model.parameters())
    results, seen = CallFrame.results, []

    def looking(frame):
        seen.extend(each.grad for each in model.parameters())
        return results(frame)

    monkeypatch.setattr(CallFrame, "results", looking)
    step(torch.randn(4, 5))
    assert seen == [None] * 4


def test_what_a_step_clears_is_cleared_whatever_was_there_before():
    """Calls that find no gradient write none away; the first that finds one does."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, training(lambda x: model(x).square().mean(), optimizer)

    model, optimizer, function = made()
    other, states, eager = made()
    step = treadle.compile(
        function, model=model, optimizer=optimizer, options=treadle.Options(codegen=False)
    )
    for number in range(12):
        for each, beside in zip(model.parameters(), other.parameters(), strict=True):
            if number in (5, 6, 9) and each.ndim < number - 4:
                each.grad, beside.grad = torch.ones_like(each), torch.ones_like(each)
        if number == 10:
            for found in (optimizer, states):
                for state in found.state.values():
                    state["step"] = state["step"] + 2
        x = torch.randn(5, 3)
        torch.testing.assert_close(step(x), eager(x))
        assert all(each.grad is None for each in model.parameters()), number
        for each, beside in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(each, beside)
            assert optimizer.state[each]["step"] == states.state[beside]["step"]


def test_gradients_that_an_optimizer_outside_of_the_graph_was_given_are_cleared():
    """They stand in ``.grad`` while it steps, where there was nothing when the call began."""

    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for each in self.param_groups[0]["params"]:
                if each.grad is not None and bool(each.grad.norm() < 1e9):
                    each.sub_(each.grad.sign(), alpha=0.01)

    def made():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = Signs(model.parameters(), {})
        return model, optimizer, training(lambda x: model(x).square().mean(), optimizer)

    model, optimizer, function = made()
    other, _, eager = made()
    step = treadle.compile(
        function, model=model, optimizer=optimizer, options=treadle.Options(codegen=False)
    )
    for _ in range(6):
        x = torch.randn(5, 3)
        torch.testing.assert_close(step(x), eager(x))
        assert all(each.grad is None for each in model.parameters())
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_gradients_that_an_operator_of_the_users_has_left_are_cleared():
    """Whatever runs of the user's in a call, what was found at its beginning is not taken for
    granted at its end."""

    def made(name):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        @torch.library.custom_op(f"leaving::{name}", mutates_args=())
        def leave(x: torch.Tensor) -> torch.Tensor:
            model.bias.grad = torch.ones(2)
            return x * 2

        leave.register_fake(torch.empty_like)
        leave.register_autograd(lambda ctx, g: g * 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, training(lambda x: leave(model(x)).square().mean(), optimizer)

    model, optimizer, function = made("compiled")
    step = treadle.compile(
        function, model=model, optimizer=optimizer, options=treadle.Options(codegen=False)
    )
    for _ in range(6):
        step(torch.randn(5, 3))
        assert all(each.grad is None for each in model.parameters())
