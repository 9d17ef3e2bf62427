"""Compiles functions of generated modules into Triton's cache, in a process of its own.

It is run as a file and imports neither treadle nor PyTorch, so it is there in a fraction of a
second. The first line of its input has the target and the names of the facts to return of each
kernel. Each further line is a job as ``triton_ahead.py`` writes it, and gets a line in reply: what
was compiled, or nothing.
"""

import base64
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast, final

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor


@final
@dataclass(frozen=True, slots=True)
class _Driver:
    """Everything that Triton asks a driver while it compiles; no GPU is used."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@final
@dataclass(frozen=True, slots=True)
class _Type:
    """An element type by its name, by which Triton recognizes PyTorch's dtypes."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@functools.cache
def _module(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(job: Mapping[str, Any], metadata: Sequence[str] = ()) -> dict[str, object]:
    """Compile by the same call as the launch, with tensors at address 0, which is a multiple of
    16."""
    stage = _module(job["module"], job["path"]).FUNCTIONS[job["function"]]["stages"][job["stage"]]
    arguments = [
        MockTensor(_Type(argument)) if isinstance(argument, str) else argument
        for argument in job["arguments"]
    ]
    kernel = stage["jit"].warmup(*arguments, grid=(1,), **job["options"])
    if _compiles_launchers():
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return {
        "name": kernel.name,
        "signature": list(kernel.src.signature.values()),
        "metadata": {name: getattr(kernel.metadata, name) for name in metadata},
        "binary": base64.b64encode(kernel.asm["cubin"]).decode(),
    }


@functools.cache
def _compiles_launchers() -> bool:
    """Whether Triton compiles C code for each signature that it launches, as 3.6 does (3.9 has one
    function for all), and the driver's library exists to link it with."""
    return hasattr(nvidia, "make_launcher") and find_library("cuda") is not None


def _main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a compiler prints is no reply
    target, metadata = json.loads(sys.stdin.readline())
    driver.set_active(cast("Any", _Driver(GPUTarget(*target))))
    for line in sys.stdin:
        try:
            made = _compile(json.loads(line), metadata)
        except Exception:  # the launch compiles it again, and says so to its user
            made = {}
        replies.write(json.dumps(made) + "\n")
        replies.flush()


if __name__ == "__main__":
    _main()
