"""Scheduled loops: which formulas share a kernel, and where their values are in memory.

::

    kernel   =  for r < rows, c < cols:  item*            as its KernelSchedule says
    item     =  %name = expr  |  buffer[index] = %name
    plan     =  (kernel | call)*  with an arena offset for each of our buffers

A **rows** kernel runs its rows in parallel; ``Reduce`` over ``cols`` gives one value a row. A
**columns** kernel runs its columns in parallel; ``Reduce`` over ``rows`` gives one value per
column. A kernel of **both** kinds reduces along either axis; its reductions over ``rows`` are
complete after the last row, and only values of columns may use them. A ``Reduce`` occurs only at
the root of a definition.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Expr, Local
from treadle.loop.program import Buffer, Call, Origin, TensorRef
from treadle.util.errors import VerifyError, require


class KernelKind(enum.StrEnum):
    """Along which axis a kernel reduces: the columns of a rows kernel, the rows of a columns
    kernel, or each."""

    ROWS = "rows"
    COLUMNS = "columns"
    BOTH = "both"


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


class LoopForm(enum.StrEnum):
    """How the loops of a kernel are arranged; a worker is a thread or a program.

    ::

        flat         one axis, nothing reduced: workers share it, and its extent is an argument
        tiled        two axes, nothing reduced: each worker takes tiles of both
        persistent   a worker holds the whole reduced axis at once, for its tile of the other one
        looped       a worker runs along the reduced axis, once for each pass
        split        the reduced axis is cut into parts, whose workers join in a fixed order
        swept        a worker goes through its part of the rows, holds one or a few at once, and
                     adds up their columns; workers join in a fixed order
    """

    FLAT = "flat"
    TILED = "tiled"
    PERSISTENT = "persistent"
    LOOPED = "looped"
    SPLIT = "split"
    SWEPT = "swept"


@dataclass(frozen=True, slots=True)
class KernelSchedule:
    """Every choice about one kernel: another schedule is other text and the same values, but for
    the order of sums. Made in ``schedule``, printed by ``codegen``.

    ``rows``, ``cols``: elements of each axis that a worker takes at once; 0: all there are.
    ``parts``: pieces of the reduced axis, and of the rows of a swept kernel, that different workers
    add up. ``width``: the columns are two loops, the inner one this long; 0: one loop. ``piece``:
    sums in single precision are added up in double precision after so many elements; 0: never.
    ``kept``: values that are stored from one pass to the next and not computed again. ``running``:
    sums of exp(x - top) that are added up in the pass that finds ``top``; ``unrolled``: blocks that
    this pass reads before it scales them.
    ``serial_below``: elements below which one thread does the work. ``warps``: of a program.
    ``stages``: how many steps ahead a loop loads; 0: as the language does. ``in_place``: what is
    written may lie where something is read, so that a worker reads first.
    """

    form: LoopForm
    rows: int = 1
    cols: int = 1
    parts: int = 1
    width: int = 0
    piece: int = 0
    kept: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    unrolled: int = 1
    serial_below: int = 0
    warps: int = 0
    stages: int = 0
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One loop nest. Plain pointwise work has one row and every element in ``cols``, or keeps
    the two dims that make its reads contiguous.

    ``scratch``: buffers for what its workers add up in parts, in the order of the reductions.
    """

    name: str
    kind: KernelKind
    rows: Axis
    cols: Axis
    body: tuple[Definition | Store, ...]
    origins: tuple[Origin, ...]
    schedule: KernelSchedule | None = None
    scratch: tuple[str, ...] = ()

    @property
    def scheduled(self) -> KernelSchedule:
        """How it runs; for kernels that have been scheduled."""
        require(self.schedule is not None, VerifyError, f"{self.name} has no schedule")
        assert self.schedule is not None
        return self.schedule


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """Kernels that run together. Those with equal ``function`` differ in their buffers alone, and
    share one text wherever in the plan they stand."""

    kernels: tuple[Kernel, ...]
    function: int


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The whole step, ready for code: order, buffers that survive, and where they live.

    ``offsets`` gives bytes into the arena for each temporary that is ours; temporaries missing
    there are allocated by the call that fills them, and freed after their last use.
    ``peak_bytes`` counts the arena, what calls allocate, inputs and results, all at once. What is
    ours on the host lies in a block of its own there, of ``host_bytes``, at its offset.
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
    host_bytes: int = 0

    def is_elsewhere(self, buffer: Buffer) -> bool:
        """Whether ``buffer`` is on another device than the step."""
        return bool(self.device) and buffer.device != self.device
