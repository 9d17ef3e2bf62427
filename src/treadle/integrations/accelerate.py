"""Accelerate: an ``Accelerator`` that compiles the step of a loop.

::

    from treadle.integrations.accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", memory="4GiB")
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    @accelerator.compile_step
    def train_step(inputs, labels): ...
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from torch.optim import Optimizer

from treadle.api import Step, compile
from treadle.integrations.refusals import MODEL_ALONE, refused
from treadle.options import Options, options_with
from treadle.util.errors import not_installed

try:
    import accelerate
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:
    raise not_installed(error) from None

P = ParamSpec("P")
R = TypeVar("R")
_REPLICAS = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """Accelerate's ``Accelerator``, which also compiles steps of what it prepared.

    ``memory`` and ``options`` are those of ``treadle.compile``; all else is Accelerate's.
    """

    def __init__(
        self,
        *args: Any,
        memory: str | int | float | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._step_options = options_with(options, memory=memory)

    def compile_step(self, function: Callable[P, R]) -> Step[P, R]:
        """The step ``function``, compiled: forward, ``self.backward``, clipping, ``optimizer.step``
        and ``zero_grad`` for the models and optimizers that were prepared.

        ``CaptureError`` TR-142 for what cannot be one step."""
        refuse_accelerator(self)
        if self.distributed_type in _REPLICAS and self.gradient_accumulation_steps > 1:
            raise refused(
                "several processes accumulate gradients, each its own, before they are averaged",
                "gradient_accumulation_steps=1 and a larger batch, or " + MODEL_ALONE,
            )
        if not self._models:
            raise refused(
                "no model was prepared", "call accelerator.prepare(model, optimizer, ...) first"
            )
        stepped = cast("Sequence[Optimizer]", self._optimizers)
        return compile(function, model=self._models, optimizer=stepped, options=self._step_options)


def refuse_accelerator(accelerator: accelerate.Accelerator) -> None:
    """TR-142 for an accelerator that trains in a way of its own."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, *_REPLICAS):
        raise refused(f"Accelerate trains with {kind.value}", f"train without it, or {MODEL_ALONE}")
    if accelerator.scaler is not None:
        raise refused(
            "fp16 scales gradients by a number that each step looks at",
            'mixed_precision="bf16" (Trainer: bf16=True), which needs no scaling',
        )
