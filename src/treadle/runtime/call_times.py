"""How long library calls take. Each call runs on invented data once per machine, and its time is
cached.

Times are rounded up to powers of the fourth root of two, like the rates of a device, so that
another measurement on the same machine usually leads to the same plans.
"""

import time
from collections.abc import Callable

import torch

from treadle.runtime.invented_call import InventedCall, KernelRefuses, signature_of
from treadle.runtime.store.artifact import CallStep
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.measure import rounded_up
from treadle.targets.registry import target_for

_SECONDS = 0.02
"""For each series of calls."""
_SERIES = 3
_MOST_CALLS = 64
"""Calls in a series: a GPU runs them one after another, and the host waits once, at the end."""


class CallTimes:
    """Seconds of calls on ``device``; ``machine``: a digest of everything else that they depend
    on."""

    def __init__(self, cache: Cache, device: str, machine: str) -> None:
        self._cache = cache
        self._device = torch.device(device)
        self._machine = machine
        self._known: dict[str, float | None] = {}

    def of(self, step: CallStep) -> float | None:
        """The seconds of a call; ``None`` for one that cannot run by itself, or for which there is
        no memory."""
        key = content_key("call time 1", step.op, signature_of(step), self._machine)
        if key not in self._known:
            stored = self._cache.get(key)
            if stored is None:
                self._known[key] = self._measured(step)
                if self._known[key] is not None:
                    self._cache.put(key, repr(self._known[key]).encode())
            else:
                self._known[key] = float(stored)
        return self._known[key]

    def _measured(self, step: CallStep) -> float | None:
        driver = target_for(self._device).driver
        with torch.random.fork_rng(devices=driver.generators(self._device)), torch.no_grad():
            try:
                call = InventedCall(step, (), self._device, drawn=True)
                return rounded_up(_least(call, lambda: driver.synchronize(self._device)))
            except (KernelRefuses, torch.OutOfMemoryError):
                return None


def _least(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of one call in the fastest of a few series."""
    run()
    wait()
    once = _series(run, wait, 1)
    count = max(1, min(_MOST_CALLS, int(_SECONDS / max(once, 1e-9))))
    return min(once, *(_series(run, wait, count) for _ in range(_SERIES)))


def _series(run: Callable[[], object], wait: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - begin) / count
