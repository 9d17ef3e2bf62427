"""The passes of the stages before the memory plan; a plan has its own passes."""

from collections.abc import Sequence
from dataclasses import replace

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.graph.rewrite.rules import Rewrite
from treadle.lower.elements import Elements
from treadle.options import Options
from treadle.passes.attention.chosen_kernels import CallFastestAttention
from treadle.passes.attention.fuse import FuseAttention
from treadle.passes.attention.grouped_heads import GroupHeads
from treadle.passes.attention.proved_masks import ProveAttentionMasks
from treadle.passes.checkpoints import RecomputeMarked, SettleCheckpoints
from treadle.passes.cleanup.constructors import CountConstants
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.known_values import FoldConstants
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.comm import communication_passes
from treadle.passes.comm.sharding.gather_again import GatherAgain
from treadle.passes.comm.sharding.scatter_reductions import ScatterReductions
from treadle.passes.convolutions.bias import SplitConvolutionBias
from treadle.passes.convolutions.channels_last import ConvolveChannelsLast
from treadle.passes.convolutions.depthwise import ConvolveDepthwiseGradient
from treadle.passes.convolutions.statistics import NormaliseFromStatistics
from treadle.passes.counter_based_rng import UseCounterBasedRng
from treadle.passes.dropout import ExpandDropout
from treadle.passes.expand_registered import expansion
from treadle.passes.products.batching import BatchProducts
from treadle.passes.products.joined_products import JoinProducts
from treadle.passes.products.narrow_weights import FoldWeightCast, ScaleInProduct
from treadle.passes.products.split_cat import SimplifySplitCat
from treadle.passes.products.sums import (
    DECOMPOSE_OUTER,
    DECOMPOSE_VECTORS,
    AccumulateProducts,
    AddBiasInProduct,
    SplitBias,
)
from treadle.passes.products.written_out import MULTIPLY_WRITTEN_OUT
from treadle.passes.registered import registered
from treadle.report.stages import Watcher

CLEAN: tuple[GraphPass, ...] = (
    ScatterReductions(),  # first: a rank that has all rows of a value, or none, has no slice later
    ExpandDropout(),  # early: what a dropout is made of is cleaned like the rest
    RemoveNoOps(),  # early: it makes equal what only a no-op told apart
    SimplifySplitCat(),  # after no-ops: a copy between two pieces hides that they are neighbours
    CountConstants(),  # before what is dead: the constant that was summed
    RemoveCommonSubexpressions(),  # before what is dead: of two equal values one is left
    RemoveDeadCode(),  # after those that leave nodes without users
    DECOMPOSE_OUTER,  # before products are summed: these sum in a formula
)
OPTIONAL: tuple[GraphPass, ...] = (
    JoinProducts(),  # before products have a bias: it counts their readers
    AddBiasInProduct(),  # after products are summed: a sum of two has no bias
    SplitBias(),  # the biases that stay there
    BatchProducts(),  # last: what is one batch is not a product that adds something
)
"""Right, and not known to win: benchmarks/rewrites.py runs them after ``CLEAN``."""
COUNTER_BASED: tuple[GraphPass, ...] = (
    ExpandDropout(everywhere=True),  # first: it shows the draw inside a fused dropout
    UseCounterBasedRng(),  # before the rest: what was drawn from is dead then
    *CLEAN,
)
FUSE: tuple[GraphPass, ...] = (
    ScaleInProduct(),  # before weights are folded: a kernel that scales takes more rows
    FoldWeightCast(),  # before products are summed: these sum in a formula
    DECOMPOSE_VECTORS,  # before products are summed, too
    MULTIPLY_WRITTEN_OUT,  # as that: what it makes may be summed into
    AccumulateProducts(),  # after what is dead and what is equal: it counts readers
    FuseAttention(),  # as that
    CallFastestAttention(),  # before heads are shared: whichever kernel is called then
    GroupHeads(),  # after both: of fused calls too
    SplitConvolutionBias(),  # before layouts: it makes sums and operations on images
    NormaliseFromStatistics(),  # as that
    ConvolveDepthwiseGradient(),  # before layouts: it makes convolutions
    ConvolveChannelsLast(),  # last: rules look for operations without copies between them
)
"""What rounds where eager does not."""
FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of each kind, at most: small, so that communication begins early."""


def cleaning_of(options: Options) -> tuple[GraphPass, ...]:
    """The passes between capture and the memory plan, in their order."""
    budgeted = options.memory is not None
    passes = (
        SettleCheckpoints(budgeted),  # first: equal parts of two regions are merged only after it
        *(COUNTER_BASED if options.rng == "counter" else CLEAN),
        *(FUSE if options.numerics != "eager" else ()),
        ProveAttentionMasks(Elements, options.numerics == "eager"),  # after: of fused calls too
        RemoveDeadCode(),  # what made the masks
        _folding(budgeted),  # after masks are proved: they are proved from their formulas
        GatherAgain(),  # ahead of those that decide where collectives stand
        *_placing(options),  # after no-ops: what the caller gets is copied out of a bucket
        *registered("clean"),  # users' own, on a clean graph
        RecomputeMarked(budgeted),  # last: what it adds must not be merged with what it repeats
    )
    return without(passes, options.skip)


def _folding(budgeted: bool) -> FoldConstants:
    """Within a budget constants stay few: they are there all the time, and no plan can drop one."""
    return FoldConstants(64 << 10) if budgeted else FoldConstants()


def _placing(options: Options) -> tuple[GraphPass, ...]:
    """Collectives in their places, where the timeline of the step is not to decide anything of
    them; nothing to do for a step without any."""
    if options.overlap or options.async_tensor_parallel:
        return ()
    return placing(options.bucket_bytes)


def placing(bucket_bytes: int | None) -> tuple[GraphPass, ...]:
    """The passes that put collectives in their places, with buckets of so many bytes."""
    first = FIRST_BUCKET if bucket_bytes is None else min(FIRST_BUCKET, bucket_bytes)
    return communication_passes(first, bucket_bytes)


def extending(options: Options) -> tuple[GraphPass, ...]:
    """What users registered, after what shows them a plain graph; none if nothing is."""
    own = _users(options)
    return (*without(CLEAN, options.skip), *own) if own else ()


def _users(options: Options) -> tuple[GraphPass, ...]:
    return without((*expansion(), *registered("extend")), options.skip)


def without(passes: Sequence[GraphPass], skip: Sequence[str]) -> tuple[GraphPass, ...]:
    """The passes but those that ``skip`` names, by their class or by the rules they apply."""
    kept: list[GraphPass] = []
    for graph_pass in passes:
        if type(graph_pass).__name__ in skip:
            continue
        if isinstance(graph_pass, Rewrite):
            rules = tuple(rule for rule in graph_pass.rules if rule.name not in skip)
            if not rules:
                continue
            graph_pass = (
                graph_pass
                if len(rules) == len(graph_pass.rules)
                else replace(graph_pass, rules=rules)
            )
        kept.append(graph_pass)
    return tuple(kept)


def extended(step: StepGraph, options: Options, watcher: Watcher | None = None) -> StepGraph:
    """The step after what users registered. Before the cache is asked: their code may change. The
    very same step if that finds nothing to change, so that its key is that of the step alone."""
    passes, own = extending(options), len(_users(options))
    if not passes:
        return step
    result = step.copy()
    reports = run_passes(result, passes, watcher or Watcher())
    return result if any(report.changed for report in reports[-own:]) else step


def cleaned(step: StepGraph, options: Options, watcher: Watcher | None = None) -> StepGraph:
    """A cleaned copy, ready to be planned, in which what checkpointing asks for is decided: its
    wishes give way to a budget."""
    return rewritten(step, cleaning_of(options), watcher)


def clean(step: StepGraph) -> StepGraph:
    """A cleaned copy of the captured graph."""
    return rewritten(step, CLEAN)


def rewritten(
    step: StepGraph, passes: Sequence[GraphPass], watcher: Watcher | None = None
) -> StepGraph:
    """A copy of the step after ``passes``."""
    result = step.copy()
    run_passes(result, passes, watcher or Watcher())
    return result
