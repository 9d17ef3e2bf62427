"""The regions of a step: the choice by its options, before the cache lookup, and the resulting
regions on request."""

from dataclasses import replace

from treadle.compiler.cleaning import CLEAN, cleaned, extended, rewritten
from treadle.graph.analysis.dynamic import dims_of_graph
from treadle.graph.core.node_info import info, with_info
from treadle.graph.core.signature import StepGraph
from treadle.graph.regions.loop_bodies import LoopBody, bodies_of
from treadle.graph.regions.region_compilers import compiler_of, region_compiler
from treadle.graph.regions.regions import EAGER, NATIVE, Region, refused, regions_of
from treadle.graph.rewrite.passes import GraphPass
from treadle.loop.program import Call
from treadle.lower.graph import lower
from treadle.options import Options
from treadle.passes.regions import ContractRegions, RunEagerly
from treadle.report.stages import Watcher
from treadle.targets.registry import target_for
from treadle.util.errors import LoweringError
from treadle.util.reasons import ReasonCode


def with_regions(
    step: StepGraph, device: str, options: Options, watcher: Watcher | None = None
) -> StepGraph:
    """The step after what users registered and after what its options say of regions. What they
    choose is a fact of the graph from then on, and so of the key in the cache."""
    asked = options.regions
    if not asked.chooses:
        return extended(step, options, watcher)
    others = {rule.compiler for rule in asked.rules} - {NATIVE, EAGER}
    for name in sorted(others):
        region_compiler(name)  # refuses a name that nobody has
    if others and dims_of_graph(step.graph):
        raise LoweringError(
            "other region compilers need fixed sizes, and this step declares shapes",
            code="TR-318",
            remedy='leave shapes= out, or use only "native" and "eager"',
        )
    run_eagerly = RunEagerly(asked.rules)
    step = rewritten(step, (*CLEAN, run_eagerly), watcher)  # first: these are not expanded
    step = extended(step, options, watcher)
    passes: list[GraphPass] = [*CLEAN, run_eagerly]
    if others:
        passes.append(ContractRegions(asked.rules, asked.smallest))
    step = rewritten(step, passes, watcher)
    for region in refused(found_regions(step, device, options), asked.smallest, asked.accepts):
        why = f"a region of {region.operations} operations that compute"
        for node in region.nodes:
            with_info(node, eager=ReasonCode.SMALL_REGION.because(why))
    return step


def found_regions(step: StepGraph, device: str, options: Options) -> tuple[Region, ...]:
    """The regions of a graph as it is, by what lowering says of each of its nodes."""
    target = target_for(device, options.target)
    program = lower(step, device=device, target=target, library=not options.codegen)
    reasons: dict[str, str] = {}
    for host_step in program.steps:
        if isinstance(host_step, Call) and host_step.reason:
            reasons.setdefault(host_step.origin.nodes[0], host_step.reason)
    nodes = {node: reasons[node.name] for node in step.graph.nodes if node.name in reasons}
    others = {node: name for node in step.graph.nodes if (name := compiler_of(node.target))}
    return regions_of(step.graph, nodes, others)


def regions_of_step(step: StepGraph, device: str, options: Options) -> tuple[Region, ...]:
    """The regions of a captured step after what its options say and after cleaning; the memory
    plan, which may compute some nodes twice, comes later."""
    return found_regions(_cleaned(step, device, options), device, options)


def regions_in_loops(
    step: StepGraph, device: str, options: Options, first: int
) -> tuple[Region, ...]:
    """Those of the functions of its loops, numbered from ``first`` on; a function that two loops
    run has them once, and one whose rounds are PyTorch's kernels has none."""
    regions: list[Region] = []
    known: set[LoopBody] = set()
    _add_regions(_cleaned(step, device, options), device, options, regions, known)
    return tuple(replace(region, number=first + at) for at, region in enumerate(regions))


def _cleaned(step: StepGraph, device: str, options: Options) -> StepGraph:
    return cleaned(with_regions(step, device, options), options)


def _add_regions(
    step: StepGraph, device: str, options: Options, regions_: list[Region], known: set[LoopBody]
) -> None:
    for node in step.graph.nodes if options.codegen else ():
        bodies = () if info(node).eager else bodies_of(str(node.target), node.args)
        for body in bodies:
            if body not in known:
                known.add(body)
                inner = cleaned(body.step(), replace(options, memory=None))
                regions = found_regions(inner, device, options)
                regions_ += [replace(region, inside=node.name) for region in regions]
                _add_regions(inner, device, options, regions_, known)
