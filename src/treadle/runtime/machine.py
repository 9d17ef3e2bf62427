"""The facts about this machine and process on which compiled code and measurements depend."""

import functools
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from treadle.runtime.kernels.compilers import cpu_identity
from treadle.runtime.store.cache import content_key
from treadle.targets.registry import target_for
from treadle.util.package import own_digest

_LIBRARIES = ("numpy", "scipy", "triton", "ortools")
"""Packages whose version may change a plan or a kernel."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``hardware``: the model of the processor or the GPU and what it can do. ``switches``:
    PyTorch's settings, by name. ``libraries``: versions. ``compiler``: everything that binaries
    depend on."""

    hardware: str
    threads: int
    switches: tuple[tuple[str, str], ...]
    torch: str
    libraries: str
    compiler: str
    treadle: str

    @property
    def facts(self) -> dict[str, str]:
        """The facts by name, each as text."""
        return {
            "machine": self.hardware,
            "threads": str(self.threads),
            "switches": ", ".join(f"{name}={value}" for name, value in self.switches),
            "torch": self.torch,
            "libraries": self.libraries,
            "compiler": self.compiler,
            "treadle": self.treadle,
        }

    @property
    def identity(self) -> str:
        """A digest of every fact."""
        return content_key(*(f"{name}={value}" for name, value in self.facts.items()))

    @property
    def speed(self) -> str:
        """A digest of what decides how fast PyTorch's kernels are."""
        facts = self.hardware, str(self.threads), self.torch, repr(self.switches), self.libraries
        return content_key(*facts)


def machine(device: torch.device, switches: Mapping[str, str], compiler: str) -> Machine:
    """The machine of this process with ``device``. ``switches``: PyTorch's settings; ``compiler``:
    ``Build.identity``."""
    return Machine(
        hardware_of(device),
        torch.get_num_threads(),
        tuple(sorted(switches.items())),
        f"{torch.__version__} {torch.version.git_version or ''}".strip(),
        _libraries(),
        compiler,
        own_digest(),
    )


def hardware_of(device: torch.device) -> str:
    """``x86_64 AVX2 0123456789abcdef``, or the GPU's model, its capability, its multiprocessors
    and bytes, and the versions of its libraries."""
    here = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {cpu_identity()}"
    there = target_for(device).driver.hardware(device)
    return f"{there}, {here}" if there else here


@functools.cache
def _libraries() -> str:
    installed = (name for name in _LIBRARIES if importlib.util.find_spec(name) is not None)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in installed)
    return ", ".join((f"python {platform.python_version()}", *versions))
