"""Mistakes in working steps: the error accuses the right line, is eager's kind, has a remedy that
works when it is followed, and nothing is lost by it."""

import contextlib
import copy
import io
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import treadle
from contract.contract_help import said
from contract.mistakes import HELD, MISTAKES, Mistake
from contract.working_steps import MAKE, Points, Working
from treadle.options import Options

USERS = ("working_steps.py", "mistakes.py")
OF_PYTHON = ("missing", "more", "keyword", "twice")
"""Calls that do not fit the step: Python's own error, which names no line of the step's."""
NO_CODES = ("TR-000", "TR-199", "TR-900", "")
EACH = 6
"""Every sixth mistake is made in a step, another sixth in the next step."""


def mistakes_of(nth: int, made: Working) -> list[str]:
    chosen = [name for at, name in enumerate(MISTAKES) if (at + nth) % EACH == 0]
    return [name for name in chosen if MISTAKES[name].of(made)]


def state_of(made: Working) -> dict[str, Any]:
    """All that a step may change: tensors are copies."""
    model, state = made.model, dict[str, Any]()
    state |= {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        state[f"{name}.grad"] = None if grad is None else grad.clone()
    for at, optimizer in enumerate(made.optimizers):
        for number, entry in optimizer.state_dict()["state"].items():
            state |= {f"{at}.{number}.{name}": copy.copy(v) for name, v in entry.items()}
        state[f"{at}.groups"] = repr(optimizer.state_dict()["param_groups"])
    state["rng"] = torch.get_rng_state()
    return state


def assert_same(one: dict[str, Any], other: dict[str, Any], why: str, **close: float) -> None:
    assert one.keys() == other.keys(), why
    for name, value in one.items():
        if isinstance(value, Tensor):
            close = close or {"rtol": 0, "atol": 0}
            torch.testing.assert_close(other[name], value, equal_nan=True, **close)
        else:
            assert value == other[name], (why, name)


@dataclass
class Outcome:
    result: Any
    error: Exception | None
    state: dict[str, Any]


class Pair:
    """A compiled step, and for each attempt a new twin in the same state for eager."""

    def __init__(self, name: str) -> None:
        self.name = name
        torch.manual_seed(0)
        self.made = MAKE[name]()
        self.step = treadle.compile(
            self.made.step,
            model=self.made.model,
            optimizer=self.made.optimizers,
            options=Options(codegen=False),
        )
        self.works()

    def works(self) -> None:
        """The step without a mistake is eager's."""
        eager, ours = self.attempt(Mistake())
        assert (eager.error, ours.error) == (None, None)
        assert_same(eager.state, ours.state, self.name, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.result, eager.result)

    def attempt(self, mistake: Mistake) -> tuple[Outcome, Outcome]:
        twin = self._twin()
        eager = self._run(twin, twin.step, mistake)
        torch.set_anomaly_enabled(False)
        return eager, self._run(self.made, self.step, mistake)

    def _run(self, made: Working, step: Any, mistake: Mistake) -> Outcome:
        batch = mistake.batch(*copy.deepcopy(made.batch))
        made.holder.points = Points(**mistake.points)
        torch.manual_seed(7)
        result, error = None, None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                result = step(*batch, **mistake.named)
        except Exception as raised:
            error = raised
        finally:
            made.holder.points = Points()
            HELD[0].clear()
        return Outcome(result, error, state_of(made))

    def _twin(self) -> Working:
        torch.manual_seed(0)
        twin, made = MAKE[self.name](), self.made
        twin.batch = made.batch
        twin.model.load_state_dict(made.model.state_dict())
        twin.model.train(made.model.training)
        for theirs, ours in zip(twin.model.parameters(), made.model.parameters(), strict=True):
            theirs.grad = copy.deepcopy(ours.grad)
        pairs = [*zip(twin.optimizers, made.optimizers, strict=True)]
        pairs += [*zip(twin.schedulers, made.schedulers, strict=True)]
        for theirs, ours in pairs:
            theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        return twin


def line_of(error: Exception) -> str:
    """The innermost of the user's lines that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if frame.filename.endswith(USERS)]
    return f"{users[-1].filename}:{users[-1].lineno}:" if users else "none"


def check_refused(mistake: str, eager: Exception, ours: Exception | None) -> None:
    assert ours is not None, f"eager refuses: {eager!r}"
    assert isinstance(ours, type(eager)), (eager, ours)
    if mistake in OF_PYTHON:
        assert str(ours) == str(eager)
        return
    code, where, remedy = said(ours)
    assert code.startswith("TR-")
    assert code not in NO_CODES, ours
    assert remedy, ours
    # an argument without values is found ahead of the step: the call is accused
    line = f"{__file__}:" if code == "TR-111" else line_of(eager)
    assert line in where, (line, ours)
    assert "StandIn" not in str(ours)


def check_refused_here(pair: Pair, mistake: Mistake, error: Exception) -> None:
    code, where, remedy = said(error)
    assert code not in NO_CODES, error
    assert any(f"{name}:" in where for name in USERS), error
    assert remedy, error
    assert mistake.fixed is not None, error
    eager, ours = pair.attempt(mistake.fixed)
    assert (eager.error, ours.error) == (None, None)
    assert_same(eager.state, ours.state, str(error), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nth", range(len(MAKE)), ids=MAKE)
def test_mistakes(nth):
    pair = Pair([*MAKE][nth])
    for name in mistakes_of(nth, pair.made):
        mistake, before = MISTAKES[name], state_of(pair.made)
        with warnings.catch_warnings(action="ignore"):
            eager, ours = pair.attempt(mistake)
        if ours.error is not None:
            torch.manual_seed(7)
            before["rng"] = torch.get_rng_state()
            assert_same(before, ours.state, f"{pair.name}, {name}: {ours.error}")
        if eager.error is not None:
            check_refused(name, eager.error, ours.error)
        elif ours.error is not None:
            check_refused_here(pair, mistake, ours.error)
        else:
            assert_same(eager.state, ours.state, f"{pair.name}, {name}", rtol=1e-4, atol=1e-5)
            assert_same({"": eager.result}, {"": ours.result}, name, rtol=1e-4, atol=1e-5)
        pair.made.model.train()
        if not all(map(_is_finite, pair.made.model.parameters())):
            pair = Pair(pair.name)  # eager's numbers were none
        pair.works()


def _is_finite(parameter: Tensor) -> bool:
    return bool(parameter.isfinite().all())


def test_there_are_two_hundred():
    torch.manual_seed(0)
    assert sum(len(mistakes_of(nth, make())) for nth, make in enumerate(MAKE.values())) >= 200
