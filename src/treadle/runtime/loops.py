"""A loop of an artifact: its functions are programs, which the host runs round by round.

::

    i, h  =  treadle.while_loop([i0, h0], [n, w], ...)        bodies: condition, body
    grads =  treadle.while_loop_backward([g], [i0, h0], ...)  bodies: condition, body, gradients

The programs take turns, and are there as long as the loop runs: their arenas, which the plan counts
as what the call works in, go with its last round.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor

from treadle.util import rounds
from treadle.util.rounds import Function

Running = Callable[[], AbstractContextManager[Function]]
"""While entered, a function that runs as often as it is called."""


@final
class Loop:
    """Runs a loop on the arguments of its operator. ``programs``: those of its bodies."""

    __slots__ = ("programs",)

    def __init__(self, programs: Sequence[Running]) -> None:
        self.programs = programs

    def __call__(self, *args: Any) -> list[Tensor]:
        with contextlib.ExitStack() as running:
            functions = [running.enter_context(each()) for each in self.programs]
            match functions:
                case [goes_on, body]:
                    carried, others, *_ = args
                    return rounds.run(goes_on, body, carried, others)
                case [goes_on, body, backward]:
                    grads, carried, others, flags, *_ = args
                    return rounds.run_backward(
                        goes_on, body, backward, grads, carried, others, flags
                    )
                case _:
                    raise AssertionError(self.programs)


__all__ = ["Loop", "Running"]
