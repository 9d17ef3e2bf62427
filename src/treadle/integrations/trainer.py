"""Hugging Face: a ``Trainer`` whose training step is compiled whole.

::

    from treadle.integrations.trainer import Trainer

    trainer = Trainer(model=model, args=arguments, train_dataset=data, memory="4GiB")
    trainer.train()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from treadle.api import Step, compile
from treadle.integrations.refusals import MODEL_ALONE, refused
from treadle.options import Options, options_with
from treadle.util.errors import not_installed

try:
    # By the names of its modules: through its front pyright binds all models that the package has.
    import transformers.trainer as hf
    from accelerate.utils import DistributedType
    from transformers.trainer_callback import TrainerCallback

    from treadle.integrations.accelerate import refuse_accelerator
except ModuleNotFoundError as error:
    raise not_installed(error) from None

_WITHIN = ("on_pre_optimizer_step", "on_optimizer_step")
"""Events of callbacks while there are gradients."""


class CompiledTraining:
    """Goes before ``transformers.Trainer``, or a kind of it, among the bases of a class::

        class Mine(CompiledTraining, Seq2SeqTrainer): ...

    ``training_step`` then runs forward, loss and backward, and where gradients are complete also
    the clipping, the optimizer and the clearing. What the loop calls for these afterwards finds
    them done. ``compute_loss`` and ``training_step`` of other bases are captured as they are.
    """

    def __init__(
        self,
        *args: Any,
        memory: str | int | float | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        self.step: Step[..., Any] | None = None
        self._step_options = options_with(options, memory=memory)
        self._norm: Tensor | None = None
        self._stepped: Any = None  # the optimizer of ``step``
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer`` does. ``CaptureError`` TR-142 for what cannot be one step."""
        self.step = None
        try:
            return self._loop.train(*args, **kwargs)
        finally:
            self._let_go()

    @property
    def _trainer(self) -> hf.Trainer:
        return cast("hf.Trainer", self)

    @property
    def _loop(self) -> hf.Trainer:
        """The methods of the class behind this one."""
        return cast("hf.Trainer", super())

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """One call of the compiled step; its loss."""
        if self.step is None or self._stepped is not self._trainer.optimizer:
            self._let_go()
            self.step = self._compiled(model)
        with _cache_emptied(self._trainer):
            loss, self._norm = self.step(model, inputs, num_items_in_batch)
        return loss

    def _compiled(self, model: nn.Module) -> Step[..., Any]:
        trainer = self._trainer
        _refuse(trainer)
        optimizer: Any = trainer.optimizer
        forward_backward = self._loop.training_step

        def training_step(model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Any:
            """What the loop does with a batch, in its order."""
            loss = forward_backward(model, inputs, num_items)
            if not trainer.accelerator.sync_gradients:
                return loss, None
            norm = _clipped(model, trainer.args.max_grad_norm)
            type(optimizer).step(optimizer)
            optimizer.zero_grad()
            return loss, norm

        step = compile(training_step, model=model, optimizer=optimizer, options=self._step_options)
        vars(trainer.accelerator)["clip_grad_norm_"] = self._last_norm
        vars(optimizer)["step"] = MethodType(_done, optimizer)
        self._stepped = optimizer
        return step

    def _last_norm(self, *args: object, **kwargs: object) -> Tensor | None:
        """In the place of a clipping that the step has done."""
        return self._norm

    def _let_go(self) -> None:
        vars(self._trainer.accelerator).pop("clip_grad_norm_", None)
        if self._stepped is not None:
            vars(self._stepped).pop("step", None)
        self._stepped = None


class Trainer(CompiledTraining, hf.Trainer):
    """Hugging Face's ``Trainer``, whose training step is compiled. ``memory`` and ``options`` are
    those of ``treadle.compile``; ``step`` is what was compiled, for ``explain`` and the rest."""


def _done(optimizer: object, closure: object = None) -> None:
    """In the place of an update that the step has done."""


@contextmanager
def _cache_emptied(trainer: hf.Trainer) -> Iterator[None]:
    """What the loop does at every few steps between forward and backward, after the whole step. In
    the step it would be a branch on the number of the step, which another call takes otherwise."""
    settings = vars(trainer.args)
    every = settings.get("torch_empty_cache_steps")
    settings["torch_empty_cache_steps"] = None
    try:
        yield
    finally:
        settings["torch_empty_cache_steps"] = every
    if every is not None and trainer.state.global_step % every == 0:
        torch.cuda.empty_cache()


def _clipped(model: nn.Module, most: float) -> Tensor:
    """The norm of all gradients, clipped to ``most``; 0 leaves them as they are."""
    if most:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def _refuse(trainer: hf.Trainer) -> None:
    refuse_accelerator(trainer.accelerator)
    args = trainer.args
    if trainer.accelerator.distributed_type != DistributedType.NO:
        raise refused("Trainer trains in several processes", f"train in one, or {MODEL_ALONE}")
    if args.n_gpu > 1:
        raise refused(
            f"Trainer spreads batches over {args.n_gpu} GPUs by nn.DataParallel",
            "CUDA_VISIBLE_DEVICES=0",
        )
    if args.torch_compile:
        raise refused("torch_compile=True compiles the model already", "leave torch_compile out")
    for callback in trainer.callback_handler.callbacks:
        for event in _WITHIN:
            theirs = getattr(type(callback), event)
            if theirs is not getattr(TrainerCallback, event):
                raise refused(
                    f"{type(callback).__name__}.{event} would find no gradients: the step has "
                    "cleared them",
                    "look at them in compute_loss or training_step, which are part of the step; "
                    "or remove the callback",
                )
