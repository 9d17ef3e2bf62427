"""The substitute for ``optimizer.step`` while a step is traced.

An optimizer with an update rule updates in the graph. Without a rule, its own code is traced, or it
runs after the graph: then its gradients are results, and the step may not read its parameters
afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.eager import CallsClosure, EagerStep, Reason, why_eager
from treadle.capture.explain_errors import here
from treadle.capture.integrations.grad_scaler import refused_scaling
from treadle.capture.optimizers.registry import check_step
from treadle.capture.tensors.result_slots import slot_of
from treadle.capture.tracing.graph_updates import GraphUpdates
from treadle.capture.tracing.input_bindings import InputBindings
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.trace_recorder import Span, TraceRecorder
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.compat.tracing import traced_nodes
from treadle.util.errors import CaptureError

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class EagerGradient:
    """The gradient that an optimizer outside the graph gets, and the one it was copied from."""

    copy: Tensor
    original: Tensor
    version: int


@final
class OptimizerSteps:
    """The optimizer steps of one run. ``spans``: nodes of updates. ``eager``: the steps after the
    graph. ``lost``: nodes that stand for what those leave in parameters."""

    def __init__(
        self,
        request: TraceRequest,
        bindings: InputBindings,
        updates: GraphUpdates,
        recorder: TraceRecorder,
    ) -> None:
        self.spans: list[Span] = []
        self.eager: list[EagerStep] = []
        self.lost: set[int] = set()
        self._request, self._bindings = request, bindings
        self._updates, self._recorder = updates, recorder
        self._gradients: dict[int, EagerGradient] = {}  # by the id of a parameter
        self._taken: set[int] = set()  # ids of optimizers that have stepped

    def stepper(self, optimizer: Optimizer) -> Callable[..., object]:
        """The replacement of ``optimizer.step``, on traced parameters and state."""
        check_step(optimizer)
        own = self._request.own_steps
        if own.takes(optimizer):
            updates = self._request.update
            return own.stepper(optimizer, self._recorder, self.spans, updates=updates)
        reason = own.why_eager(optimizer)

        def step(closure: Callable[[], T] | None = None) -> T | None:
            loss = None
            if closure is not None:
                if reason is not None:
                    raise CallsClosure(optimizer, here())
                with torch.enable_grad():
                    loss = closure()
            self._refuse_more_steps(optimizer)
            start = traced_nodes()
            with torch.no_grad():
                if self._request.update and reason is not None:
                    self._hand_over(optimizer, reason)
                elif self._request.update:
                    self._updates.run(optimizer)
            self.spans.append((start, traced_nodes()))
            self._taken.add(id(optimizer))
            return loss

        return step

    def _refuse_more_steps(self, optimizer: Optimizer) -> None:
        """TR-106 for a second update of an optimizer that a scaler steps: whether the first one
        counted is not known."""
        if id(optimizer) in self._recorder.scaling.stepped and (
            id(optimizer) in self._taken or why_eager(optimizer) is not None
        ):
            raise refused_scaling(
                f"a GradScaler steps {type(optimizer).__name__}, which steps twice in the call "
                "or outside the graph"
            )

    def _hand_over(self, optimizer: Optimizer, reason: Reason) -> None:
        """The optimizer steps after the graph: its gradients are results, and its parameters are
        written with something that nobody may read."""
        if any(step.optimizer is optimizer for step in self.eager):
            raise _steps_twice(reason)
        parameters: list[nn.Parameter] = []
        stepped = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for parameter in self._request.parameters:
            leaf = self._bindings.of(parameter)
            if id(leaf) not in stepped:
                continue
            if leaf.grad is not None:
                copy = leaf.grad.clone()
                self._gradients[id(parameter)] = EagerGradient(copy, leaf.grad, leaf.grad._version)
                parameters.append(parameter)
            value = local_of(leaf).detach()
            self.lost.add(traced_nodes())
            value.copy_(torch.empty_like(value))
        slots = tuple(map(slot_of, self._copies(parameters)))
        values = tuple(self._updates.hyper.set_values(optimizer))
        self.eager.append(EagerStep(optimizer, reason, tuple(parameters), slots, values))

    def _copies(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [self._gradients[id(parameter)].copy for parameter in parameters]

    def gradients(self) -> list[Tensor]:
        """The gradients that optimizers outside the graph get, in the order of their steps."""
        return [copy for step in self.eager for copy in self._copies(step.parameters)]

    def is_as_handed(self, parameter: nn.Parameter, grad: Tensor | None) -> bool:
        """Whether ``grad`` is still what an optimizer outside the graph was given."""
        handed = self._gradients.get(id(parameter))
        if handed is None or grad is None or grad is not handed.original:
            return False
        return grad._version == handed.version


def _steps_twice(reason: Reason) -> CaptureError:
    return CaptureError(
        f"an optimizer outside the graph steps twice in one call: {reason.words}",
        code="TR-109",
        where=here(),
        remedy=(
            "compile a function that calls its step() once, or register an update rule for the "
            "optimizer (treadle.register_optimizer)"
        ),
    )
