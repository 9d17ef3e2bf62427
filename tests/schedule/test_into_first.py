"""Library calls that go on in the bytes of their first operand, where nobody needs it any more."""

import pytest
import torch
from torch import nn

import treadle
from testing import trace
from treadle.loop.program import Call
from treadle.lower.graph import lower
from treadle.schedule.plan import schedule

N = 23
X, A, B, ROWS = torch.randn(N, 5), torch.randn(N, 7), torch.randn(7, 5), torch.randn(3, 5)
PLACES = torch.tensor([4, 1, 11])
EVERYWHERE = torch.randint(0, N, (3, 5))

CALLS = {
    "addmm": lambda x, a, b, rows, at, every: torch.addmm(x, a, b),
    "baddbmm": lambda x, a, b, rows, at, every: torch.baddbmm(x[None].neg(), a[None], b[None])[0],
    "scatter": lambda x, a, b, rows, at, every: x.scatter(0, every, 2.0),
    "scatter_add": lambda x, a, b, rows, at, every: x.scatter_add(0, every, rows),
    "scatter_reduce": lambda x, a, b, rows, at, every: x.scatter_reduce(0, every, rows, "amax"),
    "index_add": lambda x, a, b, rows, at, every: x.index_add(0, at, rows, alpha=2),
    "index_copy": lambda x, a, b, rows, at, every: x.index_copy(0, at, rows),
}
OPERANDS = (X, A, B, ROWS, PLACES, EVERYWHERE)


def places(program):
    """Where the first operand of the only call is, and where its result."""
    plan = schedule(lower(trace(program, *OPERANDS)))
    (call,) = (step for step in plan.steps if isinstance(step, Call))
    return plan.offsets.get(call.args[0].buffer), plan.offsets[call.outputs[0]]


@pytest.mark.parametrize("name", CALLS)
def test_the_result_takes_over_the_bytes(name):
    def program(x, a, b, rows, at, every):
        return CALLS[name](x.exp(), a, b, rows, at, every).sin()

    operand, result = places(program)
    assert operand == result
    step = treadle.compile(program, model=nn.Linear(1, 1))
    for _ in range(2):
        torch.testing.assert_close(step(*OPERANDS), program(*OPERANDS))


KEPT = {
    "read later": lambda x, a, b: torch.addmm(y := x.exp(), a, b).sin() + y,
    "an input": lambda x, a, b: torch.addmm(x, a, b).sin(),
    "stretched": lambda x, a, b: torch.addmm(x[:1].exp(), a, b).sin(),
    "a factor as well": lambda x, a, b: torch.addmm(y := (a @ b)[:5].tanh(), y, y).sin(),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_first_operand_stays(name):
    def program(x, a, b):
        return KEPT[name](x, a, b)

    plan = schedule(lower(trace(program, X, A, B)))
    call = [step for step in plan.steps if isinstance(step, Call)][-1]
    assert plan.offsets.get(call.args[0].buffer) != plan.offsets[call.outputs[0]]
    step = treadle.compile(program, model=nn.Linear(1, 1))
    for _ in range(2):
        torch.testing.assert_close(step(X, A, B), program(X, A, B))
