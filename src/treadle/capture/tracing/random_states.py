"""Random numbers that are drawn again from a saved state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from torch import Tensor

from treadle.capture.tracing.checkpointed_regions import Span
from treadle.compat.tracing import traced_nodes


@final
class RandomStates:
    """The operations of one run on the state of PyTorch's generator. ``events``: a node, whether
    the state is put back there, and which one. ``of_users``: nodes that draw from a generator of
    the user's, and the number of that."""

    def __init__(self) -> None:
        self.events: list[tuple[int, bool, int]] = []
        self.of_users: list[tuple[Span, int]] = []
        self._kept: dict[int, Tensor] = {}  # so that no other state has its id

    def record_save(self, original: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """``torch.get_rng_state``."""

        def call() -> Tensor:
            state = original()
            self._kept[id(state)] = state
            self.events.append((traced_nodes(), False, id(state)))
            return state

        return call

    def record_restore(self, original: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """``torch.set_rng_state``."""

        def call(state: Tensor) -> None:
            self.events.append((traced_nodes(), True, id(state)))
            original(state)

        return call

    @contextmanager
    def drawing_from(self, number: int | None) -> Iterator[None]:
        """The nodes that are made within draw from the user's generator of that number."""
        start = traced_nodes()
        yield
        if number is not None:
            self.of_users.append(((start, traced_nodes()), number))
