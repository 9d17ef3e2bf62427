"""Copies between the device and the host, each on a stream of its direction.

::

    treadle::to_host.out(x, out=h)        starts; ``x`` and ``h`` are in use
    treadle::arrived.out(h, x, out=h)     from here on both are as any other: the stream waits

The host waits for none of them. Copies in a recording are part of it: each has its wait there.
"""

import functools
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.runtime.execute.in_flight import IN_FLIGHT
from treadle.targets.registry import target_for

NAMES = frozenset(f"treadle.{name}.default" for name in ("to_host", "from_host", "arrived"))
"""The steps of an artifact that are such copies, and waits for them."""


@final
@dataclass(frozen=True, slots=True)
class _Copying:
    """A copy on a stream of its own, which is over at ``event``."""

    event: torch.cuda.Event
    device: torch.device

    @property
    def needs_others(self) -> bool:
        return False

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


@functools.cache
def _stream(device: torch.device, *, to_host: bool) -> torch.cuda.Stream:
    """The stream of a direction: copies in both can take place at once."""
    return torch.cuda.Stream(device)


def _start(source: Tensor, out: Tensor) -> Tensor:
    device = out.device if source.is_cpu else source.device
    if target_for(device).on_host or not out.numel():
        return out.copy_(source)
    stream = _stream(device, to_host=out.is_cpu)
    stream.wait_stream(torch.cuda.current_stream(device))
    over = torch.cuda.Event()
    with torch.cuda.stream(stream):
        out.copy_(source, non_blocking=True)
        over.record()
    IN_FLIGHT.add(out, _Copying(over, device))
    return out


def _to_host(x: Tensor, *, out: Tensor) -> Tensor:
    return _start(x, out)


def _from_host(x: Tensor, *, out: Tensor) -> Tensor:
    return _start(x, out)


def _arrived(started: Tensor, source: Tensor, *, out: Tensor) -> Tensor:
    IN_FLIGHT.wait(started)
    if out.data_ptr() != started.data_ptr():
        out.copy_(started)
    return out


CustomOp("to_host.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", kernel=_to_host)
CustomOp("from_host.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", kernel=_from_host)
CustomOp(
    "arrived.out(Tensor started, Tensor source, *, Tensor(a!) out) -> Tensor(a!)", kernel=_arrived
)
