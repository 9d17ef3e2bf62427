"""Which of several equivalent alternatives is fastest on this machine, tried once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build
from treadle.runtime.store.artifact import Artifact
from treadle.runtime.store.cache import Cache, content_key

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Trials:
    """Runs artifacts to compare them, and caches the answers. ``machine``: a digest of everything
    that times depend on."""

    build: Build
    cache: Cache
    machine: str

    def seconds(self, artifact: Artifact, inputs: Sequence[Tensor]) -> float:
        """Seconds of the fastest of a few calls, after one that is not counted; the host waits for
        each."""
        executable = Executable(artifact, self.build)
        wait, device = executable.target.driver.synchronize, executable.device
        executable.run(inputs)
        seconds_: list[float] = []
        for _ in range(_ROUNDS):
            wait(device)
            begin = time.perf_counter()
            executable.run(inputs)
            wait(device)
            seconds_.append(time.perf_counter() - begin)
        return min(seconds_)

    def remembered(self, question: str, answer: Callable[[], int]) -> int:
        """The number that ``answer`` gave earlier on such a machine, or gives now."""
        key = content_key("trial", question, self.machine)
        known = self.cache.get(key)
        if known is not None:
            return int(known)
        new_answer = answer()
        self.cache.put(key, str(new_answer).encode())
        return new_answer
