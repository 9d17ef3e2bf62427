"""Tensors from outside a step that the run meets: in an object, a global variable, a closure."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.tensors.tensor_effects import GivenTensor, HeldTensor
from treadle.compat.tracing import held_input


@final
class HeldTensors:
    """The tensors of one run, which become inputs when they are met."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Tensor, GivenTensor]] = {}  # which keeps the user's alive

    def hold(self, tensor: Tensor) -> Tensor:
        """The traced tensor for one that was not met before."""
        traced, find = held_input(tensor).requires_grad_(tensor.requires_grad), HeldTensor(tensor)
        entry = GivenTensor.of("a tensor", find, tensor, traced, is_argument=False)
        self._by_id[id(tensor)] = tensor, entry
        return traced

    def traced_for(self, tensor: Tensor) -> Tensor | None:
        """The traced tensor for one that was met before."""
        known = self._by_id.get(id(tensor))
        return None if known is None else known[1].traced

    def entries(self) -> list[GivenTensor]:
        """Their properties before the step."""
        return [entry for _, entry in self._by_id.values()]

    def find(self, leaf: object) -> GivenTensor | None:
        """That of a tensor of the user's, or of what is traced for it."""
        for tensor, entry in self._by_id.values():
            if leaf is tensor or leaf is entry.traced:
                return entry
        return None

    def placed(self, places: Mapping[int, Location | StateLocation]) -> None:
        """Set where a call finds each of them; ``places``: by their ids."""
        for tensor, entry in self._by_id.values():
            if id(tensor) in places and isinstance(entry.find, HeldTensor):
                entry.find.found_at(places[id(tensor)])
