"""``optimizer.state`` in the hands of a step that is captured: traced tensors of each parameter.

::

    optimizer.state[p]["exp_avg"]   the state before the update, or after it, as it is at that point
    optimizer.state[p]["step"]      a tensor without dims, from the counter of the call
    p in optimizer.state            whether there is state: part of what the step rests on
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.frames import Whose, whose
from treadle.util.errors import CaptureError

Entries = dict[str, Tensor]


@final
class TracedState(Mapping[Any, Any]):
    """In the place of ``optimizer.state``, which ``real`` is and our own code asks.

    ``entries``: what a parameter has now; nothing, if it has no state. ``parameters``: by the id
    of a parameter and of what stands for it, in the order of the groups, the two of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, Tensor]],
        entries: Callable[[nn.Parameter], Entries],
    ) -> None:
        self._real: Any = optimizer.state
        self._parameters = parameters
        self._entries = entries

    def __getattr__(self, name: str) -> Any:
        """What a ``defaultdict`` has beside a mapping: for our own code alone."""
        if _asked_by_us():
            return getattr(self._real, name)
        raise refused_state(f"calls optimizer.state.{name}")

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        if _asked_by_us():
            return self._real.get(key, default)
        return TracedEntries(found) if (found := self._found(key)) else default

    def _found(self, key: Any) -> Entries:
        known = self._parameters.get(id(key))
        return {} if known is None else self._entries(known[0])

    def __getitem__(self, key: Any) -> Any:
        """What there is; eager makes an empty dict where there is nothing."""
        return self._real[key] if _asked_by_us() else TracedEntries(self._found(key))

    def __contains__(self, key: object) -> bool:
        return bool(self._found(key))

    def __iter__(self) -> Iterator[Tensor]:
        pairs = {id(leaf): (parameter, leaf) for parameter, leaf in self._parameters.values()}
        return (leaf for parameter, leaf in pairs.values() if self._entries(parameter))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise refused_state("sets an entry of optimizer.state")

    def __delitem__(self, key: Any) -> None:
        raise refused_state("deletes an entry of optimizer.state")


class TracedEntries(dict[str, Tensor]):
    """The state of one parameter: its tensors may be read and written to, not replaced."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused_state("changes which entries optimizer.state[p] has")

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore
    setdefault = update = pop = popitem = clear = _refuse  # pyright: ignore


def _asked_by_us() -> bool:
    return whose(sys._getframe(2).f_code.co_filename) is Whose.OURS  # pyright: ignore


def refused_state(what: str) -> CaptureError:
    """TR-125."""
    return CaptureError(
        f"the step {what}, which is part of the graph while it is captured",
        code="TR-125",
        where=here(),
        remedy="its tensors may be read, and written to in place; keep your own in a buffer",
    )


__all__ = ["TracedState", "refused_state"]
