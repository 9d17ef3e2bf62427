"""What an entry of ``docs/reference/errors.md`` shows, as a program: with its example it raises the
code, with its remedy it runs."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import treadle
from contract.contract_help import training
from treadle.tools.cli import main

Program = Callable[[bool, Path], object]
"""Given whether the remedy is followed, and an empty folder."""


@dataclass(frozen=True)
class Shown:
    """``example`` and ``remedy`` are pieces of the entry that ``program`` acts out."""

    code: str
    example: str
    remedy: str
    program: Program

    @property
    def name(self) -> str:
        return f"{self.code} {self.program.__name__}"


SHOWN: list[Shown] = []


def shows(code: str, example: str, remedy: str) -> Callable[[Program], Program]:
    """Register a program for an entry."""

    def register(program: Program) -> Program:
        SHOWN.append(Shown(code, example, remedy, program))
        return program

    return register


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def compiled(step: Callable[..., Any], **given: Any) -> Any:
    """With PyTorch's kernels, unless options are given: it is not about generated code."""
    return treadle.compile(step, **{"options": treadle.Options(codegen=False), **given})


def run(step: Callable[..., Any], *batch: Any, **given: Any) -> Any:
    """Compile a step and call it; it then agrees with eager."""
    made = compiled(step, **given)
    result = made(*batch)
    assert made.verify([batch]) is None
    return result


def train(
    loss_of: Callable[..., Tensor],
    *batch: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **given: Any,
) -> Any:
    """The ordinary step with this loss, compiled and called."""
    chosen = optimizer or sgd(model)
    return run(training(loss_of, chosen), *batch, model=model, optimizer=chosen, **given)


class EagerSGD(torch.optim.Optimizer):
    """An update that branches on values, so that no graph can have it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.abs().sum().item() > 0:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class CommandFailed(Exception):
    """With the code that a command printed."""

    def __init__(self, code: str, text: str) -> None:
        self.code, self.remedy = code, text.partition("remedy: ")[2]
        super().__init__(text)


def command(*words: object) -> None:
    """Run a command. ``CommandFailed`` where it prints an error; a ``no`` is an answer."""
    wrong = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(wrong):
        main([str(word) for word in words])
    code = re.search(r"\[(TR-\d{3})\]", wrong.getvalue())
    if code:
        raise CommandFailed(code[1], wrong.getvalue())
