"""Drawing from PyTorch's CPU generator by generated code: the same numbers, the same state after.

The state of the generator is read before and written after each call, so that what PyTorch draws
itself continues the stream. ``is_known`` compares with this PyTorch once per process, because
PyTorch does not guarantee how it draws.
"""

import ctypes
import functools
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from treadle.compat.operators import rng_operators
from treadle.util.errors import RuntimeFailure

LIBRARY = rng_operators.DRAWS
"""Operators of ours that an artifact may call as it calls PyTorch's; importing registers them."""
OPERATOR = "treadle.bernoulli.out"
"""Its name in an artifact: ``(x, p, *, out)``, as ``aten.bernoulli.p``."""
FUNCTION = "treadle_bernoulli"
_WORDS = 624
STATE_BYTES = 5056
"""Size of the state of PyTorch's generator, which is read into a tensor for each call."""
_HEAD = struct.Struct("<Qiiq")  # seed, words left and one more, whether seeded, next word
_ONE = {
    torch.bool: 1,
    torch.float16: 0x3C00,
    torch.bfloat16: 0x3F80,
    torch.float32: 0x3F800000,
    torch.float64: 0x3FF0000000000000,
}


def can_draw(dtype: torch.dtype) -> bool:
    """Whether generated code draws results of ``dtype`` exactly as this PyTorch does."""
    return dtype in _ONE and is_known()


def drawer(native: Callable[..., None]) -> Callable[..., Tensor]:
    """The operator on top of the compiled function."""

    def bernoulli(x: Tensor, p: float, *, out: Tensor) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise RuntimeFailure(f"bernoulli with a probability of {p}", code="TR-403")
        n = out.numel()
        if n == 0:
            return out
        state = torch.get_rng_state()
        blob = (ctypes.c_char * STATE_BYTES).from_address(state.data_ptr())
        seed, left, seeded, at = _HEAD.unpack_from(blob)
        after = ctypes.c_int64(0)
        base = state.data_ptr() + _HEAD.size
        pointers = (ctypes.c_void_p * 3)(base, out.data_ptr(), ctypes.addressof(after))
        start = _WORDS if left == 1 else at
        facts = (n, out.element_size(), _ONE[out.dtype], math.ceil(p * 2.0**53), start)
        sizes = (ctypes.c_int64 * 5)(*facts)
        native(ctypes.addressof(pointers), ctypes.addressof(sizes), 1)
        _HEAD.pack_into(blob, 0, seed, _WORDS + 1 - after.value, seeded, after.value)
        torch.set_rng_state(state)
        return out

    return bernoulli


@functools.cache
def is_known() -> bool:
    """Whether this PyTorch draws as the generated code does: two blocks are compared, with a
    generator of their own, as floats and as bools."""
    generator = torch.Generator("cpu").manual_seed(4357)
    drawn = torch.empty(_WORDS + 3).bernoulli_(0.3, generator=generator).tolist()
    state = bytes(generator.get_state().tolist())
    words = _words(4357, 2 * len(drawn))
    below = math.ceil(0.3 * 2.0**53)
    pairs = zip(words[::2], words[1::2], strict=True)
    expected = [float((high & 0x1FFFFF) << 32 | low < below) for high, low in pairs]
    _, left, _, at = _HEAD.unpack_from(state)
    used = len(words) % _WORDS
    generator.manual_seed(4357)
    mask = torch.empty(len(drawn), dtype=torch.bool).bernoulli_(0.3, generator=generator).tolist()
    return (
        expected == drawn == mask
        and len(state) == STATE_BYTES
        and (left, at) == (_WORDS + 1 - used, used)
    )


def _words(seed: int, count: int) -> list[int]:
    """The first words of the stream, plainly."""
    x = [seed]
    for i in range(1, _WORDS):
        x.append((1812433253 * (x[-1] ^ x[-1] >> 30) + i) & 0xFFFFFFFF)
    words: list[int] = []
    while len(words) < count:
        for k in range(_WORDS):
            y = x[k] & 0x80000000 | x[(k + 1) % _WORDS] & 0x7FFFFFFF
            x[k] = x[(k + 397) % _WORDS] ^ y >> 1 ^ (0x9908B0DF if y & 1 else 0)
        for y in x:
            y ^= y >> 11
            y ^= y << 7 & 0x9D2C5680
            y ^= y << 15 & 0xEFC60000
            words.append((y ^ y >> 18) & 0xFFFFFFFF)
    return words[:count]
