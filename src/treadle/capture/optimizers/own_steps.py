"""Optimizers without an update rule, whose own ``step`` is captured as user code.

Parameters, gradients, hyper-parameters and ``optimizer.state`` are traced when it runs, so what it
computes is part of the graph. If the code cannot be captured (it reads values, or calls
extensions), the optimizer runs outside the graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, final

from torch.optim import Optimizer

from treadle.capture.eager import Reason, why_eager
from treadle.capture.integrations.grad_scaler import refused_scaling
from treadle.capture.optimizers.registry import has_update_rule
from treadle.capture.tracing.checkpointed_regions import Span
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.compat.hooks import step_hooks
from treadle.compat.tracing import traced_nodes


@final
@dataclass(slots=True)
class OwnSteps:
    """The optimizers of one capture whose own code is captured, by their ids. ``refused``: why the
    code of others cannot be captured; ``failed``: the innermost optimizer whose code raised."""

    taken: frozenset[int] = frozenset()
    refused: Mapping[int, str] = field(default_factory=dict[int, str])
    failed: int | None = None
    has_failed: bool = False  # whether the code of one ever has

    @staticmethod
    def of(optimizers: Mapping[str, Optimizer]) -> "OwnSteps":
        """All optimizers whose own code might be captured."""
        own = (e for e in optimizers.values() if not has_update_rule(e) and not step_hooks(e))
        return OwnSteps(frozenset(map(id, own)))

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether its own code is captured."""
        return id(optimizer) in self.taken

    def without(self, others: frozenset[int], why: str) -> "OwnSteps":
        """The same without ``others``, whose code could not be captured."""
        refused = {**self.refused, **dict.fromkeys(others, why)}
        has_failed = self.has_failed or self.failed is not None
        return OwnSteps(self.taken - others, refused, has_failed=has_failed)

    def why_eager(self, optimizer: Optimizer) -> Reason | None:
        """Why it steps outside the graph."""
        reason = why_eager(optimizer)
        why = self.refused.get(id(optimizer))
        if reason is None or why is None:
            return reason
        return Reason(reason.code, f"{reason.words}, and its own step cannot be captured: {why}")

    def stepper(
        self, optimizer: Optimizer, recorder: TraceRecorder, update: list[Span], *, updates: bool
    ) -> Callable[..., object]:
        """The replacement of ``optimizer.step`` while the step is captured. ``update`` gets the
        nodes that it makes."""
        original: Callable[..., Any] = optimizer.step

        def step(*args: object, **named: object) -> object:
            closure = next(filter(callable, (*args, *named.values())), None)
            if not updates:
                return None if closure is None else closure()
            if id(optimizer) in recorder.scaling.skips:
                raise refused_scaling(
                    f"a GradScaler steps {type(optimizer).__name__}, whose own code is captured"
                )
            start, conditions = traced_nodes(), recorder.conditions
            before, conditions.path = conditions.path, None  # it does not look at values
            try:
                return original(*args, **named)
            except Exception:
                self.failed = id(optimizer) if self.failed is None else self.failed
                raise
            finally:
                conditions.path = before
                if closure is None:
                    update.append((start, traced_nodes()))

        function = original.__func__ if isinstance(original, MethodType) else original
        vars(step).update(vars(function))  # what schedulers look for
        return step
