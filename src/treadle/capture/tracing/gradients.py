"""The gradients that a step leaves in ``.grad`` of parameters, and whether parameters need
gradients afterwards."""

from typing import final

import torch
from torch import Tensor, nn

from treadle.capture.tensors.gradient_effects import GradientEffects
from treadle.capture.tensors.result_slots import slot_of
from treadle.capture.tracing.input_bindings import InputBindings
from treadle.capture.tracing.optimizer_steps import OptimizerSteps
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.trace_recorder import TraceRecorder


@final
class Gradients:
    """Those of one run. A call without an update keeps those of the last backward, which
    ``keep`` is called after."""

    def __init__(
        self,
        request: TraceRequest,
        bindings: InputBindings,
        steps: OptimizerSteps,
        recorder: TraceRecorder,
    ) -> None:
        self._request, self._bindings = request, bindings
        self._steps, self._recorder = steps, recorder
        self._kept: dict[int, Tensor] | None = None  # ``None`` before a backward

    def keep(self) -> None:
        """Keep the present ``.grad`` as what the call leaves there."""
        kept = {} if self._kept is None else self._kept
        with torch.no_grad():
            for key, leaf in self._bindings.parameters.items():
                if leaf.grad is not None:
                    kept[key] = leaf.grad.clone()
        self._kept = kept

    def _of(self, parameter: nn.Parameter) -> Tensor | None:
        if self._kept is not None:
            return self._kept.get(id(parameter))
        return self._bindings.of(parameter).grad

    def effects(self) -> tuple[GradientEffects, list[Tensor]]:
        """The effects of the step on gradients."""
        uses, conditions = self._recorder.tensors, self._recorder.conditions
        leaves = {parameter: self._bindings.of(parameter) for parameter in self._request.parameters}
        fresh = [key for key, leaf in leaves.items() if id(leaf) in uses.fresh]
        grads = {leaf: self._of(leaf) for leaf in leaves}
        ours = [p for p, grad in grads.items() if not self._steps.is_as_handed(p, grad)]
        used = [parameter for parameter in ours if uses.uses_gradient(leaves[parameter])]
        left = {parameter: grad for parameter in used if (grad := grads[parameter]) is not None}
        effects = GradientEffects(
            left=tuple(left),
            slots=tuple(map(slot_of, left.values())),
            cleared=tuple(parameter for parameter in used if grads[parameter] is None),
            untouched=tuple(
                parameter for parameter in ours if not uses.uses_gradient(leaves[parameter])
            ),
            fresh=tuple(fresh),
            kept=tuple(key for key in fresh if conditions.keeps(leaves[key])),
            toggled=tuple(
                (key, leaf.requires_grad)
                for key, leaf in leaves.items()
                if leaf.requires_grad != key.requires_grad
            ),
        )
        return effects, list(left.values())
