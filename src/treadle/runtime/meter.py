"""The measured peak of tensor memory during a call, for comparison with the plan's promise.


On a CPU the allocator keeps no peak, so its events are added up in the order they happened::

    peak  =  max over time of  (given storages still alive)  +  (bytes allocated since the start)

The profiler reports the free of a block only if it saw the allocation. For earlier allocations, a
finalizer on the storage adds a mark to the same event stream.
"""

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from treadle.targets.registry import target_for
from treadle.util.memory import memory_start

# The profiler of PyTorch 2.13 announces each start on stderr; it looks here at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

_MEMORY = "[memory]"
_DIED = "treadle::died:"
_BEGIN = "treadle::begin:"


@dataclass(frozen=True, slots=True)
class PeakReport:
    """``peak_bytes`` includes ``before_bytes``: the given storages, each counted once.

    ``after_bytes`` is what is alive at the end, the result of the call included.
    """

    peak_bytes: int
    before_bytes: int
    after_bytes: int
    device: str


def measure_peak(fn: Callable[[], object], tensors: Iterable[Tensor]) -> PeakReport:
    """Call ``fn`` once. ``tensors``: what is alive before it and counts: parameters, state,
    batch, arena. Memory alive before the call that is not given is not counted.

    On CUDA the allocator's own peak is used; it counts all memory of PyTorch on the device.
    """
    storages = {
        memory_start(t): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()
    }
    places = (s.device for s in storages.values())
    device = next((place for place in places if not target_for(place).on_host), None)
    if device is not None:
        return _measure_cuda(fn, device, sum(s.nbytes() for s in storages.values()))
    before = {address: storage.nbytes() for address, storage in storages.items()}
    gc.collect()  # otherwise garbage of before may be collected, and counted as freed, inside
    watches = [weakref.finalize(s, _mark, address) for address, s in storages.items()]
    storages.clear()  # the caller decides what lives on
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = fn()
        del result
    finally:
        for watch in watches:
            watch.detach()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = sorted(_events(results.experimental_event_tree()) if results else ())
    return replay(before, [(address, size) for _, _, address, size in events])


def measure_each(fns: Iterable[Callable[[], object]], device: torch.device) -> list[int]:
    """For each function the peak of the bytes that it allocates, its results included. What
    making the functions allocates does not count."""
    if not target_for(device).on_host:
        return [_allocated_cuda(fn, device) for fn in fns]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, fn in enumerate(fns):
            with record_function(_BEGIN + str(number)):
                fn()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    tree = results.experimental_event_tree() if results else []
    runs = sorted((n.start_time_ns, n.end_time_ns) for n in tree if n.name.startswith(_BEGIN))
    events = sorted(_events(tree))
    peaks: list[int] = []
    for start, end in runs:
        inside = [(address, size) for at, _, address, size in events if start <= at < end]
        peaks.append(replay({}, inside).peak_bytes)
    return peaks


def _allocated_cuda(fn: Callable[[], object], device: torch.device) -> int:
    fn()  # what a library allocates once and for all is not the call's
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def replay(before: dict[int, int], events: list[tuple[int, int]]) -> PeakReport:
    """Add up allocations (size > 0), frees (size < 0) and deaths of given storages (size 0).

    An address is counted while it is alive and no longer: a second report of the same free and
    the free of a block that was never counted change nothing.
    """
    alive = dict(before)
    total = start = peak = sum(alive.values())
    for address, size in events:
        total -= alive.pop(address, 0)  # also for an allocation: the old block must be gone
        if size > 0:
            alive[address] = size
            total += size
        peak = max(peak, total)
    return PeakReport(peak, start, total, "cpu")


def _mark(address: int) -> None:
    with record_function(_DIED + str(address)):
        pass


def _events(nodes: Iterable[Any]) -> Iterator[tuple[int, int, int, int]]:
    """(time, position, address, size) of each allocator event and mark, threads mixed."""
    pending = list(nodes)
    position = 0
    while pending:
        node = pending.pop()
        position += 1
        pending.extend(node.children)
        name = node.name
        if name == _MEMORY:
            block = node.typed[1]
            yield node.start_time_ns, position, block.ptr, block.alloc_size
        elif name.startswith(_DIED):
            yield node.start_time_ns, position, int(name.removeprefix(_DIED)), 0


def _measure_cuda(fn: Callable[[], object], device: torch.device, limit: int) -> PeakReport:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = fn()
    torch.cuda.synchronize(device)
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del result
    return PeakReport(peak, limit, after, str(device))
