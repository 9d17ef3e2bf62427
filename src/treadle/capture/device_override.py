"""Capturing for another device than the model's, from descriptions instead of tensors."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from treadle.capture.explain_errors import here, refused_nested
from treadle.capture.failures import also
from treadle.capture.sources import Batch, Parameter, Pending, RunTimeNumber, Scalar, Source
from treadle.compat.fake import fake_mode_of, is_fake
from treadle.util.errors import CaptureError


def described(sources: Sequence[Source], leaves: list[object], place: torch.device) -> list[Tensor]:
    """Fake tensors on ``place`` with the layouts of what the sources would read.

    The model may be real, on the meta device, or fake already; nothing is allocated or read.
    """
    pending: Pending = {}
    held = [source.parameter for source in sources if isinstance(source, Parameter)]
    with fake_mode_of([*held, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]):
        tensors = [
            torch.empty((), dtype=torch.float64)  # of what state there is, the numbers are real
            if isinstance(source, Scalar | RunTimeNumber)
            else source.read(leaves, pending)
            for source in sources
        ]
        return [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
            for tensor in tensors
        ]


@contextlib.contextmanager
def autocast_on(place: torch.device) -> Iterator[None]:
    """Inside, ``torch.autocast`` means ``place``, whichever device it names."""
    original = torch.autocast.__init__

    def init(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, **rest: bool
    ) -> None:
        named = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        original(self, place.type, named, **rest)

    setattr(torch.autocast, "__init__", init)  # noqa: B010 - its type says that it is fixed
    try:
        yield
    finally:
        setattr(torch.autocast, "__init__", original)  # noqa: B010


def check_values(inputs: Sequence[Tensor], sources: Sequence[Source]) -> None:
    """Require that each tensor of models and batches has values, in one dense block of memory."""
    for tensor, source in zip(inputs, sources, strict=True):
        is_argument = isinstance(source, Batch)
        if is_argument and tensor.is_nested:
            raise refused_nested("receives a nested tensor", here())
        if not tensor.is_meta and not is_fake(tensor):
            continue
        owner = "an argument of the step is" if is_argument else "the model has"
        kind = also(RuntimeError) if is_argument else CaptureError
        raise kind(
            f"{owner} a tensor without data: {list(tensor.shape)} on {tensor.device}",
            code="TR-111",
            where=here() if is_argument else "",
            remedy="pass a batch on the device of the model; treadle.plan accepts one without data"
            if is_argument
            else (
                "materialize it, for example with to_empty and an initialization; treadle.plan "
                "accepts it as it is"
            ),
        )
