"""Passes that visit one node after the other, for searches that are not patterns."""

import abc
from collections.abc import Iterable
from typing import Generic, TypeVar

from torch import fx

from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import refresh
from treadle.graph.rewrite.passes import GraphPass
from treadle.util.refusals import NoMatch, attempt

Found = TypeVar("Found")


class NodeRewrite(GraphPass, Generic[Found]):
    """A pass of two parts, as a rule has them: ``find`` only looks, ``replace`` only changes."""

    @abc.abstractmethod
    def find(self, node: fx.Node) -> Found:
        """What is to be replaced where it ends in ``node``; raises ``NoMatch`` in words."""

    @abc.abstractmethod
    def replace(self, found: Found) -> Iterable[fx.Node]:
        """Change the graph; the nodes that are new, or whose values are other ones now."""

    def run(self, step: StepGraph) -> int:
        count, changed = 0, list[fx.Node]()
        for node in list(step.graph.nodes):
            found = attempt(self.find, node)
            if not isinstance(found, NoMatch):
                changed += self.replace(found)
                count += 1
        refresh(step.graph, changed)
        return count
