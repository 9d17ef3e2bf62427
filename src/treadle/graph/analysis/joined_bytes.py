"""Which bytes are visible to a caller, while values of a graph are replaced."""

from collections.abc import Sequence

from torch import Tensor, fx

from treadle.compat.tensors import storage_of
from treadle.graph.analysis.alias import storages
from treadle.graph.analysis.joined_storages import JoinedStorages
from treadle.graph.core.node_info import known_value, value_of
from treadle.graph.core.types import tensors_in
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

Replaced = tuple[fx.Node, fx.Node]
"""A value, and what all will read instead."""


class JoinedBytes:
    """Keeps replacements from making outputs share bytes with inputs or with each other that did
    not share them before; follows what the replacements so far have joined."""

    def __init__(self, graph: fx.Graph) -> None:
        self._alive = [known_value(node) for node in graph.nodes]  # storages are told by address
        (output,) = graph.find_nodes(op="output")
        self._returned = set(output.all_input_nodes)
        self._held = {storage for node in self._returned for storage in storages(value_of(node))}
        holders = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        self._fixed = {storage for node in holders for storage in storages(value_of(node))}
        self._joined = JoinedStorages()

    def require_no_new(self, replaced: Sequence[Replaced]) -> None:
        """``NoMatch`` if these replacements, done together, would make a new alias."""
        seen: dict[int, int] = {}
        for old, new in replaced:
            if old in self._returned:
                require(new.op == "call_function", NoMatch, f"{old} is an output, {new} an input")
                require(new not in self._returned, NoMatch, f"{old} and {new} are both outputs")
            for left, right in self._pairs(old, new):
                if left != right and left in self._held:
                    words = f"{old} is returned and would share the bytes of {new}, which is"
                    require(right not in self._fixed, NoMatch, f"{words} an input")
                    require(right not in self._held, NoMatch, f"{words} returned too")
                    alone = seen.setdefault(right, left) == left
                    require(alone, NoMatch, "two outputs would share bytes that did not")

    def join(self, old: fx.Node, new: fx.Node) -> bool:
        """``new`` stands for ``old`` from now on: what is said of one is said of both. Whether
        bytes are others now."""
        self._alive.append(known_value(new))
        if old in self._returned:
            self._returned.remove(old)
            self._returned.add(new)
        moved = False
        for left, right in self._pairs(old, new):
            left = self._joined.root(left)
            if left == right:
                continue
            self._joined.join(left, right)
            moved = True
            for roots in (self._held, self._fixed):
                if left in roots:
                    roots.add(right)
        return moved

    def _pairs(self, old: fx.Node, new: fx.Node) -> list[tuple[int, int]]:
        """Storages of the two, tensor by tensor."""
        both = zip(tensors_in(value_of(old)), tensors_in(value_of(new)), strict=True)
        return [(self._storage(left), self._storage(right)) for left, right in both]

    def _storage(self, tensor: Tensor) -> int:
        return self._joined.root(storage_of(tensor))
