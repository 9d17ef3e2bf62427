"""The real size of an allocation: PyTorch's caching allocator on a GPU returns whole blocks.

::

    n <= 1 MiB           multiples of 512 bytes
    1 MiB < n < 10 MiB   pieces of segments of 20 MiB; a rest of at most 1 MiB stays with a piece
    n >= 10 MiB          segments in multiples of 2 MiB, whose rest of at most 1 MiB stays as well
"""

from dataclasses import dataclass

_MIB = 1 << 20
_UNIT = 512
_SMALL, _SEGMENT, _LARGE, _ROUND = _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB
_REST = _MIB
"""The largest rest of a segment that is not split off."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """How the bytes of a plan are counted. ``reserve``: what libraries hold beside the plan's own;
    ``blocks``: whether requests are rounded as above; ``tables``: whether a launch of several
    kernels holds tables of their buffers."""

    reserve: int = 0
    blocks: bool = False
    tables: bool = False

    def taken(self, nbytes: int) -> int:
        """Bytes that a tensor of ``nbytes`` takes, allocated beside others of its size."""
        if not self.blocks or not nbytes:
            return nbytes
        unit = -(-nbytes // _UNIT) * _UNIT
        if unit <= _SMALL:
            return unit
        if unit >= _LARGE:
            return _with_rest(unit, -(-unit // _ROUND) * _ROUND, 1)
        pieces = _SEGMENT // unit
        return _with_rest(unit, _SEGMENT, pieces)


def _with_rest(nbytes: int, segment: int, pieces: int) -> int:
    """The share of one of ``pieces`` in a segment whose rest is too small to be another block."""
    rest = segment - pieces * nbytes
    return nbytes + (rest // pieces if rest <= _REST else 0)


PLAIN = Allocator()
"""Bytes are what they are."""
