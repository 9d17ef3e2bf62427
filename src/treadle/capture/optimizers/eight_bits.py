"""Optimizer state in 8 bits: codes of blocks, each with a scale of its own.

::

    state["exp_avg"]        an ``EightBitState``: for its readers the tensor that it stands for
      .codes                int8[blocks, size]
      .scales               f32[blocks, 1], the largest magnitude of each block

The graph has codes and scales as inputs; an update reads numbers, and writes codes of what it
leaves. Everything else, an eager step or a checkpoint, reads and writes it as any other tensor.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from treadle.capture.optimizers.registry import Start, Values
from treadle.compat.distributed.sharded_tensors import is_sharded
from treadle.compat.operators.schemas import OpOverload, written_arguments
from treadle.compat.tensors import WrapperTensor
from treadle.graph.custom_ops.eight_bits import FROM_EIGHT_BITS, TO_EIGHT_BITS, TURN
from treadle.util.nested import leaves, map_leaves

SCALE = " scale"
"""The suffix that makes the name of the scales from that of a state."""
_LEAST = 4096
"""The least number of elements: smaller state, such as that of biases and norms, takes few bytes
anyway."""
_SIZES = (256, 128, 64)
"""Sizes of blocks: a scale takes four bytes, so each block has enough codes, and few enough that a
kernel holds a row at once."""
_aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class StateBlocks:
    """How a tensor is divided: ``count`` blocks of ``size`` elements, in the order of its memory.
    ``codes``: their dtype."""

    count: int
    size: int
    codes: torch.dtype

    @staticmethod
    def of(parameter: Tensor, start: Start) -> "StateBlocks | None":
        """The blocks of a state of ``parameter``; ``None`` for state that is not kept in 8 bits: it
        is small, has another shape, begins with other values than 0, or has no blocks of equal
        size."""
        if start.codes is None or start.shape is not None or start.value:
            return None
        count = parameter.numel()
        sizes = [size for size in _SIZES if count % size == 0]
        fits = count >= _LEAST and bool(sizes) and parameter.is_contiguous()
        if not fits or is_sharded(parameter) or parameter.dtype not in _DTYPES:
            return None
        return StateBlocks(count // sizes[0], sizes[0], start.codes)

    def like(self, *, scales: bool) -> Tensor:
        """A tensor without memory that has the type of the codes or of the scales."""
        if scales:
            return torch.empty((self.count, 1), dtype=torch.float32, device="meta")
        return torch.empty((self.count, self.size), dtype=self.codes, device="meta")

    def zeros(self, parameter: Tensor) -> "EightBitState":
        """The initial state of a parameter that has none yet."""
        codes, scales = (
            torch.zeros_like(self.like(scales=scales), device=parameter.device)
            for scales in (False, True)
        )
        return EightBitState(codes, scales, parameter)

    def encoded(self, value: Tensor) -> "EightBitState":
        """Encode state that was not kept in 8 bits so far."""
        codes, scales = encoded(value.detach().contiguous().view(self.count, -1), self.codes)
        return EightBitState(codes, scales, value)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scales_in(state: Values) -> dict[str, Tensor]:
    """The scales, by the names of the states that are codes."""
    return {
        name.removesuffix(SCALE): value for name, value in state.items() if name.endswith(SCALE)
    }


@contextlib.contextmanager
def as_numbers(
    state: Values, shape: Sequence[int], dtype: torch.dtype, turn: Tensor | None
) -> Iterator[Values]:
    """Inside, ``state`` has numbers of this shape and dtype in place of codes. At the end the
    numbers are encoded again. ``turn``: the result of ``turn_of``."""
    scales = scales_in(state)
    numbers = {
        name: decoded(state[name], scale, dtype).view(shape) for name, scale in scales.items()
    }
    others = {
        name: value.view(shape) if value.numel() == math.prod(shape) else value
        for name, value in state.items()
        if name not in scales and not name.endswith(SCALE)
    }
    yield others | numbers
    for name, scale in scales.items():
        new, codes = numbers[name].view(state[name].shape), state[name].dtype
        codes, largest = encoded(new, codes, turn if codes is torch.uint8 else None)
        state[name].copy_(codes)
        scale.copy_(largest)


def turn_of(scalars: Values) -> Tensor | None:
    """The ``turn`` of ``to_eight_bits`` in this step; ``None`` if the rule counts no steps."""
    return torch.frac(scalars["step"] * TURN) if "step" in scalars else None


def encoded(value: Tensor, codes: torch.dtype, turn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes and the scales of a matrix whose rows are blocks."""
    scales = value.abs().amax(1, keepdim=True).to(torch.float32)
    return TO_EIGHT_BITS.op(value, scales, codes, turn), scales


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that codes and scales stand for."""
    return FROM_EIGHT_BITS.op(codes, scales).to(dtype)


@final
class EightBitState(WrapperTensor):
    """A tensor with the shape, dtype and device of ``like``. It computes like the tensor that it
    stands for; writes to it write codes. A copy on disk is a plain tensor on the host."""

    codes: Tensor
    scales: Tensor

    def __new__(cls, codes: Tensor, scales: Tensor, like: Tensor) -> Self:
        """``like`` has no gaps."""
        self = cls.wrapping(like.shape, like.dtype, codes.device)
        self.codes, self.scales = codes, scales
        return self

    def decoded(self) -> Tensor:
        """A plain tensor of its numbers."""
        return decoded(self.codes, self.scales, self.dtype).view(self.shape)

    def write(self, value: Tensor) -> None:
        """Set its numbers to those of ``value``, as precisely as codes can."""
        codes, scales = encoded(value.reshape(self.codes.shape), self.codes.dtype)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def _copied(self) -> "EightBitState":
        return EightBitState(self.codes.clone(), self.scales.clone(), self)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operation on the numbers."""
        if func is _aten.detach.default:
            return EightBitState(args[0].codes, args[0].scales, args[0])
        if func is _aten.clone.default:
            return args[0]._copied()
        numbers: dict[int, tuple[EightBitState, Tensor]] = {}

        def number_of(value: object) -> object:
            if not isinstance(value, EightBitState):
                return value
            return numbers.setdefault(id(value), (value, value.decoded()))[1]

        named = {name: map_leaves(number_of, value) for name, value in (kwargs or {}).items()}
        given: Any = map_leaves(number_of, args)
        result = func(*given, **named)
        of_number = {id(number): state for state, number in numbers.values()}
        for at, name in written_arguments(func):
            for value in leaves(args[at] if at < len(args) else (kwargs or {}).get(name)):
                if id(value) in numbers:
                    state, number = numbers[id(value)]
                    state.write(number)
        return map_leaves(lambda value: of_number.get(id(value), value), result)

    def __deepcopy__(self, memo: dict[int, object]) -> "EightBitState":
        return memo.setdefault(id(self), self._copied())  # pyright: ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().cpu().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"EightBitState({self.decoded()!r})"
