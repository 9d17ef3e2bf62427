"""Whether passes preserve the results of a step: it runs on random inputs before and after each
pass.

::

    treadle: after Approximate(): loss has different results
    treadle: numbers are not compared: a check of the step fails on random inputs
"""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from treadle.compat.operators.operator_facts import Effect
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import effects_of, is_known
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.pass_observers import CheckNumbers
from treadle.graph.rewrite.passes import GraphPass, PassReport
from treadle.report.stages import Watcher
from treadle.util.errors import VerifyError
from treadle.util.expected import NotExpected


def made_up_inputs(step: StepGraph) -> list[Tensor]:
    """Inputs of a step, of its types: floats in ``0 .. 1``, integers that are zero, so that
    they are places in anything; the same each time."""
    generator = torch.Generator().manual_seed(0)
    return [_made_up(value_of(node), generator) for node in step.placeholders]


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = tuple(like.shape)
    tensor = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device)
    if not like.dtype.is_floating_point:
        return tensor.zero_()
    return tensor.copy_(torch.rand(shape, generator=generator))


def is_harmless(node: fx.Node) -> bool:
    """Whether a node may run on random numbers: it does nothing that is not known, and meets no
    other process."""
    return is_known(node) and not effects_of(node) & (Effect.UNKNOWN | Effect.COMMUNICATES)


class NumbersPrinter(Watcher):
    """Says which passes change numbers. A pass may: a product and a sum that round once, masks of
    another stream. A step that does not run on random inputs is not compared, nor is a
    step with users' operators: what they do with such numbers is not known."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._check: CheckNumbers | None = None

    def starts(self, step: StepGraph) -> None:
        self._check = None
        if self._is_foreign(step):
            return
        try:
            self._check = CheckNumbers(made_up_inputs(step))
            self._check.starts(step)
        except Exception as error:  # of any operation's
            self._stop(error)

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        if self._check is None or self._is_foreign(step):
            return
        try:
            self._check.ran(each, step, report)
        except VerifyError as error:
            self._say(f"treadle: {error.message}")
        except Exception as error:  # of any operation's
            self._stop(error)

    def _is_foreign(self, step: StepGraph) -> bool:
        """Whether the step may not run on random inputs; a pass may make it so."""
        foreign = next((node for node in step.graph.nodes if not is_harmless(node)), None)
        if foreign is not None:
            self._say(f"treadle: numbers are not compared: the step calls {foreign.target}")
            self._check = None
        return foreign is not None

    def _stop(self, error: Exception) -> None:
        expected = isinstance(error, NotExpected)
        why = "a check of the step fails on random inputs" if expected else str(error)
        self._say(f"treadle: numbers are not compared: {why}")
        self._check = None
