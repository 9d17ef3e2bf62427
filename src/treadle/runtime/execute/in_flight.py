"""What was started into memory of treadle's and not waited for: collectives, copies to the host and
back."""

from typing import Protocol, final

from torch import Tensor


class Transfer(Protocol):
    """Something in flight."""

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

    def take(self, out: Tensor) -> Transfer | None:
        """What writes to ``out``, which the caller waits for; ``None`` if nothing does."""
        return self._started.pop(out.data_ptr(), None)

    def finish(self) -> None:
        """Wait for all: before memory is given back that they write to, where a call ends early and
        will be made again."""
        started, self._started = self._started, {}
        for each in started.values():
            each.wait()

    def abandon(self) -> None:
        """Nobody will wait for what is in flight: after a failure, which no rank goes on after.
        What the backend still writes to is its own to keep alive."""
        self._started = {}


IN_FLIGHT = Transfers()
