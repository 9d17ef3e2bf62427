"""How long an artifact takes on this machine: what decides between two ways of doing the same."""

import time
from collections.abc import Sequence

from torch import Tensor

from treadle.runtime.execute import Executable

_ROUNDS = 5


def least_seconds(executable: Executable, inputs: Sequence[Tensor]) -> float:
    """The fastest of a few calls, after one that is not counted; each is waited for."""
    wait, device = executable.target.driver.synchronize, executable.device
    executable.run(inputs)
    found: list[float] = []
    for _ in range(_ROUNDS):
        wait(device)
        begin = time.perf_counter()
        executable.run(inputs)
        wait(device)
        found.append(time.perf_counter() - begin)
    return min(found)
