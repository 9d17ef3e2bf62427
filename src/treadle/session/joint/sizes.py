"""The compiled programs of one graph with symbolic sizes, by the sizes of calls."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from treadle.compat.tracing import outside_modes

_MOST = 64
"""Sets of sizes kept for each graph."""


class _Releasable(Protocol):
    def release(self) -> None:
        """Give back the memory of calls that are over."""


Program = TypeVar("Program", bound=_Releasable)


class OfSizes(Generic[Program]):
    """What was compiled of one graph with symbols, for each set of sizes that came. Those that do
    not run keep no memory: what a call may take is promised once, whatever sizes come."""

    def __init__(self, compiled: Callable[[list[Any]], Program]) -> None:
        self._compiled = compiled
        self._known: OrderedDict[object, Program] = OrderedDict()

    def get(self, args: list[Any]) -> Program:
        """That for the sizes of ``args``, compiled if there is none."""
        key = tuple(
            (argument.shape, argument.stride(), argument.dtype)
            if isinstance(argument, Tensor)
            else argument
            for argument in args
        )
        known = self._known
        if known and next(reversed(known)) != key:
            known[next(reversed(known))].release()
        if key not in known:
            with outside_modes(), torch.no_grad():  # a first call has modes of AOTAutograd's
                known[key] = self._compiled(args)
            if len(known) > _MOST:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]
