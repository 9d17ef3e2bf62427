"""What the collectives of a step cost here: each of its groups is measured at its first use."""

import torch
from torch import distributed

from treadle.compat.distributed.collectives import group_named
from treadle.compiler.cleaning import cleaned, placing, rewritten
from treadle.compiler.compiled import Compiled
from treadle.graph.analysis.dynamic import dims_of_graph
from treadle.graph.core.collectives import collectives_in, is_same_on_all_ranks
from treadle.graph.core.signature import StepGraph
from treadle.graph.text.parsing import parse
from treadle.options import Options
from treadle.passes.comm.bucketing.bucket_bytes import choose_bucket_bytes
from treadle.passes.comm.cost import CommunicationModel, from_measurements, unmeasured
from treadle.passes.comm.overlap.order import OverlapCommunication
from treadle.passes.comm.overlap.pipeline import PipelineProducts
from treadle.report.stages import Watcher
from treadle.runtime.ranks.group_costs import measured_group
from treadle.runtime.store.cache import Cache
from treadle.targets.model import DeviceModel


def communication_costs(
    step: StepGraph, device: str, hardware: DeviceModel, cache: Cache, *, measure: bool
) -> CommunicationModel | None:
    """Of a step whose groups are here; ``None`` for one without collectives. All ranks of the
    groups have to come here with the same collectives in the same order: a group is measured by all
    of its ranks, the first that the step uses first. ``hardware`` stands for what is not measured.
    """
    names = list(dict.fromkeys(collective.group for collective in collectives_in(step.graph)))
    if not names:
        return None
    groups = {name: group_named(name) for name in names}
    here = torch.device(device)
    measured = {name: measured_group(groups[name], here, cache, measure=measure) for name in names}
    counts = {
        name: distributed.get_world_size(group)
        for name, group in groups.items()
        if measured[name] is None
    }
    known = {name: measurement for name, measurement in measured.items() if measurement is not None}
    costs = {
        **unmeasured(counts, hardware).groups,
        **from_measurements(known, hardware).groups,
    }
    return CommunicationModel({name: costs[name] for name in names})


def timed(
    step: StepGraph,
    options: Options,
    costs: CommunicationModel,
    hardware: DeviceModel,
    watcher: Watcher,
) -> StepGraph:
    """The step with what its timeline decides of its collectives: pieces of products beside them,
    and their order. As it is where the options ask for neither."""
    if options.async_tensor_parallel:
        then, grows = placing(options.bucket_bytes), options.memory is None
        pieces = PipelineProducts(costs.with_interference(), hardware, then, grows=grows)
        step = rewritten(step, (pieces, *(() if options.overlap else then)), watcher)
    return _overlapped(step, costs, hardware, watcher) if options.overlap else step


def _overlapped(
    step: StepGraph, costs: CommunicationModel, hardware: DeviceModel, watcher: Watcher
) -> StepGraph:
    """The step in the order that hides most of its communication, in buckets of the size that
    makes it shortest, both by its timeline; in the usual buckets where ranks differ, whose
    timelines do too."""
    alike = is_same_on_all_ranks(step)
    cap = choose_bucket_bytes(step, costs, hardware, placing) if alike else None
    return rewritten(step, (*placing(cap), OverlapCommunication(costs, hardware)), watcher)


def graph_to_simulate(compiled: Compiled) -> StepGraph:
    """The graph of a variant as it was planned; where calls decide sizes, which its text does not
    tell, as it was ahead of the plan."""
    if dims_of_graph(compiled.captured.step.graph):
        return cleaned(compiled.captured.step, compiled.options)
    return parse(compiled.log.texts["planned"])
