"""Every name that ``treadle`` offers."""

from treadle.api import Step, compile, load
from treadle.capture.optimizers.registry import ZEROS, OptimizerUpdate, Start, register_optimizer
from treadle.compiler.planning import Plan, Point, plan
from treadle.graph.core.signature import StepGraph
from treadle.graph.regions.region_compilers import register_region_compiler
from treadle.graph.regions.regions import Region
from treadle.graph.rewrite import rules
from treadle.graph.rewrite.passes import GraphPass
from treadle.graph.rewrite.rules import NoMatch, Rewrite, Rule
from treadle.options import Callback, Carry, DataParallel, Options, RegionRule, Regions
from treadle.passes.comm.simulate import CollectiveSpan, CommunicationTimeline, ComputeSpan
from treadle.passes.memory.estimates.operations import PlannedOperation
from treadle.passes.memory.solvers.problem import SaveProblem
from treadle.passes.registered import register_lowering, register_pass
from treadle.report.beside import Comparison
from treadle.report.communication import SimulatedStep
from treadle.report.summary import PhaseSummary, Summary
from treadle.session.compare import Difference
from treadle.session.nonfinite import NonFinite
from treadle.session.variants.padding import pad_to_bucket
from treadle.session.variants.shapes import Dynamic, dynamic
from treadle.util.errors import (
    CaptureError,
    LoweringError,
    PlanError,
    RuntimeFailure,
    TreadleError,
    VerifyError,
)
from treadle.util.planning.planner import Planner

__all__ = [
    "ZEROS",
    "Callback",
    "CaptureError",
    "Carry",
    "CollectiveSpan",
    "CommunicationTimeline",
    "Comparison",
    "ComputeSpan",
    "DataParallel",
    "Difference",
    "Dynamic",
    "GraphPass",
    "LoweringError",
    "NoMatch",
    "NonFinite",
    "OptimizerUpdate",
    "Options",
    "PhaseSummary",
    "Plan",
    "PlanError",
    "PlannedOperation",
    "Planner",
    "Point",
    "Region",
    "RegionRule",
    "Regions",
    "Rewrite",
    "Rule",
    "RuntimeFailure",
    "SaveProblem",
    "SimulatedStep",
    "Start",
    "Step",
    "StepGraph",
    "Summary",
    "TreadleError",
    "VerifyError",
    "compile",
    "dynamic",
    "load",
    "pad_to_bucket",
    "plan",
    "register_lowering",
    "register_optimizer",
    "register_pass",
    "register_region_compiler",
    "rules",
]
