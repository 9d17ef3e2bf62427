"""Memory on the host that a GPU reads and writes by itself.

PyTorch's own pinned memory comes in powers of two: a block of 9 GiB would take 16.
"""

import weakref
from typing import Any

import numpy as np
import torch

from treadle.util.errors import RuntimeFailure
from treadle.util.sizes import format_bytes


def locked_memory(nbytes: int) -> torch.Tensor:
    """``uint8[nbytes]``, locked until nothing shows it any more. ``RuntimeFailure`` TR-403 where
    the operating system locks no more."""
    try:
        block = np.empty(nbytes, np.uint8)
    except MemoryError as error:
        raise _no_more(nbytes, "it has no more") from error
    runtime: Any = torch.cuda.cudart()
    address = block.ctypes.data
    error = int(runtime.cudaHostRegister(address, nbytes, 0))
    if error:
        raise _no_more(nbytes, f"CUDA error {error}")
    weakref.finalize(block, runtime.cudaHostUnregister, address)
    return torch.from_numpy(block)


def _no_more(nbytes: int, why: str) -> RuntimeFailure:
    return RuntimeFailure(
        f"the host cannot lock {format_bytes(nbytes)} of memory: {why}",
        code="TR-403",
        remedy="free memory of the host, raise `ulimit -l`, or plan without offload=True",
    )
