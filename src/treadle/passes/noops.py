"""Remove operations that return what they were given."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.graph.alias import Aliases, analyse
from treadle.graph.filled import filled_with
from treadle.graph.operators import arguments
from treadle.graph.passes import GraphPass
from treadle.graph.pieces import joined_source, stacked_source
from treadle.graph.rewrite import NoMatch
from treadle.graph.signature import StepGraph
from treadle.graph.types import is_tensor, type_of
from treadle.graph.values import refresh
from treadle.util.errors import require

aten = torch.ops.aten
Arguments = dict[str, Any]
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_JOINS = frozenset({aten.cat.default, aten.stack.default})
Finder = Callable[[Arguments], object]
"""The operand that the result equals; ``NoMatch`` if there is none."""


@dataclass(frozen=True)
class RemoveNoOps(GraphPass):
    """Replace a value that equals one of its operands, bit for bit, by that operand.

    before:  a = view(x, [4, 8]); b = mul(a, 1); c = relu(b)      x: f32[4, 8]
    after:   c = relu(x)

    Size, stride, dtype and device must agree. No output becomes an input, and no two outputs,
    nor an output and an input, share bytes afterwards that did not share them before.
    """

    def run(self, step: StepGraph) -> int:
        total = 0
        while changes := self._once(step):
            total += changes
            if not any(node.target in _JOINS for node in step.graph.nodes):
                break  # of all others one look sees everything
        return total

    def _once(self, step: StepGraph) -> int:
        decisions = _Decisions(step)
        for node in step.graph.nodes:
            decisions.consider(node)
        for node, kept in decisions.same.items():
            node.replace_all_uses_with(kept)
        for node in reversed(decisions.same):
            step.graph.erase_node(node)
        refresh(step.graph, decisions.moved)
        return len(decisions.same)


def explain(step: StepGraph, node: fx.Node) -> str:
    """Why ``node`` does or does not go, in words."""
    decisions = _Decisions(step)
    for each in step.graph.nodes:
        if each is node:
            break
        decisions.consider(each)
    try:
        decisions.decide(node)
    except NoMatch as miss:
        return miss.message
    return "goes"


class _Decisions:
    """What equals what, so far, and which storages the replacements will have joined."""

    def __init__(self, step: StepGraph) -> None:
        self.same: dict[fx.Node, fx.Node] = {}
        self.moved: list[fx.Node] = []  # those that stand for a value of other storage
        self._aliases: Aliases = analyse(step)
        self._returned = {node for node in step.returned if node is not None}
        self._held = {root for each in self._returned for root in self._aliases.of[each]}
        self._fixed = set(self._aliases.fixed)
        self._joined: dict[int, int] = {}

    def consider(self, node: fx.Node) -> None:
        try:
            kept = self.decide(node)
        except NoMatch:
            return
        self.same[node] = kept
        self._join(node, kept)

    def decide(self, node: fx.Node) -> fx.Node:
        """The value that ``node`` equals and may become; raises ``NoMatch``."""
        finder = _FINDERS.get(node.target)
        require(node.op == "call_function" and finder is not None, NoMatch, f"{node} does work")
        assert finder is not None
        operand = finder(arguments(node))
        require(is_tensor(operand), NoMatch, f"{operand} is not a tensor")
        assert isinstance(operand, fx.Node)
        operand = self._beneath(node, operand)
        new, old = type_of(operand), type_of(node)
        require(new == old, NoMatch, f"{node} changes {new} to {old}, or its strides or device")
        kept = self.same.get(operand, operand)
        self._require_no_new_alias(node, kept)
        return kept

    def _beneath(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """What ``node`` may show again, being a view of a view: ``t(t(x))``, ``view(view(x))``."""
        operand = self.same.get(operand, operand)
        if node.target is aten.t.default and operand.target is aten.t.default:
            return arguments(operand)["self"]
        while node.target in _RESHAPES and operand.target in _RESHAPES:
            if type_of(operand) == type_of(node):
                break
            operand = arguments(operand)["self"]
            operand = self.same.get(operand, operand)
        return operand

    def _require_no_new_alias(self, node: fx.Node, kept: fx.Node) -> None:
        if node in self._returned:
            require(kept.op == "call_function", NoMatch, f"{node} is an output, {kept} an input")
            require(kept not in self._returned, NoMatch, f"{node} and {kept} are both outputs")
        if self._roots(node) == self._roots(kept) or not self._roots(node) & self._held:
            return
        message = f"{node} is returned and would share the bytes of {kept}, which is"
        require(not self._roots(kept) & self._fixed, NoMatch, f"{message} an input")
        require(not self._roots(kept) & self._held, NoMatch, f"{message} returned too")

    def _roots(self, node: fx.Node) -> frozenset[int]:
        return frozenset(self._find(each) for each in self._aliases.of[node])

    def _find(self, storage: int) -> int:
        while storage in self._joined:
            storage = self._joined[storage]
        return storage

    def _join(self, node: fx.Node, kept: fx.Node) -> None:
        """``kept`` stands for ``node`` from now on: what is said of one is said of both."""
        if node in self._returned:
            self._returned.remove(node)
            self._returned.add(kept)
        (left,), (right,) = self._roots(node), self._roots(kept)
        if left == right:
            return
        self._joined[left] = right
        self.moved.append(kept)
        for roots in (self._held, self._fixed):
            if left in roots:
                roots.add(right)


_FINDERS: dict[object, Finder] = {}


def _equals(*targets: object) -> Callable[[Finder], Finder]:
    """Register what calls of ``targets`` equal, given that the type does not change."""

    def register(finder: Finder) -> Finder:
        for target in targets:
            assert target not in _FINDERS, f"{target} is registered twice"
            _FINDERS[target] = finder
        return finder

    return register


@_equals(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.repeat.default,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    torch.ops.prims.convert_element_type.default,
)
def _operand(given: Arguments) -> object:
    """Views and copies of the whole: an equal type says that nothing was left out or moved."""
    return given.get("self", given.get("a"))


@_equals(aten.view.dtype)
def _same_bits(given: Arguments) -> object:
    return given["self"]


@_equals(aten.slice_scatter.default)
def _source(given: Arguments) -> object:
    """``x`` with all of it replaced: the source has the size of ``x`` only then."""
    return given["src"]


@_equals(aten.copy.default)
def _copied(given: Arguments) -> object:
    return given["src"]


@_equals(aten.constant_pad_nd.default)
def _unpadded(given: Arguments) -> object:
    pads = list(given["pad"])
    require(not any(pads), NoMatch, f"pads by {pads}")
    return given["self"]


@_equals(aten.cat.default)
def _only(given: Arguments) -> object:
    """The one operand, or what all operands in their order are the pieces of."""
    tensors = given["tensors"]
    if len(tensors) == 1:
        return tensors[0]
    try:
        return joined_source(tensors, given["dim"])
    except NoMatch as miss:
        raise NoMatch(f"joins {len(tensors)} values: {miss.message}") from None


@_equals(aten.stack.default)
def _unbound(given: Arguments) -> object:
    return stacked_source(given["tensors"], given["dim"])


@_equals(aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default)
def _whole(given: Arguments) -> object:
    dtype = type_of(given["self"]).dtype
    require(not dtype.is_floating_point and not dtype.is_complex, NoMatch, f"rounds {dtype}")
    return given["self"]


@_equals(aten.pow.Tensor_Scalar)
def _first_power(given: Arguments) -> object:
    require(given["exponent"] == 1, NoMatch, f"power of {given['exponent']}")
    _require_real(given["self"])
    return given["self"]


@_equals(aten.mul.Tensor, aten.mul.Scalar)
def _times_one(given: Arguments) -> object:
    for value, other in ((given["other"], given["self"]), (given["self"], given["other"])):
        if filled_with(other) == 1 and is_tensor(value):
            _require_real(value)
            return value
    raise NoMatch(f"{given['other']} is not 1")


@_equals(aten.div.Tensor, aten.div.Scalar)
def _over_one(given: Arguments) -> object:
    require(filled_with(given["other"]) == 1, NoMatch, f"{given['other']} is not 1")
    require(is_tensor(given["self"]), NoMatch, f"{given['self']} is a number")
    _require_real(given["self"])
    return given["self"]


@_equals(aten.sub.Tensor, aten.sub.Scalar)
def _minus_zero(given: Arguments) -> object:
    """``x - 0.0`` is ``x``; ``x - (-0.0)`` turns ``-0.0`` into ``0.0``."""
    require(given["alpha"] == 1, NoMatch, f"alpha is {given['alpha']}")
    zero = filled_with(given["other"])
    require(zero == 0, NoMatch, f"{given['other']} is not 0")
    require(is_tensor(given["self"]), NoMatch, f"{given['self']} is a number")
    exact = _is_whole(given["self"]) or not _is_negative(zero)
    require(exact, NoMatch, "-0.0 - (-0.0) is 0.0")
    return given["self"]


@_equals(aten.add.Tensor, aten.add.Scalar)
def _plus_zero(given: Arguments) -> object:
    """``x + (-0.0)`` is ``x``; ``x + 0.0`` turns ``-0.0`` into ``0.0``."""
    require(given["alpha"] == 1, NoMatch, f"alpha is {given['alpha']}")
    left, right = given["self"], given["other"]
    for value, other in ((left, right), (right, left)):
        zero = filled_with(other)
        if zero == 0 and is_tensor(value):
            exact = _is_whole(value) or _is_negative(zero)
            require(exact, NoMatch, "-0.0 + 0.0 is 0.0")
            return value
    raise NoMatch(f"neither {left} nor {right} is 0")


def _require_real(node: fx.Node) -> None:
    """Complex infinities do not survive a product with ``1 + 0j``."""
    require(not type_of(node).dtype.is_complex, NoMatch, f"{node} is complex")


def _is_whole(node: fx.Node) -> bool:
    dtype = type_of(node).dtype
    return not dtype.is_floating_point and not dtype.is_complex


def _is_negative(zero: complex | None) -> bool:
    return isinstance(zero, float) and math.copysign(1.0, zero) < 0
