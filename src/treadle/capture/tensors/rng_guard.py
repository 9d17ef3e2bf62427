"""Random generators while a step is traced.

PyTorch's (``RngGuard``): which generators are drawn from, and that none of them is seeded. Python's
and NumPy's (``PythonRngGuard``): that none is drawn from otherwise than ``host_draws`` knows, since
that happens once, when traced.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from treadle.capture.explain_errors import here
from treadle.capture.integrations.integration import GeneratorState
from treadle.capture.integrations.registry import SHARED_GENERATORS, table_of
from treadle.capture.python_state.changes import LateError, RunPlaces
from treadle.compat.fake import is_traced
from treadle.targets.registry import target_for
from treadle.util.errors import CaptureError

_WORDS = 24, 8  # where the words of a CPU's generator begin, and bytes of each
_BLOCK = 4  # a GPU's offset counts in these
_DEEP = 4  # containers within containers

_GENERATORS = table_of(lambda integration: integration.generators)
_ARRAYS = tuple(table_of(lambda integration: integration.arrays))


@dataclass(frozen=True, slots=True)
class _Kept:
    generator: Generator
    state: Tensor | None  # before the run, until it is over
    marked: bytes  # during the run
    own: bool  # the user's


class RngGuard:
    """The generators that a traced run may draw from, each in a unique state.

    A traced draw advances nothing, so a changed state was set by the step, and later calls would
    have to set it again.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self.drawn: list[Generator] = []  # of the user's, in the order in which they are numbered

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the generators are watched; afterwards all are restored."""
        self._keep(torch.default_generator, own=False)
        if torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                self._keep(generator, own=False)
        try:
            yield
        finally:
            for at, kept in self._kept.items():
                if kept.state is not None:
                    kept.generator.set_state(kept.state)
                self._kept[at] = replace(kept, state=None)

    def meet(self, value: object, depth: int = 0) -> None:
        """Meet a value that the step can reach; generators in it may be drawn from."""
        if isinstance(value, Generator):
            self._keep(value, own=True)
        elif isinstance(value, dict | list | tuple) and depth < _DEEP:
            entries = value.values() if isinstance(value, dict) else value
            for entry in entries:
                self.meet(entry, depth + 1)

    def _keep(self, generator: Generator, *, own: bool) -> None:
        if id(generator) not in self._kept:
            self._kept[id(generator)] = _marked(generator, own)

    def check(self) -> None:
        """``CaptureError`` TR-120 if the step has seeded a generator, or put a state into one."""
        for value in self._kept.values():
            if self.is_seeded(value.generator):
                error = seeds("a generator" if value.own else "PyTorch's random generator")
                raise error.seen_by(functools.partial(_is_seeded, value.generator))

    def is_seeded(self, generator: Generator) -> bool:
        """Whether the step has changed its state."""
        kept = self._kept.get(id(generator))
        return kept is not None and _bytes(generator.get_state()) != kept.marked

    def refuse_state(self, value: object, where: str = "") -> None:
        """``CaptureError`` TR-120 for a tensor that is the state of a generator: each call would
        see the state of the capture."""
        if not isinstance(value, Tensor) or is_traced(value):
            return
        if value.dtype is not torch.uint8 or not value.is_cpu:
            return
        if any(_bytes(value) == kept.marked for kept in self._kept.values()):
            raise LateError(
                "the step stores or computes with the state of a random generator",
                code="TR-120",
                where=where,
                remedy="read the state outside the step",
            )

    def number(self, generator: Generator) -> int | None:
        """Which of ``drawn`` it is; ``None`` for a device's own. ``CaptureError`` TR-121 for one
        that was not there before the run."""
        for at, draw in enumerate(self.drawn):
            if draw is generator:
                return at
        kept = self._kept.get(id(generator))
        if kept is None:
            raise CaptureError(
                "the step draws from a generator that it created, or that treadle cannot find "
                "from the step's inputs: later calls would continue with this one",
                code="TR-121",
                where=here(),
                remedy=(
                    "create it outside the step, and pass it as an argument, or keep it in a "
                    "variable or attribute that the step reads"
                ),
            )
        if not kept.own:
            return None
        self.drawn.append(generator)
        return len(self.drawn) - 1


def seeds(owner: str, where: str = "") -> LateError:
    """TR-120."""
    return LateError(
        f"the step seeds {owner} or sets its state: this would happen during capture, and not at "
        "later calls",
        code="TR-120",
        where=where,
        remedy="seed before the call; to get the same noise at every call, pass it as a tensor",
    )


def _marked(generator: Generator, own: bool) -> _Kept:
    """``generator`` in a state of its own: the same seed, other words."""
    before = generator.get_state()
    state = generator.get_state()
    raw = (ctypes.c_uint8 * state.numel()).from_address(state.data_ptr())
    if target_for(generator.device).sequential_rng:
        start, width = _WORDS
        for word in range(1, 9):
            raw[start + width * word] ^= 0x5A
    else:
        offset = ctypes.c_uint64.from_address(state.data_ptr() + 8)
        offset.value += _BLOCK * 0x5A5A5A
    generator.set_state(state)
    return _Kept(generator, before, _bytes(generator.get_state()), own)


def _is_seeded(generator: Generator, run: RunPlaces) -> tuple[bool]:
    return (run.is_seeded(generator),)


def _bytes(state: Tensor) -> bytes:
    """Without an operation that would be traced."""
    return ctypes.string_at(state.data_ptr(), state.numel())


class PythonRngGuard:
    """The states of the global generators before a traced run, and of those it may hold."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, object, GeneratorState]] = []  # the global ones first
        self._now: dict[str, object] = {}  # where draws that are known have left a global one
        self._is_foreign = False  # whether others were made between those
        for generator in SHARED_GENERATORS:
            self._keep(generator.label, generator.state)

    def meet(self, value: object, name: str) -> None:
        """Meet another object that the step can reach, with the user's name for it."""
        if any(value is shared.generator for shared in SHARED_GENERATORS):
            return  # which are looked after already
        for kind, state_of in _GENERATORS.items():
            if isinstance(value, kind) and (state := state_of(value)) is not None:
                self._keep(name, state)

    def _keep(self, name: str, state: GeneratorState) -> None:
        self._kept.append((name, state.get(), state))

    def begins(self) -> None:
        """Before a draw that is made again at every call."""
        self._is_foreign |= any(self._differing())

    def drawn(self) -> None:
        """After it."""
        shared = self._kept[: len(SHARED_GENERATORS)]
        self._now |= {name: state.get() for name, _, state in shared}

    def _differing(self) -> Iterator[str]:
        for name, before, state in self._kept:
            if not _same(state.get(), self._now.get(name, before)):
                yield name

    def is_used_otherwise(self) -> bool:
        """Whether one of them has been used otherwise than by draws that are made again."""
        return self._is_foreign or any(self._differing())

    def refuse(self, *, decides: bool, where: str) -> None:
        """``CaptureError`` TR-119 if one of them has been used otherwise than by draws that are
        made again; ``decides``: if those decided anything, which ``where`` made."""
        names = [*self._differing()]
        if decides or self._is_foreign or names:
            name = names[0] if names else "Python's or NumPy's random numbers"
            raise LateError(
                f"the step draws from {name}, and the numbers decide what it computes: later "
                "calls would do the same",
                code="TR-119",
                where="" if self._is_foreign or names else where,
                remedy=(
                    "draw with torch (torch.rand, torch.randperm), or pass the numbers as "
                    "tensors; numbers and arrays of random.… and numpy.random.… that only enter "
                    "arithmetic with tensors are drawn at every call; comparisons, integers and "
                    "random.choice make one variant per outcome"
                ),
            ).seen_by(lambda run: (run.draws_otherwise(),))

    def restore(self) -> None:
        """Restore all states; how the generators were used is still known."""
        self._is_foreign = self.is_used_otherwise()
        self._now.clear()
        for _, before, state in self._kept:
            state.put(before)


def _same(one: object, other: Any) -> bool:
    """Equality of nested tuples and dicts with arrays in them."""
    if isinstance(one, _ARRAYS):
        return bool((one == other).all())
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


__all__ = ["PythonRngGuard", "RngGuard", "seeds"]
