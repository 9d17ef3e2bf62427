"""Optimizers that are not in the graph: they step eagerly after the compiled part.

The graph ends where they start: their gradients at that point become outputs, and the rest of the
step cannot read their parameters afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from treadle.capture.optimizers.registry import has_update_rule, update_rule
from treadle.capture.snapshot import Snapshot
from treadle.capture.tensors.result_slots import fill, slots_in
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.hooks import step_hooks
from treadle.graph.core.node_info import info
from treadle.util.errors import CaptureError


class CallsClosure(CaptureError):
    """An optimizer outside the graph gets a closure and may call it any number of times, depending
    on values (TR-105)."""

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        super().__init__(
            f"step(closure) of {type(optimizer).__name__}, which is not in the graph and may "
            "call the closure any number of times: this cannot be a single graph",
            code="TR-105",
            where=where,
            remedy=(
                "call the step: it compiles the closure and runs the rest in Python. For a "
                "single graph, call backward() in the step, and step() without a closure"
            ),
        )

    def refused(self) -> CaptureError:
        """The error to raise if the closure by itself cannot be compiled."""
        return CaptureError(
            f"{self.message}; with treadle.DataParallel, ranks average the gradients of whole "
            "steps",
            code=self.code,
            where=self.where,
            remedy="wrap the model in DistributedDataParallel, or call step() without a closure",
        )


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why an optimizer is not in the graph, with its code."""

    code: str
    words: str


def why_eager(optimizer: Optimizer) -> Reason | None:
    """``None`` for an optimizer that becomes part of the graph."""
    kind = type(optimizer).__name__
    if not has_update_rule(optimizer):
        words = (
            f"{kind} has no update rule that can be captured (register one with "
            "treadle.register_optimizer)"
        )
        return Reason("TR-105", words)
    if not update_rule(optimizer).elementwise and _is_split(optimizer):
        words = f"{kind} reads whole parameters, but ranks hold shards of them (DTensors)"
        return Reason("TR-510", words)
    if step_hooks(optimizer):
        return Reason("TR-114", f"{kind} has hooks on step(), and only its own step() calls them")
    return None


def _is_split(optimizer: Optimizer) -> bool:
    """Whether ranks hold parts of a parameter that it steps."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(layout.is_split for parameter in parameters if (layout := layout_of(parameter)))


def in_graph(optimizers: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """The optimizers that become part of the graph."""
    return {
        name: optimizer for name, optimizer in optimizers.items() if why_eager(optimizer) is None
    }


@final
@dataclass(frozen=True, slots=True, eq=False)
class EagerStep:
    """``optimizer.step()`` after the compiled part, with the gradients that the graph made for
    ``parameters``. ``slots``: how the gradients are made from the graph's results. ``values``:
    hyper-parameters that the step sets before it, by the number of a group and a key."""

    optimizer: Optimizer
    reason: Reason
    parameters: tuple[nn.Parameter, ...]
    slots: tuple[object, ...]
    values: tuple[tuple[int, str, Callable[[], object]], ...]

    def run(self, grads: Sequence[Tensor]) -> None:
        """Run the step with all gradients in their places. They are restored if it fails."""
        everyone = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [parameter.grad for parameter in everyone]
        for parameter in everyone:
            parameter.grad = None
        for parameter, grad in zip(self.parameters, fill(self.slots, iter(grads)), strict=True):
            parameter.grad = grad
        groups = self.optimizer.param_groups
        kept = [(at, key, groups[at][key]) for at, key, _ in self.values]
        for at, key, value in [(at, key, compute()) for at, key, compute in self.values]:
            groups[at][key] = value
        try:
            self.optimizer.step()
        except BaseException:
            for parameter, grad in zip(everyone, before, strict=True):
                parameter.grad = grad
            raise
        finally:  # what the step leaves there is put there when all else has succeeded
            for at, key, value in kept:
                groups[at][key] = value

    def snapshot(self) -> Snapshot:
        """A copy of everything that it changes."""
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        return Snapshot({}, {"": self.optimizer}, parameters)


def run_eagerly(steps: Sequence[EagerStep], grads: Sequence[Tensor]) -> None:
    """Run each optimizer, in the order of the user's code; ``grads``: the gradients of all, in that
    order."""
    at = 0
    for step in steps:
        end = at + slots_in(step.slots)
        step.run(grads[at:end])
        at = end


def drop_lost(writes: Mapping[int, fx.Node]) -> dict[int, fx.Node]:
    """The write-backs without those of parameters that an optimizer outside the graph writes.

    ``lost`` marks a value that stands for what such an optimizer leaves in a parameter.
    """
    return {at: value for at, value in writes.items() if not info(value).lost}


def refuse_lost(graph: fx.Graph, steps: Sequence[EagerStep]) -> None:
    """``CaptureError`` TR-115 if the step reads what such an optimizer leaves."""
    readers = [user for node in graph.nodes if info(node).lost for user in node.users]
    if readers:
        raise CaptureError(
            "the step reads a parameter after an optimizer that runs outside the graph: "
            + "; ".join(step.reason.words for step in steps),
            code="TR-115",
            where=info(readers[0]).where,
            remedy="read it after the compiled step, or register an update rule for the optimizer",
        )
