"""Every custom operator that may stand in a graph."""

from treadle.graph.custom_ops import (
    branches,
    ctc,
    expect,
    grouped,
    incoming,
    masks,
    packed,
    recurrent,
    while_loops,
)

CUSTOM_OPS = (
    *recurrent.OPERATORS,
    *packed.OPERATORS,
    *ctc.OPERATORS,
    *while_loops.OPERATORS,
    *branches.OPERATORS,
    *grouped.OPERATORS,
    masks.COUNTED_MASK,
    expect.EXPECT,
    incoming.INCOMING_GRADIENT,
)
