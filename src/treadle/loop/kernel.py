"""Scheduled loops: which formulas share a kernel, and in which bytes their values live.

::

    kernel   =  for r < rows, c < cols:  item*
    item     =  %name = expr  |  buffer[index] = %name
    plan     =  (kernel | call)*  with an arena offset for each of our buffers

A **rows** kernel runs its rows in parallel; ``Reduce`` over ``cols`` gives one value a row. A
**columns** kernel runs its columns in parallel; ``Reduce`` over ``rows`` gives one value a
column. A ``Reduce`` stands only at the root of a definition.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from treadle.loop.expr import Expr, Local
from treadle.loop.index import Axis, Index
from treadle.loop.program import Buffer, Call, Origin, TensorRef


class KernelKind(enum.StrEnum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Definition:
    """``%name = expr``. It varies over exactly ``axes``: (rows, cols), (rows,), (cols,) or ()."""

    name: str
    expr: Expr
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[index] = value``, once for each value of ``axes``."""

    buffer: str
    index: Index
    value: Local
    axes: tuple[Axis, ...]


OWN_ROWS = 1024
"""In a rows kernel with at least this many rows, generated code gives each row to one worker (a
thread, a program), which computes the values of the row before the row's last loop."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One loop nest. Plain pointwise work has one row and every element in ``cols``, or keeps
    the two dims that make its reads contiguous."""

    name: str
    kind: KernelKind
    rows: Axis
    cols: Axis
    body: tuple[Definition | Store, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The whole step, ready for code: order, buffers that survive, and where they live.

    ``offsets`` gives bytes into the arena for each temporary that is ours; temporaries missing
    there are allocated by the call that fills them, and freed after their last use.
    ``peak_bytes`` counts the arena, what calls allocate, inputs and results, all at once.
    """

    steps: tuple[Kernel | Call, ...]
    buffers: Mapping[str, Buffer]
    offsets: Mapping[str, int]
    arena_bytes: int
    peak_bytes: int
    inputs: tuple[str, ...]
    results: tuple[TensorRef | None, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    device: str = ""
