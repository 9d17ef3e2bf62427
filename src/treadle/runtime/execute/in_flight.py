"""What was started into memory of treadle's and not waited for: collectives, copies to the host and
back."""

from typing import Protocol, final

from torch import Tensor


class Transfer(Protocol):
    """Something in flight."""

    @property
    def needs_others(self) -> bool:
        """Whether it ends only if other ranks go on."""
        ...

    def wait(self) -> None:
        """Until it is over: the host, or on a GPU the stream of the step."""
        ...


@final
class Transfers:
    """What is in flight, by where its result will be."""

    def __init__(self) -> None:
        self._started: dict[int, Transfer] = {}

    def add(self, out: Tensor, started: Transfer) -> None:
        """It writes to ``out``, which has an address."""
        self._started[out.data_ptr()] = started

    def wait(self, out: Tensor) -> bool:
        """For what writes to ``out``; whether anything does."""
        started = self._started.pop(out.data_ptr(), None)
        if started is not None:
            started.wait()
        return started is not None

    def finish(self) -> None:
        """Wait for all: before memory is given back that they write to, where a call ends early and
        will be made again."""
        started, self._started = self._started, {}
        for each in started.values():
            each.wait()

    def abandon(self) -> None:
        """After a failure, which no rank goes on after, nobody waits for what needs others: what
        the backend still writes to is its own to keep alive. The rest ends by itself, and a call
        that comes later may not find it writing."""
        self._started = {at: each for at, each in self._started.items() if not each.needs_others}
        self.finish()


IN_FLIGHT = Transfers()
