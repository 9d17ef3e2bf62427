"""Steps that are captured again at every call: most of them run eagerly, with a warning."""

import warnings

import pytest
import torch
from torch import nn

import treadle

PLAIN = treadle.Options(codegen=False)


class Tabled(torch.optim.Optimizer):
    """Keeps what it computes from the number of the update in a table, as the first RAdam does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "buffer": [[None, None] for _ in range(7)]})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                buffered = group["buffer"][int(state["step"] % 7)]
                if state["step"] != buffered[0]:
                    buffered[0], buffered[1] = state["step"], 1 - 0.9 ** state["step"]
                p.add_(p.grad, alpha=-group["lr"] * buffered[1])


def trained(count, *, compiled, strict=False):
    """The step after so many calls, and the parameter and state then."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = Tabled(model.parameters(), lr=0.05)

    def train(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    how = treadle.Options(codegen=strict, strict=strict)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=how)
    losses = [(step if compiled else train)(torch.randn(4, 3)) for _ in range(count)]
    counts = [optimizer.state[p]["step"] for p in model.parameters()]
    return step, (losses, counts, [p.detach() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:the step is captured again")
def test_most_calls_run_eagerly_once_each_is_captured_again():
    with pytest.warns(RuntimeWarning, match="captured again at 8 calls in a row"):
        step, found = trained(40, compiled=True)
    torch.testing.assert_close(found, trained(40, compiled=False)[1])
    captures = len(step.recaptures)
    assert captures < 16
    assert [each for each in step.recompiles if "ran eagerly" in each] == [
        "a call ran eagerly: it was captured again at 8 calls in a row, so most are not tried; "
        "step.recaptures lists what changed"
    ]


@pytest.mark.filterwarnings("ignore:the step is captured again")
def test_a_strict_step_is_captured_each_time():
    step, found = trained(20, compiled=True, strict=True)
    torch.testing.assert_close(found, trained(20, compiled=False)[1])
    assert not any("ran eagerly" in each for each in step.recompiles)


@pytest.mark.filterwarnings("ignore:the step is captured again")
def test_a_call_that_a_known_variant_serves_ends_the_row():
    model = nn.Linear(3, 1)
    kind = ["a"]

    def train(x):
        return len(kind[0]) and model(x).sum().detach()

    step = treadle.compile(train, model=model, options=PLAIN)
    x = torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a call ran eagerly")
        for at in range(20):
            kind[0] = f"kind {at}"
            torch.testing.assert_close(step(x), train(x))
            step(x)
    assert len(step.recaptures) >= 10
