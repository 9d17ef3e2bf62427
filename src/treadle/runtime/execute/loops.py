"""A loop of an artifact: its functions are programs, which the host runs iteration by iteration.

::

    i, h  =  treadle.while_loop([i0, h0], [n, w], ...)        bodies: condition, body
    grads =  treadle.while_loop_backward([g], [i0, h0], ...)  bodies: condition, body, gradients
    h, y  =  treadle.scan([h0], [xs], [w], ...)           bodies: body
    grads =  treadle.scan_backward([g], [starts], [xs], [w], ...)         bodies: gradients
    y     =  treadle.branch(taken, [x, w], ...)               bodies: yes, no; one of them runs

The programs share one arena, which the plan counts as the workspace of the call: it exists as long
as the loop runs.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

from torch import Tensor

from treadle.runtime.execute.bindings import laid_out, same_strides
from treadle.runtime.store.artifact import Artifact
from treadle.util import rounds
from treadle.util.memory import with_own_memory
from treadle.util.rounds import Function


class Repeatable(Protocol):
    """A program that a loop runs; see ``Executable``."""

    artifact: Artifact

    def repeated(self) -> AbstractContextManager[Function]:
        """A context that gives a function which runs the program at each call."""
        ...


@final
class Loop:
    """Runs a loop on the arguments of its operator. ``programs``: those of its bodies, by name."""

    __slots__ = ("bodies", "programs")

    def __init__(self, bodies: Sequence[str], programs: Mapping[str, Repeatable]) -> None:
        """``bodies``: the names in their order; two may be equal."""
        self.bodies = bodies
        own = {name: programs[name] for name in bodies}
        self.programs = sorted(own.items(), key=_arena, reverse=True)  # it is large enough at once

    def __call__(self, *args: Any) -> list[Tensor]:
        with contextlib.ExitStack() as running:
            entered = {
                name: running.enter_context(program.repeated()) for name, program in self.programs
            }
            match [entered[name] for name in self.bodies]:
                case [goes_on, body]:
                    carried, others, *_ = args
                    return rounds.run(goes_on, body, carried, others)
                case [goes_on, body, backward]:
                    grads, carried, others, flags, *_ = args
                    return rounds.run_backward(
                        goes_on, body, backward, grads, carried, others, flags
                    )
                case _:
                    raise AssertionError(self.bodies)


@final
class Scan:
    """Runs a loop over slices on the arguments of ``treadle.scan``, or of its backward."""

    __slots__ = ("program",)

    def __init__(self, bodies: Sequence[str], programs: Mapping[str, Repeatable]) -> None:
        """``bodies``: the name of the program of a slice."""
        (name,) = bodies
        self.program = programs[name]

    def __call__(self, *args: Any) -> list[Tensor]:
        with self.program.repeated() as run:
            match args:
                case [carried, slices, others, _, _, reverse, _, backward]:
                    keep = bool(backward)
                    return rounds.scan(run, carried, slices, others, reverse=reverse, keep=keep)
                case [grads, starts, slices, others, flags, reverse, _]:
                    return rounds.scan_backward(
                        run, grads, starts, slices, others, flags, reverse=reverse
                    )
                case _:
                    raise AssertionError(args)


@final
class Branch:
    """Runs one of two programs, as its first argument says; the host waits for that value."""

    __slots__ = ("no", "yes")

    def __init__(self, bodies: Sequence[str], programs: Mapping[str, Repeatable]) -> None:
        """``bodies``: the name of the program for a true value, and that of the other one."""
        self.yes, self.no = (programs[name] for name in bodies)

    def __call__(self, taken: Tensor, operands: Sequence[Tensor], *_: str) -> list[Tensor]:
        program = self.yes if taken.item() else self.no
        artifact = program.artifact
        specs = [artifact.buffers[name] for name in artifact.inputs]
        given = [
            tensor if same_strides(tensor, spec) else laid_out(tensor, spec)
            for tensor, spec in zip(operands, specs, strict=True)
        ]
        with program.repeated() as run:
            return with_own_memory(run(given), operands)


RUNNERS: Mapping[
    str, Callable[[Sequence[str], Mapping[str, Repeatable]], Callable[..., object]]
] = {
    "treadle.while_loop.default": Loop,
    "treadle.while_loop_backward.default": Loop,
    "treadle.scan.default": Scan,
    "treadle.scan_backward.default": Scan,
    "treadle.branch.default": Branch,
}
"""The runner of each operator whose calls have functions of their own."""


def _arena(program: tuple[str, Repeatable]) -> int:
    return program[1].artifact.arena_bytes
