"""Passes over collectives: no duplicates, early starts, buckets, late waits."""

from treadle.graph.rewrite.passes import GraphPass
from treadle.passes.comm.bucketing.bucket import BucketCollectives
from treadle.passes.comm.bucketing.merge import MergeEqualCollectives
from treadle.passes.comm.overlap.hoist import HoistCollectives
from treadle.passes.comm.overlap.sink import SinkWaits


def communication_passes(
    first_bucket_bytes: int, bucket_bytes: int | None, in_flight_bytes: int | None = None
) -> tuple[GraphPass, ...]:
    """The passes over collectives, in their order. ``first_bucket_bytes``, ``bucket_bytes``: the
    caps of the first and of later buckets of each kind; with 0 each collective stays by itself.
    ``in_flight_bytes``: what may be under way at the same time because of them; as much as there is
    if not given."""
    joins = bucket_bytes != 0
    return (
        MergeEqualCollectives(),  # first: what goes need not be moved or joined
        HoistCollectives(in_flight_bytes),  # before buckets: they fill in order of readiness
        *((BucketCollectives(bucket_bytes, first_bucket_bytes),) if joins else ()),
        SinkWaits(in_flight_bytes),  # after buckets: the waits that are left
    )
