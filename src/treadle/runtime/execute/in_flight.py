"""Transfers into treadle's memory that were started and not yet waited for: collectives, and copies
to and from the host."""

from typing import Protocol, final

from torch import Tensor


class Transfer(Protocol):
    """Something in flight."""

    @property
    def needs_others(self) -> bool:
        """Whether it ends only if other ranks continue."""
        ...

    def wait(self) -> None:
        """Wait for the end: the host waits, or on a GPU the stream of the step."""
        ...


@final
class Transfers:
    """Transfers in flight, by the address of their results."""

    def __init__(self) -> None:
        self._started: dict[int, Transfer] = {}

    def add(self, out: Tensor, started: Transfer) -> None:
        """Add a transfer that writes to ``out``, which has an address."""
        self._started[out.data_ptr()] = started

    def wait(self, out: Tensor) -> bool:
        """Wait for the transfer that writes to ``out``; whether there was one."""
        started = self._started.pop(out.data_ptr(), None)
        if started is not None:
            started.wait()
        return started is not None

    def finish(self) -> None:
        """Wait for all transfers. For a call that ends early and will be repeated: the memory that
        they write to is freed next."""
        started, self._started = self._started, {}
        for each in started.values():
            each.wait()

    def abandon(self) -> None:
        """For a failure after which no rank continues: do not wait for transfers that need other
        ranks; the backend keeps the memory alive that it still writes to. Wait for the rest, which
        end by themselves, so that no later call meets them."""
        self._started = {at: each for at, each in self._started.items() if not each.needs_others}
        self.finish()


IN_FLIGHT = Transfers()
