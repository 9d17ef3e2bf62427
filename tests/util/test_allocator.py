"""What the caching allocator takes for a request of bytes."""

import pytest

from treadle.util.allocator import PLAIN, Allocator

MIB = 1 << 20
BLOCKS = Allocator(blocks=True)


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (MIB, MIB),
        (MIB + 1, MIB + 512 + (MIB - 19 * 512) // 19),  # 19 in a segment share its rest
        (9 * MIB, 9 * MIB),  # two in a segment; the rest of 2 MiB is a block of its own
        (10 * MIB - 512, 10 * MIB),  # the rest of 1 KiB stays with them
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),  # a segment of 12 MiB, whose rest is too small
        (11 * MIB - 512, 11 * MIB - 512),  # its rest is a block
        (64 * MIB + 1, 64 * MIB + 512),
    ],
)
def test_requests_become_blocks(nbytes, taken):
    assert BLOCKS.taken(nbytes) == taken
    assert PLAIN.taken(nbytes) == nbytes
