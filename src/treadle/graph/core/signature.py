"""What a step's inputs and outputs stand for. Roles are stored here and nowhere else."""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import fx

from treadle.graph.core.copying import copied


class Role(enum.StrEnum):
    """What an input of the step is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"  # optimizer state: moments, step counters
    GRADIENT = "gradient"  # a ``.grad`` that exists when the step begins
    BATCH = "batch"
    SCALAR = "scalar"  # a hyper-parameter read at every call, as a 0-dim float64 tensor
    CARRIED = "carried"  # what the call before left for this one; the step's own
    TANGENT = "tangent"  # of a backward by itself: a gradient that the caller brings
    SAVED = "saved"  # of a backward by itself: what the forward kept for it
    SEED = "seed"  # of a random generator, or an offset in its sequence


@dataclass(frozen=True, slots=True)
class Input:
    """One placeholder. ``name`` is the user's: ``wte.weight``, ``adamw.exp_avg[wte.weight]``.
    ``sharded``: whether it is what this rank has of a DTensor, or its rows of divided state;
    ``uneven``: of such a part, whether those of other ranks may be larger or smaller."""

    role: Role
    name: str
    sharded: bool = False
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One returned value: a result for the caller, or the new value of ``inputs[writes]``."""

    name: str
    writes: int | None = None  # the index of the input this value is written back to


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs in placeholder order, outputs in the order of the return."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]


@final
class StepGraph:
    """A functional ATen graph of one training step, with its signature. ``graph``: the graph, or a
    function that builds it when it is first needed; ``history``: the kinds of passes that ran.

    Every node has a value (fake tensor, or tuple of them); nodes other than placeholders and the
    output have a phase, and may have a source line and a module path: see ``NodeInfo``.
    The output node's only argument is a tuple, one entry per ``signature.outputs``.
    """

    __slots__ = ("_graph", "history", "signature")

    def __init__(
        self,
        graph: fx.Graph | Callable[[], fx.Graph],
        signature: Signature,
        history: Iterable[type[Any]] = (),
    ) -> None:
        self._graph = graph
        self.signature = signature
        self.history = list(history)

    @property
    def graph(self) -> fx.Graph:
        """The graph itself."""
        if not isinstance(self._graph, fx.Graph):
            self._graph = self._graph()
        return self._graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._graph = graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs, in the signature's order."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def returned(self) -> tuple[fx.Node | None, ...]:
        """The returned values, one per output; ``None`` where the step returns a constant None."""
        (output,) = self.graph.find_nodes(op="output")
        return tuple(output.args[0])

    def inputs(self) -> Iterator[tuple[fx.Node, Input]]:
        """Each input's node with its entry of the signature."""
        return zip(self.placeholders, self.signature.inputs, strict=True)

    def outputs(self) -> Iterator[tuple[fx.Node | None, Output]]:
        """Each returned value, ``None`` for a constant None, with its entry of the signature."""
        return zip(self.returned, self.signature.outputs, strict=True)

    def copy(self) -> "StepGraph":
        """An independent copy over the same fake values; rewriting one does not change the
        other."""
        graph, _ = copied(self.graph)
        return StepGraph(graph, self.signature, self.history)
