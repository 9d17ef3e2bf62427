"""Lightning: a strategy that compiles the training step of a ``LightningModule`` whole.

::

    from treadle.integrations.lightning import TreadleStrategy

    trainer = lightning.Trainer(strategy=TreadleStrategy(memory="4GiB"))
    trainer.fit(module, data)
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.api import Step, compile
from treadle.integrations.refusals import refused
from treadle.options import Options, options_with
from treadle.util.errors import not_installed

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise not_installed(error) from None

Logged = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""One call of ``self.log``: the name, the value and what else it was given."""


class TreadleStrategy(SingleDeviceStrategy):
    """Trains on one device, whatever ``devices=`` says. ``training_step``, the backward, the
    clipping, the optimizer and the module's own hooks between them are one compiled step.

    ``memory`` and ``options`` are those of ``treadle.compile``. ``device``: default: the first GPU
    if the trainer uses GPUs, or the CPU. ``step`` is what was compiled, for ``explain`` and the
    rest. ``CaptureError`` TR-142 for what cannot be one step.
    """

    strategy_name = "treadle"

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        memory: str | int | float | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device or "cpu", **kwargs)
        self.step: Step[..., Any] | None = None
        self._step_options = options_with(options, memory=memory)
        self._device = device
        self._updates = False
        self._logged: list[Logged] | None = None
        self._log_within = self._log
        self._grads: list[Tensor | None] = []

    @property
    def root_device(self) -> torch.device:
        """Where the module is trained."""
        if self._device is not None:
            return torch.device(self._device)
        on_cpu = self.accelerator is None or isinstance(self.accelerator, CPUAccelerator)
        return torch.device("cpu") if on_cpu else torch.device("cuda", 0)

    def setup(self, trainer: Trainer) -> None:
        """A fit begins: its step is another one."""
        self.step = None
        super().setup(trainer)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Lightning's closure, whose step also updates."""
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the compiled step; what the module's returns, detached.

        Lightning clears gradients between this and ``backward``, so those that a step leaves for
        the next batch are put in their places there."""
        module = self._trained()
        if self.step is None:
            self.step = self._compiled(module)
        vars(module)["log"] = self._log_within
        try:
            output, logged = self.step(self._updates, *args, **kwargs)
        finally:
            del vars(module)["log"]
        self._grads = []
        if not self._updates:
            self._grads = [each.grad for each in module.parameters()]
        for name, value, others, options in logged:
            module.log(name, value, *others, **options)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The step has done it."""
        if self._grads:
            for parameter, grad in zip(self._trained().parameters(), self._grads, strict=True):
                parameter.grad = grad
            self._grads = []
        return closure_loss

    def _trained(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    def _compiled(self, module: LightningModule) -> Step[..., Any]:
        _refuse(module, module.trainer, self)
        (optimizer,) = self.optimizers
        for parameter in module.parameters():
            parameter.grad = None  # as Lightning does before a first backward

        def training_step(updates: bool, *args: Any, **kwargs: Any) -> Any:
            self._logged = logged = list[Logged]()
            try:
                with self.precision_plugin.train_step_context():
                    output = module.training_step(*args, **kwargs)
                _backward(module, output)
                if updates:
                    _update(module, optimizer)
            finally:
                self._logged = None
            return _detached(output), logged

        return compile(training_step, model=module, optimizer=optimizer, options=self._step_options)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """``self.log`` of the module within a step: it is put off until the step has run."""
        assert self._logged is not None
        held = value.detach() if isinstance(value, Tensor) else value
        self._logged.append((name, held, args, kwargs))


def _backward(module: LightningModule, output: Any) -> None:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise refused("training_step returns no loss", "return a loss for each batch")
    loss = loss / module.trainer.accumulate_grad_batches
    module.on_before_backward(loss)
    module.backward(loss)
    module.on_after_backward()


def _update(module: LightningModule, optimizer: Optimizer) -> None:
    module.on_before_optimizer_step(optimizer)
    module.configure_gradient_clipping(
        optimizer,
        gradient_clip_val=module.trainer.gradient_clip_val,
        gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
    )
    optimizer.step()
    optimizer.zero_grad()


def _detached(output: Any) -> Any:
    if isinstance(output, Mapping):
        return {key: _detached(value) for key, value in output.items()}
    return output.detach() if isinstance(output, Tensor) else output


def _refuse(module: LightningModule, trainer: Trainer, strategy: TreadleStrategy) -> None:
    if not module.automatic_optimization:
        raise refused(
            "the module optimizes by hand (automatic_optimization=False)",
            "treadle.compile the function of your step, and call it in training_step",
        )
    if len(strategy.optimizers) != 1:
        raise refused(
            f"configure_optimizers gives {len(strategy.optimizers)} optimizers", "give one"
        )
    plugin = strategy.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise refused(
            "16-mixed scales gradients by a number that each step looks at",
            'precision="bf16-mixed", which needs no scaling',
        )
    _refuse_hooks(module, trainer)


def _refuse_hooks(module: LightningModule, trainer: Trainer) -> None:
    for hook in _AROUND_ZERO_GRAD:
        if _has_own(type(module), LightningModule, hook):
            raise refused(
                f"{type(module).__name__}.{hook} wants to run within the step",
                "do in on_train_batch_end what it does: the step clears gradients",
            )
    for callback in cast("list[Callback]", vars(trainer)["callbacks"]):
        for hook in _OF_CALLBACKS:
            if _has_own(type(callback), Callback, hook):
                raise refused(
                    f"{type(callback).__name__}.{hook} wants to run within the step",
                    f"write {hook} as a method of the LightningModule, which is part of the step "
                    "(in the place of on_before_zero_grad: on_train_batch_end); or remove the "
                    "callback",
                )


_AROUND_ZERO_GRAD = ("on_before_zero_grad", "optimizer_zero_grad")
_OF_CALLBACKS = (
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
)  # fmt: skip
"""What Lightning would call between the forward and the update."""


def _has_own(kind: type, base: type, method: str) -> bool:
    """Whether a class, or one between it and ``base``, defines ``method``."""
    return any(method in vars(each) for each in kind.__mro__[: kind.__mro__.index(base)])
