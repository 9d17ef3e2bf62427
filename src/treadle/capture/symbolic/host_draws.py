"""Numbers that a step draws from Python's and NumPy's own generators: drawn again at every call,
in the same order, before the launch.

::

    lam = np.random.beta(a, a)                the number is an input; each call draws its own
    perm = np.random.permutation(n)           likewise an array, of which a tensor is made

    if random.random() < 0.5: ...             a decision: a variant for each way that calls go
    n = random.randint(1, 3); x[:n]           likewise for each integer, and for each place of
                                              ``random.choice([...])``

To find the variant that serves a call, the call draws its numbers, and the generators are then
restored. Other branches on random numbers during capture (on a float, on a shuffled list) raise
TR-119. So do numbers from the user's own generators: then the state of the generator is not the one
after the known draws. Such a state also says that a run has drawn by a function which stands
elsewhere than in its module (``from random import random``); these places are then looked for.
"""

import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from treadle.capture.explain_errors import here
from treadle.capture.integrations.integration import SharedGenerator
from treadle.capture.integrations.registry import SHARED_GENERATORS
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.plain_values import is_real, is_whole
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf, is_numeric
from treadle.capture.symbolic.computations import NumberDecision
from treadle.capture.symbolic.held_functions import (
    HeldFunction,
    functions_among,
    held_functions,
    instead_of,
)
from treadle.capture.symbolic.numbers import Number, Uses, plain

_NO_DRAWS = frozenset({"seed", "setstate", "getstate", "set_state", "get_state", "shuffle"})
_LABEL = "a random number"


def states() -> list[object]:
    """The states of all generators."""
    return [shared.state.get() for shared in SHARED_GENERATORS]


def put_states(kept: Sequence[object]) -> None:
    """Restore the states."""
    for shared, state in zip(SHARED_GENERATORS, kept, strict=True):
        shared.state.put(state)


def _drawing() -> Iterator[tuple[SharedGenerator, str, Callable[..., object]]]:
    """The functions of the modules that draw, by their names there."""
    for shared in SHARED_GENERATORS:
        for name, value in list(vars(shared.module).items()):
            bound = callable(value) and getattr(value, "__self__", None) is shared.generator
            if bound and name not in _NO_DRAWS:
                yield shared, name, value


def held_draws(met: Iterable[object]) -> list[HeldFunction]:
    """The places outside their modules that have such functions. ``met``: objects to search,
    including the variables of functions among them; the garbage collector does not list objects
    that a program has frozen."""
    functions = {value: name for _, name, value in _drawing()}
    met = list(met)
    variables = (function.__globals__ for function in functions_among(met))
    return [*held_functions([*met, *variables, *gc.get_referrers(*functions)], functions)]


@final
@dataclass(frozen=True, slots=True)
class _Draw:
    function: Callable[..., object]
    args: tuple[object, ...]
    named: dict[str, object]
    where: str


@final
@dataclass(slots=True, eq=False)
class HostDraws:
    """The draws of a run, in order. ``begins`` and ``drawn`` are called around each of them.
    ``held``: places beside the modules in which functions that draw stand."""

    uses: Uses
    held: Sequence[HeldFunction] = ()
    begins: Callable[[], None] = lambda: None
    drawn: Callable[[], None] = lambda: None
    _draws: list[_Draw] = field(default_factory=list[_Draw])
    _values: list[Any] = field(default_factory=list[Any])
    _before: list[object] | None = None

    def __bool__(self) -> bool:
        return bool(self._draws)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, the functions of the modules return stand-ins for numbers and arrays."""
        recording: dict[Callable[..., object], Callable[..., object]] = {}
        with ExitStack() as undo:
            for shared, name, value in _drawing():
                recording[value] = self._recording(value)
                undo.callback(setattr, shared.module, name, value)
                setattr(shared.module, name, recording[value])
            undo.enter_context(instead_of(self.held, recording))
            yield

    def decides(self) -> bool:
        """Whether a number that was drawn decided anything."""
        roots = self.uses.needed | self.uses.decisions.roots()
        return any(self._root(at) in roots for at in range(len(self._draws)))

    def refuses(self) -> bool:
        """Whether the graph depends on a drawn value of which there may be any number."""
        return not all(map(self._is_whole, self._needed()))

    def refused_line(self) -> str:
        """The line of the first such draw."""
        return next((self._draws[at].where for at in self._needed() if not self._is_whole(at)), "")

    def _is_whole(self, at: int) -> bool:
        return is_whole(self._values[at])

    def decisions(self) -> list[NumberDecision]:
        """Decisions that the drawn integers on which the graph depends are unchanged."""
        values = self._values
        return [
            NumberDecision(
                functools.partial(values.__getitem__, at),
                values[at],
                _LABEL,
                self._draws[at].where,
                frozenset({self._root(at)}),
            )
            for at in self._needed()
        ]

    @contextmanager
    def foreseen(self) -> Iterator[None]:
        """Inside, the numbers are those that a call would draw now. Afterwards the generators are
        restored."""
        if not self._draws:
            yield
            return
        before = states()
        try:
            self._values[:] = [draw.function(*draw.args, **draw.named) for draw in self._draws]
            yield
        finally:
            put_states(before)

    def _needed(self) -> list[int]:
        return [at for at in range(len(self._draws)) if self._root(at) in self.uses.needed]

    def draw(self) -> None:
        """Draw for a call."""
        if self._draws:
            self._before = states()
            self._values[:] = [
                earlier.function(*earlier.args, **earlier.named) for earlier in self._draws
            ]

    def happened(self) -> None:
        """The call for which they were drawn has succeeded."""
        self._before = None

    def undo(self) -> None:
        """Restore the generators, because the call has not happened."""
        if self._before is not None:
            put_states(self._before)
            self._before = None

    def _root(self, at: int) -> tuple[str, int, int]:
        return "draw", id(self), at

    def _recording(self, original: Callable[..., Any]) -> Callable[..., object]:
        is_choice = any(original == shared.choice for shared in SHARED_GENERATORS)

        def call(*args: object, **named: object) -> object:
            if code_owner(sys._getframe(1).f_code.co_filename) < CodeOwner.INSTALLED:
                return original(*args, **named)
            return drawn(*args, **named)

        def drawn(*args: object, **named: object) -> Any:
            args, named = plain(args), plain(named)
            if is_choice and len(args) == 1 and not named:
                entries: Any = args[0]
                if not all(map(is_real, entries)):  # an index takes as much of the stream
                    return entries[operator.index(drawn(range(len(entries))))]
            self.begins()
            value = original(*args, **named)
            if not any(test(value) for test in (is_real, is_numeric)):
                return value
            self.drawn()
            at, values = len(self._draws), self._values
            self._draws.append(_Draw(original, args, named, here()))
            values.append(value)
            roots = frozenset({self._root(at)})
            self.uses.decisions.labels[self._root(at)] = _LABEL
            if is_real(value):
                return Number(value, lambda: values[at], roots, self.uses, scales=True)
            return ArrayLeaf(value, lambda: values[at], roots, self.uses)

        return call
