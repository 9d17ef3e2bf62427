"""``FILE:FUNCTION`` on the command line: what a user's file says is to be trained."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from treadle.capture.torch_private import fake_mode_of
from treadle.util.errors import PlanError


@dataclass(frozen=True, slots=True)
class Job:
    """A step, what it trains, and one batch for it."""

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    batch: tuple[Any, ...]


class Target:
    """A function without arguments that returns ``(step, model, optimizer, batch)``."""

    def __init__(self, text: str) -> None:
        path, _, name = text.rpartition(":")
        if not path or not Path(path).is_file():
            raise PlanError(
                f"{text!r} does not name a function in a file",
                code="TR-203",
                remedy="write FILE:FUNCTION; the function returns (step, model, optimizer, batch)",
            )
        self.text = text
        self._function = vars(_module(Path(path))).get(name)
        if not callable(self._function):
            raise PlanError(
                f"{path} has no function {name!r}",
                code="TR-203",
                remedy="write one that returns (step, model, optimizer, batch)",
            )

    def make(self, *, seed: int = 0, fake: bool = False) -> Job:
        """A new one from this seed, each time. ``fake``: nothing is allocated."""
        torch.manual_seed(seed)
        assert callable(self._function)
        if fake:
            with fake_mode_of([]):
                made = self._function()
        else:
            made = self._function()
        if not isinstance(made, tuple) or len(made) != 4:
            raise PlanError(
                f"{self.text} returned {type(made).__name__}, not four things",
                code="TR-203",
                remedy="return (step, model, optimizer, batch); batch is a tuple of arguments",
            )
        step, model, optimizer, batch = made
        return Job(step, model, optimizer, tuple(batch) if isinstance(batch, list) else batch)


def _module(path: Path) -> ModuleType:
    """The file as a module; files beside it can be imported, as if it were run."""
    spec = importlib.util.spec_from_file_location(f"treadle_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{path} is no Python file", code="TR-203", remedy="write FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module
