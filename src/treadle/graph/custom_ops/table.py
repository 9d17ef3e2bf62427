"""Every custom operator that may stand in a graph."""

from treadle.graph.custom_ops import (
    branches,
    ctc,
    eight_bits,
    expect,
    float8,
    full_products,
    grouped,
    host_copies,
    incoming,
    masks,
    packed,
    recurrent,
    scans,
    while_loops,
)

CUSTOM_OPS = (
    *recurrent.OPERATORS,
    *packed.OPERATORS,
    *ctc.OPERATORS,
    *while_loops.OPERATORS,
    *scans.OPERATORS,
    *branches.OPERATORS,
    *grouped.OPERATORS,
    *host_copies.HOST_COPIES,
    full_products.FULL_BMM,
    full_products.FULL_BMM_INTO,
    masks.COUNTED_MASK,
    expect.EXPECT,
    float8.TO_FLOAT8,
    eight_bits.TO_EIGHT_BITS,
    eight_bits.FROM_EIGHT_BITS,
    incoming.INCOMING_GRADIENT,
)
