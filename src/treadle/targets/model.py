"""How fast a device is, and how its memory is counted: what plans are estimated with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from treadle.targets.links import ETHERNET, LOOPBACK, Link
from treadle.util.allocator import Allocator

FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
"""Dtypes whose products are equally fast, on devices that have them."""


@dataclass(frozen=True)
class DeviceModel:
    """Ceilings that times are estimated with. ``flops``: per second, by dtype, for products.

    ``bandwidth``: bytes per second. ``element``: seconds for one transcendental function.
    ``reserve``: bytes that libraries hold all the time: cuBLAS's workspace (33 MiB on Hopper with
    PyTorch 2.11); on a CPU the state of the generator during a call (5,056 bytes). ``memory``:
    bytes there are; 0: unknown. ``blocks``: whether its allocator hands out whole blocks.
    ``tables``: whether launches of several kernels hold tables of their buffers in its memory.
    ``launch``: seconds that one more kernel takes, whatever it does: a kernel of 64 elements on a
    CPU 1.1 to 1.3 us (an H200, replayed: what 225 casts took beyond their bytes, 1 us each).
    ``hidden``: share of the bytes of one more chunk of rows that its products' operations hide: 0.6
    on an H200, by the heads of two models (decision 11).
    ``host_link``: bytes per second between the device and its host, each way; 0: it is the host.
    ``link``: to the others of its host, ``network``: to those of other hosts, ``host_ranks``: how
    many a host has; 0: any number. They are for groups of ranks that nobody has measured.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    element: float = 0.0
    reserve: int = 0
    memory: int = 0
    blocks: bool = False
    tables: bool = False
    launch: float = 1e-6
    hidden: float = 0.0
    host_link: float = 0.0
    link: Link = LOOPBACK
    network: Link = ETHERNET
    host_ranks: int = 0

    def rate(self, dtype: torch.dtype) -> float:
        """Products of ``dtype``: floating-point operations per second."""
        return self.flops.get(dtype, self.flops[torch.float32])

    def hosts_of(self, ranks: int) -> int:
        """The fewest hosts that so many ranks have a device each on."""
        return -(-ranks // self.host_ranks) if self.host_ranks else 1

    @property
    def allocator(self) -> Allocator:
        """How its memory is counted."""
        return Allocator(self.reserve, blocks=self.blocks, tables=self.tables)
