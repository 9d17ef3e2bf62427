"""The values of masks, and whether every query may attend to some key.

Eager and fused kernels differ for a row of scores that is masked completely: eager returns NaN for
``-inf``, and a uniform average for a finite number; the kernel returns zeros, and its gradient of
the uniform average is wrong, because the logarithm of the sum is lost next to the number. So it
must be proved that a mask leaves something of every row. Masks that depend on no input are
computed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, fx

from treadle.compat.operators.operator_facts import gives_undefined
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dataflow import unexpanded
from treadle.graph.core.arguments import given_of
from treadle.graph.core.constants import constant_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments, may_recompute, operand_of
from treadle.graph.core.types import tensors_in, type_of, type_of_tensor
from treadle.passes.attention.moves import is_cast, is_move

aten = torch.ops.aten

_MOST = 1 << 25
"""Elements of the largest constant that is computed here."""
_ALLOWED = -1e3
"""What is added to scores that count. Far below it the logarithm of a row's sum is rounded away."""
_DROWNS = -1e30
"""A number at and below which scores added to it are lost in f32."""


@final
@dataclass(frozen=True, slots=True)
class ScoreMask:
    """Something done to scores of ``shape`` that leaves ``scores`` or takes its place.

    ``add``: ``node`` is added. Otherwise ``fill`` stands where ``node`` is true, or, with
    ``keeps``, where it is false.
    """

    node: fx.Node
    shape: tuple[int, ...]
    add: bool = False
    fill: float = 0.0
    keeps: bool = False


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """``fill`` in the place of scores where ``node`` is true, or, with ``keeps``, false."""

    node: fx.Node
    keeps: bool
    fill: float


@final
@dataclass(frozen=True, slots=True)
class MaskedRows:
    """What is known of rows that are masked whole.

    ``proved``: there are none. ``drops``: all that masks do is put ``-inf``, or the only one a
    number that drowns scores, and it can be found out at each call which rows are dead. ``zeroed``:
    the gradient of dead rows of scores is 0, for a fill stops it. With neither, they do no harm.
    """

    proved: bool = False
    drops: tuple[Drop, ...] = ()
    zeroed: bool = False

    @property
    def mixes(self) -> bool:
        """Whether a dead row is an even mixture of all values, and not NaN."""
        return any(math.isfinite(drop.fill) for drop in self.drops)


def constant(node: object) -> Tensor | None:
    """The value of a node that depends on no input, computed; ``None`` for any other."""
    if not isinstance(node, fx.Node):
        return None
    needed = _constant_nodes(node)
    if needed is None:
        return None
    values: dict[fx.Node, object] = {}
    with torch.no_grad():
        for constant_node in needed:
            held = constant_of(constant_node)
            if held is not None:
                values[constant_node] = held.cpu()
                continue
            args, kwargs = given_of(constant_node, values.__getitem__, _on_host)
            assert callable(constant_node.target), constant_node
            values[constant_node] = constant_node.target(*args, **kwargs)
    value = values[node]
    return value if isinstance(value, Tensor) else None


def number(value: object) -> float | None:
    """The one finite or infinite number that ``value`` is; ``None`` for any other."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, fx.Node) or len(tensors_in(value_of(value))) != 1:
        return None
    if any(type(size) is not int or size != 1 for size in type_of(value).shape):
        return None
    tensor = constant(value)
    return None if tensor is None or tensor.is_complex() else float(tensor.item())


def leaves_something(masks: Sequence[ScoreMask]) -> bool:
    """Whether it is proved that every row of every matrix of scores has an entry that counts.

    Here masks that depend on no input are computed. Proofs about others belong here as well.
    """
    total = torch.zeros(())
    for mask in masks:
        value = constant(unexpanded(mask.node))
        if value is None:
            return False
        total = total + _added(mask, value)
    if total.isnan().any() or (total == math.inf).any():
        return False
    best = total.amax(-1) if total.ndim else total
    return bool((best >= _ALLOWED).all())


def cannot_be_infinite(masks: Sequence[ScoreMask]) -> bool:
    """Whether all that masks add or put is finite, and a number put drowns what it replaces."""
    return all(_is_finite(mask) for mask in masks)


def drops_of(masks: Sequence[ScoreMask]) -> tuple[Drop, ...]:
    """The masks as places that are filled with ``-inf``, or a single mask as places filled with
    a number that drowns the scores; none if a mask does anything else."""
    dropped = [_drop_of(mask) for mask in masks]
    drops = tuple(drop for drop in dropped if drop is not None)
    alike = len(drops) == 1 or all(drop.fill == -math.inf for drop in drops)
    return drops if alike and len(drops) == len(masks) else ()


def _drop_of(mask: ScoreMask) -> Drop | None:
    if not mask.add:
        return Drop(mask.node, mask.keeps, mask.fill) if mask.fill <= _DROWNS else None
    at = mask.node
    while at.target is aten.expand.default or is_cast(at):
        at = operand_of(at)
    dtype = type_of(mask.node).dtype
    args = arguments(at) if at.op == "call_function" else {}
    match at.target:
        case aten.where.self:
            kept, other = number(args["self"]), number(args["other"])
            if kept == 0.0:
                return _drop(args["condition"], other, dtype, keeps=True)
            return _drop(args["condition"], kept, dtype, keeps=False) if other == 0.0 else None
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            zeros = constant(unexpanded(args["self"]))
            known = zeros is not None and not zeros.any()
            fill = number(args["value"]) if known else None
            return _drop(args["mask"], fill, dtype, keeps=False)
        case _:
            return None


def _drop(node: fx.Node, fill: float | None, dtype: torch.dtype, *, keeps: bool) -> Drop | None:
    """A drop by what ``fill`` is in ``dtype``, if that drowns scores."""
    if fill is None or fill > _DROWNS or not math.isclose(fill, _in(fill, dtype)):
        return None
    return Drop(node, keeps, fill)


def _in(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def fits(mask: ScoreMask, dtype: torch.dtype) -> bool:
    """Whether everything that ``mask`` puts or adds is a number of ``dtype``, or hides a score."""
    if not mask.add:
        return mask.fill == -math.inf
    if type_of(mask.node).dtype == dtype:
        return True
    value = constant(unexpanded(mask.node))
    if value is None:
        return False
    return bool(((value == value.to(dtype)) | (value <= _DROWNS)).all())


def stays_finite(number: float, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a finite number is one in all of these dtypes."""
    return all(math.isfinite(_in(number, dtype)) for dtype in dtypes)


def _is_finite(mask: ScoreMask) -> bool:
    if not mask.add:
        return math.isfinite(mask.fill) and mask.fill <= _DROWNS
    at = mask.node
    while is_move(at) or is_cast(at):
        at = operand_of(at)
        if type_of(at).dtype is torch.float64:
            return False  # finite there, it may be infinite in the narrower dtype
    if at.target is not aten.where.self:
        return False
    args = arguments(at)
    largest = torch.finfo(type_of(mask.node).dtype).max
    constants = [constant(args[name]) for name in ("self", "other")]
    return all(addend is not None and bool((addend.abs() <= largest).all()) for addend in constants)


def _added(mask: ScoreMask, value: Tensor) -> Tensor:
    """What the mask adds to scores, as numbers."""
    if mask.add:
        return value.float()
    dropped = ~value.bool() if mask.keeps else value.bool()
    return torch.zeros(()).where(~dropped, torch.tensor(mask.fill))


def _constant_nodes(node: fx.Node) -> list[fx.Node] | None:
    """All that ``node`` needs, in order; ``None`` if an input is among it, or too much."""
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [(node, False)]
    while stack:
        at, done = stack.pop()
        if done:
            order.append(at)
            continue
        if at in seen:
            continue
        seen.add(at)
        if not _may_compute(at):
            return None
        stack.append((at, True))
        stack += [(operand, False) for operand in at.all_input_nodes]
    return order


def _may_compute(node: fx.Node) -> bool:
    held = constant_of(node)
    if held is not None:
        return held.numel() <= _MOST
    if node.op != "call_function" or not may_recompute(node):
        return False
    if isinstance(node.target, OpOverload) and gives_undefined(node.target):
        return False
    tensors = tensors_in(value_of(node))
    fixed = all(type(size) is int for tensor in tensors for size in _sizes(tensor))
    return bool(tensors) and fixed and all(tensor.numel() <= _MOST for tensor in tensors)


def _sizes(value: Tensor) -> tuple[int, ...]:
    """The sizes of a fake value, formulas where a call decides them."""
    return type_of_tensor(value).shape


def _on_host(leaf: object) -> object:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
