"""Facts about values with rows, and calls that are created once per chunk of rows.

::

    grid    =  outer x middle x inner rows: those of the product that the chunks are cut from
    Rows    =  the first ``lead`` dims of a value count rows: ``middle[start:stop]`` of each outer
    box     =  some of outer and some of middle: the rows of one chunk
    template = arguments in which ``Part``, ``RowSlice``, ``RowCount`` and ``Made`` stand for values
               of the chunk

In a chunk every value is flat: one dim of rows, then the dims after ``lead``. In a micro-batch a
value has the dims that it has in the whole batch: one of them, a ``BatchDim``, is shorter.
"""

from dataclasses import dataclass
from typing import Any, final

from torch import fx


@final
@dataclass(frozen=True, slots=True)
class RowRange:
    """The leading dims of a value count rows. ``transposed``: rows are the second of two dims."""

    lead: int
    start: int
    stop: int
    transposed: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Which of the grid's middle the value has."""
        return self.start, self.stop


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """The rows of the product, as many as ``outer * middle * inner``."""

    outer: int
    middle: int
    inner: int

    @property
    def count(self) -> int:
        """All rows."""
        return self.outer * self.middle * self.inner

    @property
    def is_flat(self) -> bool:
        """Whether rows are in one dim."""
        return self.outer == self.inner == 1


@final
@dataclass(frozen=True, slots=True)
class Box:
    """The rows of one chunk: those of ``outer[first:last]`` and ``middle[low:high]``. Of several
    outer it has the whole middle, so that its rows follow one another in every value."""

    first: int
    last: int
    low: int
    high: int

    def inside(self, rows: RowRange) -> tuple[int, int]:
        """The part of the grid's middle that a value has in this chunk."""
        return max(rows.start, self.low), min(rows.stop, self.high)

    def of(self, rows: RowRange, grid: Grid) -> tuple[int, int]:
        """From which to which flat row of a value the chunk goes."""
        low, high = self.inside(rows)
        per_row = (rows.stop - rows.start) * grid.inner
        begin = self.first * per_row + (low - rows.start) * grid.inner
        return begin, begin + (self.last - self.first) * (high - low) * grid.inner


def boxes_of(grid: Grid, most: int) -> tuple[Box, ...]:
    """The grid in chunks of about equal size, of at most ``most`` rows each if that can be."""
    per_row = grid.middle * grid.inner
    if most >= per_row:
        size = _even(grid.outer, most // per_row)
        starts = range(0, grid.outer, size)
        return tuple(Box(at, min(at + size, grid.outer), 0, grid.middle) for at in starts)
    size = _even(grid.middle, max(most // grid.inner, 1))
    return tuple(
        Box(outer, outer + 1, at, min(at + size, grid.middle))
        for outer in range(grid.outer)
        for at in range(0, grid.middle, size)
    )


def _even(count: int, most: int) -> int:
    """The size of equal pieces of ``count``, at most ``most`` each."""
    pieces = -(-count // most)
    return -(-count // pieces)


@final
@dataclass(frozen=True, slots=True)
class RowPart:
    """The rows of a chunk of what ``node`` computes, computed in the chunk."""

    node: fx.Node


@final
@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows of a chunk of ``node``, which is there before. ``row_dims``: what its leading dims
    are, or are expanded to. ``dim``: where its rows are once these are one."""

    node: fx.Node
    rows: RowRange
    row_dims: tuple[int, ...]
    trailing: tuple[int, ...]
    dim: int = 0


@final
@dataclass(frozen=True, slots=True)
class RowCount:
    """How many rows a value has in the chunk."""

    rows: RowRange


@final
@dataclass(frozen=True, slots=True)
class MadeRows:
    """A call in the chunk; its arguments are a template."""

    target: object
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Resliced:
    """The rows of ``node`` that ``rows`` has as well, and zeros for rows that it has not."""

    node: fx.Node
    source: RowRange
    rows: RowRange


@final
@dataclass(frozen=True, slots=True)
class BatchDim:
    """The dim of a value that counts the rows of the batch, with ``inner`` elements for each, and
    all of them ``outer`` times: ``0, 8`` of a value of ``[6 * 8, 16]``, and ``0, 1, 8`` of one of
    ``[8 * 6, 16]``, where the batch has six rows."""

    dim: int
    inner: int
    outer: int = 1

    @property
    def per_row(self) -> int:
        """Elements of the dim for each row."""
        return self.outer * self.inner


@final
@dataclass(frozen=True, slots=True)
class Rowless:
    """What each micro-batch has for itself, without rows: the state of its random numbers that
    attention passes on to its derivative, whether it draws any or not."""


@final
@dataclass(frozen=True, slots=True)
class BatchSlice:
    """The rows of a micro-batch of ``node``, which is there before."""

    node: fx.Node
    at: BatchDim


@final
@dataclass(frozen=True, slots=True)
class BatchCount:
    """How many elements a dim with ``per_row`` for each row has in the micro-batch."""

    per_row: int


ChunkValue = RowPart | MadeRows | Resliced
"""What a value is in a chunk: the value of another node, a call, or other rows."""


@final
@dataclass(frozen=True, slots=True)
class Member:
    """A node that is computed in chunks."""

    node: fx.Node
    rows: RowRange
    form: ChunkValue


@final
@dataclass(frozen=True, slots=True)
class BatchMember:
    """A node that is computed for each micro-batch. ``at``: where its rows are, or those of each of
    its results; ``None`` for a result that is a sum over them."""

    node: fx.Node
    at: BatchDim | Rowless | tuple[BatchDim | Rowless | None, ...]
    form: MadeRows


@final
@dataclass(frozen=True, slots=True)
class Filled:
    """One number everywhere, whatever an operand holds."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class TotalWeight:
    """The sum of the weights of the targets of ``loss`` that count, which targets alone decide."""

    loss: fx.Node
    target: fx.Node
    weight: fx.Node | None
    ignore_index: int


@final
@dataclass(frozen=True, slots=True)
class Unwritten:
    """Memory that nobody wrote to, of the shape of an operand: what is drawn has its shape."""


Renewed = Filled | TotalWeight | Unwritten
"""What a node is that reads a member and does not need its numbers: it is made without it."""


@final
@dataclass(frozen=True, slots=True)
class Total:
    """A node that is a sum over rows: ``partial`` of each chunk, added up in the dtype of that and
    divided by ``divisor``."""

    node: fx.Node
    partial: MadeRows
    divisor: int | TotalWeight | None


@final
@dataclass(frozen=True, slots=True)
class Contraction:
    """A node that is a product over rows, ``left @ right``, added up chunk by chunk: to
    ``start``, if there is one. ``added``: to the finished sum, since all rows decide it."""

    node: fx.Node
    left: Any
    right: object
    start: fx.Node | None = None
    added: fx.Node | None = None


Exit = Total | Contraction
