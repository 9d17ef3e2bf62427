"""A captured step as data: what another process needs, apart from the artifact, to serve calls."""

from typing import cast

from torch import fx

from treadle.capture.captured import (
    CallInputs,
    Captured,
    CapturedResult,
    OptimizerEffects,
    StepDependencies,
)
from treadle.capture.optimizers.param_groups import ParamGroups
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.sources import Inputs, Pending, Scalars, Source
from treadle.capture.stored.codec import Decoder, Encoder, UserObjects
from treadle.capture.stored.names import NotStored
from treadle.capture.stored.origin import StepObjects
from treadle.capture.stored.reads import Data, StoredReads
from treadle.capture.symbolic.branches.decisions import Path
from treadle.capture.symbolic.computations import NumberDecision
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.symbolic.numbers import Uses
from treadle.capture.tensors.gradient_effects import GradientEffects
from treadle.compat.operators.custom_op import NAMESPACE
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.signature import Signature, StepGraph
from treadle.graph.text.exact import operation_of, operation_text
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show

_MOST_TEXT = 1 << 26
"""Characters of a graph's text: larger constants are a user's data, and belong in no record."""


def captured_data(captured: Captured, step: StepObjects) -> Data:
    """All of ``captured`` except its reads. ``NotStored`` for values that only this process has."""
    _refuse(captured)
    graph = captured.dependencies.reads.graph
    encoder = Encoder(UserObjects(step, graph.nodes, graph.by_identity))
    dependencies, inputs = captured.dependencies, captured.inputs
    return {
        "graph": _graph_text(captured.step),
        "device": captured.device,
        **{
            name: encoder.data(value)
            for name, value in (
                ("signature", captured.step.signature),
                ("param groups", captured.optimizers.param_groups),
                ("sources", inputs.sources),
                ("pending", inputs.pending),
                ("result", captured.result),
                ("gradients", captured.gradients),
                ("stepped", captured.optimizers.stepped),
                ("free", dependencies.free),
                ("counters", dependencies.counters),
                ("decisions", dependencies.decisions),
                ("unread modes", dependencies.unread_modes),
                ("conditions", dependencies.conditions),
            )
        },
    }


def captured_again(data: Data, reads: ReadsGuard, step: StepObjects) -> Captured:
    """The inverse, bound to this process' objects. The graph is made when somebody asks for it."""
    decoder = Decoder(UserObjects(step, reads.graph.nodes))
    values = {
        name: decoder.value(data[name])
        for name in (
            "signature", "param groups", "sources", "pending", "result", "gradients", "stepped",
            "free", "counters", "decisions", "unread modes", "conditions",
        )
    }  # fmt: skip
    sources = cast("tuple[Source, ...]", values["sources"])
    text, signature = cast("str", data["graph"]), cast("Signature", values["signature"])
    groups = cast("ParamGroups", values["param groups"])
    return Captured(
        step=StepGraph(lambda: _graph_of(text), signature),
        device=cast("str", data["device"]),
        inputs=CallInputs(
            sources,
            step.call,
            Scalars(sources),
            Inputs(sources),
            cast("Pending", values["pending"]),
        ),
        result=cast("CapturedResult", values["result"]),
        gradients=cast("GradientEffects", values["gradients"]),
        optimizers=OptimizerEffects((), groups, cast("frozenset[int]", values["stepped"])),
        dependencies=StepDependencies(
            reads,
            cast("frozenset[int]", values["free"]),
            cast("tuple[Location, ...]", values["counters"]),
            cast("tuple[NumberDecision, ...]", values["decisions"]),
            HostDraws(Uses()),  # refused above, as are paths
            cast("frozenset[int]", values["unread modes"]),
            cast("tuple[str, ...]", values["conditions"]),
            Path(),
        ),
        generators=(),
        stored=StoredReads(None, "another process stored it"),
    )


def _refuse(captured: Captured) -> None:
    dependencies = captured.dependencies
    for reason, holds in (
        ("random generators of your own", captured.generators),
        ("optimizers that run outside the graph", captured.optimizers.eager),
        ("random numbers that Python draws", dependencies.host_draws),
        ("branches on values of tensors", dependencies.path.decisions),
    ):
        if holds:
            raise NotStored(reason)


def _graph_text(step: StepGraph) -> str:
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        op = node.target
        if isinstance(op, OpOverload) and not (facts_of(op).native or op.namespace == NAMESPACE):
            raise NotStored(f"an operator that belongs to neither PyTorch nor treadle: {op}")
        if operation_of(operation_text(op)) is not op:
            raise NotStored(f"{operation_text(op)}, which cannot be named in a text")
    text = show(step, exact=True)
    if len(text) > _MOST_TEXT:
        raise NotStored(f"a graph whose constants take {len(text)} characters")
    return text


def _graph_of(text: str) -> fx.Graph:
    return parse(text).graph
