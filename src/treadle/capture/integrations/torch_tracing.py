"""The parts of PyTorch that trace, and the packages that they compute sizes with."""

from collections.abc import Iterable
from pathlib import Path

import torch

from treadle.capture.integrations.integration import Integration, Patch, TracedRun
from treadle.compat.tracing import masks_as_given

_TORCH = Path(torch.__file__).parent
_TRACE = (
    "_dispatch", "_dynamo", "_export", "_functorch", "_guards", "_higher_order_ops", "_inductor",
    "_library", "_logging", "_ops", "_prims", "_refs", "_subclasses", "fx", "_decomp", "_meta",
    "utils/_", "overrides.py", "_tensor.py", "_compile.py", "library.py", "types.py",
)  # fmt: skip


def _patches(_: TracedRun) -> Iterable[Patch]:
    return (masks_as_given(),)


TORCH_TRACING = Integration(
    name="torch",
    tracing_files=tuple(f"{_TORCH}/{name}" for name in _TRACE),
    tracing_packages=("torch.fx.", "torch._", "torch.utils._", "torch.overrides."),
    caches={
        "torch.utils.hooks": frozenset({"next_id"}),
        # whether the profiler of activities was looked for, and what was found
        "torch.autograd.profiler": frozenset({"_cupti_monitor_checked", "_cupti_monitor_module"}),
    },
    patches=_patches,
)
SYMPY = Integration(
    name="sympy",
    tracing_files=(f"{_TORCH.parent}/sympy/", f"{_TORCH.parent}/mpmath/"),
    tracing_packages=("sympy.",),
)
