"""Masks of scores as the library call takes them: one 4-dim value that is added."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.passes.attention.forward import Forward
from treadle.passes.attention.moves import four_dims
from treadle.passes.attention.rows import Drop, MaskedRows, ScoreMask

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class Added:
    """A mask that is added, ``[B or 1, H or 1, T or 1, S or 1]``, and which rows it would mask
    whole: these are left unmasked in it, and ``None`` says that there are none."""

    mask: fx.Node
    dead: fx.Node | None


class Additive:
    """Masks as they were made before, so that equal ones are made once."""

    def __init__(self) -> None:
        self._known: dict[object, Added] = {}

    def of(
        self, make: ReplacementBuilder, forward: Forward, rows: MaskedRows, dtype: torch.dtype
    ) -> Added | None:
        """The masks of ``forward`` as one of ``dtype``; ``None`` if it has none."""
        masks = forward.scores.masks
        if not masks:
            return None
        key = masks, dtype, rows
        if key not in self._known:
            if rows.drops:
                self._known[key] = _dropped(make, rows.drops, dtype)
            else:
                self._known[key] = Added(_sum(make, masks, rows, dtype), None)
        return self._known[key]


def _sum(
    make: ReplacementBuilder, masks: tuple[ScoreMask, ...], rows: MaskedRows, dtype: torch.dtype
) -> fx.Node:
    total, *others = [_part(make, mask, rows, dtype) for mask in masks]
    for other in others:
        total = make.call(aten.add.Tensor, total, other)
    return total


def _part(
    make: ReplacementBuilder, mask: ScoreMask, rows: MaskedRows, dtype: torch.dtype
) -> fx.Node:
    """One mask. A fill is ``-inf`` where no row is filled whole: the probabilities are zero either
    way."""
    node = mask.node
    if not mask.add:
        fill = -math.inf if rows.proved else mask.fill
        node = _chosen(make, node, (0.0, fill) if mask.keeps else (fill, 0.0), dtype)
    elif type_of(node).dtype != dtype:
        node = make.call(aten._to_copy.default, node, dtype=dtype)
    return four_dims(make, node)


def _dropped(make: ReplacementBuilder, drops: tuple[Drop, ...], dtype: torch.dtype) -> Added:
    """``-inf`` where something is dropped, but for rows of which nothing is left."""
    parts: list[fx.Node] = []
    for drop in drops:
        node = make.call(aten.logical_not.default, drop.node) if drop.keeps else drop.node
        parts.append(four_dims(make, node))
    total, *others = parts
    for other in others:
        total = make.call(aten.logical_or.default, total, other)
    dead = make.call(aten.all.dim, total, -1, True)
    alive = make.call(aten.logical_not.default, dead)
    masked = make.call(aten.logical_and.default, total, alive)
    return Added(_chosen(make, masked, (-math.inf, 0.0), dtype), dead)


def _chosen(
    make: ReplacementBuilder, condition: fx.Node, numbers: tuple[float, float], dtype: torch.dtype
) -> fx.Node:
    """``where(condition, *numbers)``."""
    kind = {"dtype": dtype, "device": type_of(condition).device}
    both = [make.call(aten.scalar_tensor.default, number, **kind) for number in numbers]
    return make.call(aten.where.self, condition, *both)


def filled(make: ReplacementBuilder, where: fx.Node, number: float, value: fx.Node) -> fx.Node:
    """``value`` with ``number`` in some places."""
    known = type_of(value)
    kind = {"dtype": known.dtype, "device": known.device}
    scalar = make.call(aten.scalar_tensor.default, number, **kind)
    return make.call(aten.where.self, where, scalar, value)
