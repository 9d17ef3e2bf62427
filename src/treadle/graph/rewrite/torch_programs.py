"""Rules whose programs are ordinary PyTorch functions: traced, for the types that they meet.

A function becomes operations only for given shapes: ``x @ y`` is one product of matrices, or a few
views around a batched one; a view has sizes in its arguments. So examples define which variants to
search, without their constants. If such a variant is found, the function is traced again with the
types at that place, and must equal the nodes there, including constants.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from treadle.compat.tracing import traced
from treadle.graph.core.operators import operand_of
from treadle.graph.rewrite.inline import traced_program
from treadle.graph.rewrite.matching import PatternMatch, unify
from treadle.graph.rewrite.pattern import Anything, Pattern, PatternVariable, Roots
from treadle.graph.rewrite.pattern_programs import compiled
from treadle.util.errors import VerifyError, require

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default)
"""What autograd leaves in a trace, and what no graph has once no-ops are gone."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class TracedPattern:
    """What a function looks like for one example: its operations, and whether with gradients,
    which some functions of PyTorch's ask about."""

    roots: Roots
    gradients: bool


@final
@dataclass(frozen=True, eq=False)
class TorchProgram:
    """A function of tensors and numbers as a pattern. ``examples``: arguments of each form that it
    is to be found in; their numbers must differ from all other constants of the function.
    ``shared``: whether others may read the values inside."""

    function: Callable[..., object]
    examples: tuple[tuple[object, ...], ...]
    shared: bool = False

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The function's parameters."""
        return tuple(inspect.signature(self.function).parameters)

    @functools.cached_property
    def traced_patterns(self) -> tuple[TracedPattern, ...]:
        """The forms of the examples, those that are alike once."""
        found: dict[str, TracedPattern] = {}
        for example in self.examples:
            fits = len(example) == len(self.names)
            require(fits, VerifyError, f"{len(example)} arguments for {', '.join(self.names)}")
            for gradients in (True, False):
                graph = self._traced_like(example, gradients)
                found.setdefault(str(graph), TracedPattern(self._roots(graph, example), gradients))
        return tuple(found.values())

    def confirm(self, form: TracedPattern, match: PatternMatch) -> None:
        """``NoMatch`` if the function is something else for the types that were found."""
        found = {name: match.bindings[name] for name in self.names}
        graph = traced_with(_called(self.function, form.gradients), found)
        exact = compiled(graph, str(self.function))
        again = PatternMatch(match.anchor, bindings=dict(match.bindings))
        for pattern, node in zip(exact.patterns, match.roots, strict=True):
            unify(again, pattern, node)

    def _traced_like(self, example: tuple[object, ...], gradients: bool) -> fx.Graph:
        given = dict(zip(self.names, example, strict=True))
        own = {name: each for name, each in given.items() if isinstance(each, Tensor)}

        def run(*tensors: Tensor) -> object:
            now = given | dict(zip(own, tensors, strict=True))
            return _called(self.function, gradients)(*now.values())

        module = traced(run, [each.clone() for each in own.values()])
        return _plain(module.graph, list(own))

    def _roots(self, graph: fx.Graph, example: tuple[object, ...]) -> Roots:
        numbers = {
            name: each
            for name, each in zip(self.names, example, strict=True)
            if not isinstance(each, Tensor)
        }
        missing = set(self.names)

        def plain(leaf: object) -> Pattern:
            for name, each in numbers.items():
                if type(each) is type(leaf) and each == leaf:
                    missing.discard(name)
                    return PatternVariable(name)
            return Anything()

        roots = compiled(graph, str(self.function), plain)
        read = {str(n.target) for n in graph.find_nodes(op="placeholder") if n.users}
        words = f"{', '.join(sorted(missing - read))} of {self.function} cannot be found again"
        require(missing <= read, VerifyError, words)
        return replace(roots, shared=self.shared)


@final
@dataclass(frozen=True, eq=False)
class TorchReplacement:
    """A function of tensors and numbers as what is put there: traced for the types it meets."""

    function: Callable[..., object]

    def graph_for(self, bindings: Mapping[str, Argument]) -> fx.Graph:
        """The function's operations for these values; placeholders are named as its parameters."""
        names = tuple(inspect.signature(self.function).parameters)
        return traced_with(_called(self.function, False), {name: bindings[name] for name in names})


def traced_with(function: Callable[..., object], given: Mapping[str, Argument]) -> fx.Graph:
    """``function`` of nodes and numbers as a graph, placeholders named as in ``given``; a value
    that is given twice is one of them."""
    operands: dict[fx.Node, str] = {}
    for name, each in given.items():
        if isinstance(each, fx.Node):
            operands.setdefault(each, name)
    module = traced_program(function, tuple(given.values()), {}, list(operands))
    return _plain(module.graph, list(operands.values()))


def _called(function: Callable[..., object], gradients: bool) -> Callable[..., object]:
    def call(*args: object) -> object:
        if not gradients:
            with torch.no_grad():
                return function(*args)
        with torch.enable_grad():
            return function(*map(_leaf, args))

    return call


def _leaf(argument: object) -> object:
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.detach().requires_grad_()
    return argument


def _plain(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """The graph without what computes nothing, its inputs under these names."""
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
    for node in graph.nodes:
        if node.target in _SAME:
            node.replace_all_uses_with(operand_of(node))
    graph.eliminate_dead_code()
    constants = graph.find_nodes(op="get_attr")
    require(not constants, VerifyError, "a rule makes a tensor from numbers: use torch.full")
    return graph
