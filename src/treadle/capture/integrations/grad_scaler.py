"""``torch.amp.GradScaler`` in a step that is captured: its decisions on gradients become selections
in the graph.

::

    scaler.scale(loss)     loss * scale
    scaler.unscale_(opt)   found = any gradient is not finite;  gradients /= scale
    scaler.step(opt)       parameters and state: where(found_inf, as they were, updated)
    scaler.update()        scale: where(found_inf, scale * backoff, scale, or grown)

An optimizer's step counter is kept by Python: the number ``found_inf`` is a result, and decides
after the call whether the counter advances. A disabled scaler is left alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.failures import of_torch
from treadle.capture.integrations.integration import Integration, Patch, TracedRun
from treadle.capture.tensors.sparse_gradients import is_sparse
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.grad_scaler import (
    KINDS,
    METHODS,
    begin,
    is_begun,
    is_between,
    scale_and_tracker,
)
from treadle.util.errors import CaptureError


@final
class ScalerBegins(Exception):
    """A run used a scaler that has no tensors yet, and must be repeated."""

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        super().__init__()
        self._scaler, self._device = scaler, device

    def begin(self) -> None:
        """Make the scaler create its tensors."""
        begin(self._scaler, self._device)


@final
@dataclass(slots=True)
class _Unscaled:
    """The gradients of an optimizer since the last update of a scaler."""

    found_inf: Tensor  # whether any of them is not finite
    is_stepped: bool = False


@final
@dataclass(slots=True, eq=False)
class SkippedUpdate:
    """Whether an optimizer skipped its step in a call, as a place that the call writes."""

    optimizer: Optimizer
    is_skipped: bool = False
    label: str = "a scaler's skipped step"

    def get(self) -> bool:
        """The value of the last call."""
        return self.is_skipped

    def put(self, value: Tensor) -> None:
        """Set the value of this call."""
        self.is_skipped = bool(value)


@dataclass(slots=True)
class LossScaling:
    """The work of scalers in one run. ``inside``: gives the traced tensor for one of a scaler's.
    ``updates``: whether optimizers step in the run; if not, gradients stay scaled."""

    inside: Callable[[Tensor], Tensor]
    updates: bool
    skips: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By the id of each optimizer whose step is running, whether it skips the update."""
    stepped: dict[int, tuple[Optimizer, Tensor]] = field(
        default_factory=dict[int, tuple[Optimizer, Tensor]]
    )
    _unscaled: dict[tuple[int, int], _Unscaled] = field(
        default_factory=dict[tuple[int, int], _Unscaled]
    )
    _made: dict[int, GradScaler] = field(default_factory=dict[int, GradScaler])

    def methods(self) -> Iterator[Patch]:
        """The replacements of the scaler's methods, by class and name."""
        ours = (self._scale, self._unscale, self._step, self._update)
        for name, function in zip(METHODS, ours, strict=True):
            original = vars(GradScaler)[name]
            yield GradScaler, name, _if_enabled(function, original)
        yield GradScaler, "__init__", self._making(GradScaler.__init__)

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        def make(scaler: GradScaler, *args: object, **named: object) -> None:
            self._made[id(scaler)] = scaler
            original(scaler, *args, **named)

        return make

    def check(self) -> None:
        """TR-106 at the end of a step between ``unscale_`` and ``update``."""
        if self._unscaled:
            raise refused_scaling(
                "a GradScaler unscales gradients, and the step does not call update()"
            )

    def _scale(
        self, original: Callable[..., object], scaler: GradScaler, outputs: "Outputs"
    ) -> object:
        if is_begun(scaler):
            return original(scaler, outputs)
        if id(scaler) in self._made:  # the next run makes another one, which is to begin again
            raise refused_scaling("a GradScaler is created in the step")
        raise ScalerBegins(scaler, _device_of(outputs))

    def _unscale(self, _: object, scaler: GradScaler, optimizer: Optimizer) -> None:
        key = id(scaler), id(optimizer)
        known = self._unscaled.get(key)
        if known is not None and known.is_stepped:
            raise _eagers(RuntimeError, "unscale_() after step(): call update() first")
        if known is not None:
            raise of_torch(
                RuntimeError("unscale_() twice for one optimizer: call update() first"),
                here(),
            )
        if is_between(scaler, optimizer):
            raise refused_scaling("a GradScaler was used before the step without update()")
        if not self.updates:
            return
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not grads:
            raise of_torch(
                AssertionError("a GradScaler finds no gradients for the optimizer"), here()
            )
        if any(grad.dtype is torch.float16 for grad in grads):
            raise _eagers(ValueError, "a GradScaler does not unscale float16 gradients")
        if any(layout_of(grad) is not None for grad in grads):
            raise refused_scaling("a GradScaler unscales gradients that are sharded between ranks")
        with torch.no_grad():
            scale = self.inside(scale_and_tracker(scaler)[0])
            inverse = scale.double().reciprocal().float()
            values_of = [grad._values() if is_sparse(grad) else grad for grad in grads]
            flags = [torch.isfinite(values).logical_not().any() for values in values_of]
            self._unscaled[key] = _Unscaled(torch.stack(flags).any())
            for grad in grads:
                grad.mul_(inverse)

    def _step(
        self, _: object, scaler: GradScaler, optimizer: Optimizer, *args: object, **named: object
    ) -> object:
        if args or "closure" in named:
            raise of_torch(
                RuntimeError("step() of a GradScaler accepts no closure"),
                here(),
            )
        if not self.updates:
            return optimizer.step()
        key = id(scaler), id(optimizer)
        if key not in self._unscaled:
            self._unscale(None, scaler, optimizer)
        state = self._unscaled[key]
        if state.is_stepped:
            raise of_torch(
                RuntimeError("step() twice for one optimizer: call update() first"), here()
            )
        if id(optimizer) in self.stepped:
            raise refused_scaling("a GradScaler steps an optimizer twice in one call")
        self.stepped[id(optimizer)] = optimizer, state.found_inf
        state.is_stepped = True
        self.skips[id(optimizer)] = state.found_inf
        try:
            return optimizer.step()
        finally:
            del self.skips[id(optimizer)]

    def _update(
        self, original: Callable[..., object], scaler: GradScaler, new: object = None
    ) -> None:
        flags = [
            scaled.found_inf for (owner, _), scaled in self._unscaled.items() if owner == id(scaler)
        ]
        for key in [key for key in self._unscaled if key[0] == id(scaler)]:
            del self._unscaled[key]
        if not self.updates:
            return
        if new is not None:
            with torch.no_grad():
                self.inside(scale_and_tracker(scaler)[0]).copy_(torch.as_tensor(new))
            return
        if not flags:
            raise _eagers(AssertionError, "update() of a GradScaler without a preceding step()")
        with torch.no_grad():
            scale, tracker = scale_and_tracker(scaler)
            _grow(scaler, self.inside(scale), self.inside(tracker), torch.stack(flags).any())


def _grow(scaler: GradScaler, scale: Tensor, tracker: Tensor, is_found: Tensor) -> None:
    """The scale and the tracker after a step."""
    count = tracker + 1
    is_full = count == scaler.get_growth_interval()
    less = (scale.double() * scaler.get_backoff_factor()).float()
    more = (scale.double() * scaler.get_growth_factor()).float()
    grown = torch.where(is_full.logical_and(torch.isfinite(more)), more, scale)
    new_scale = torch.where(is_found, less, grown)
    new_count = torch.where(is_found.logical_or(is_full), torch.zeros_like(count), count)
    scale.copy_(new_scale)
    tracker.copy_(new_count)


def selected(is_found: Tensor, update: Callable[[], None], tensors: tuple[Tensor, ...]) -> None:
    """``update()``, which writes ``tensors``; where ``is_found``, they stay as they were."""
    before = [tensor.clone() for tensor in tensors]
    update()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(is_found, old, tensor))


def _if_enabled(
    ours: Callable[..., object], original: Callable[..., object]
) -> Callable[..., object]:
    def call(scaler: GradScaler, *args: object, **named: object) -> object:
        if not scaler.is_enabled():
            return original(scaler, *args, **named)
        if type(scaler) not in KINDS:
            raise refused_scaling(
                f"a GradScaler has a class that treadle does not know: {type(scaler).__name__}"
            )
        return ours(original, scaler, *args, **named)

    return call


Outputs = Tensor | Iterable["Outputs"]


def _device_of(outputs: Outputs) -> torch.device:
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs))
    return outputs.device


def refused_scaling(what: str) -> CaptureError:
    """TR-106."""
    return CaptureError(
        what,
        code="TR-106",
        where=here(),
        remedy=(
            "call scale, backward, step and update of a torch.amp.GradScaler in the step, each "
            "once per optimizer that is in the graph; or use bfloat16 autocast, which needs no "
            "scaler"
        ),
    )


def _eagers(kind: type[Exception], text: str) -> CaptureError:
    """The error that the scaler itself would raise."""
    return of_torch(kind(text), here())


def _patches(run: TracedRun) -> Iterable[Patch]:
    return run.scaling.methods()


GRAD_SCALER = Integration(name="torch.amp.GradScaler", patches=_patches)
