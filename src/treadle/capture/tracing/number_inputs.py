"""Python numbers, strings and arrays that may change at a later call."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

from torch import Tensor

from treadle.capture.python_state.call_arguments import parameter_names
from treadle.capture.python_state.flatten import flatten_with_paths, unflatten
from treadle.capture.python_state.plain_values import is_plain, is_real
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf, is_numeric
from treadle.capture.symbolic.call_sizes import CallSizes
from treadle.capture.symbolic.changing_numbers import ChangingNumbers
from treadle.capture.symbolic.computations import NumberDecision
from treadle.capture.symbolic.entries import asked_position
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.symbolic.memberships import membership_asked
from treadle.capture.symbolic.numbers import Number, Text, Uses
from treadle.capture.tracing.request import Substitutes, TraceRequest


@final
class NumberInputs:
    """Stand-ins for numbers of arguments, and of places that an earlier run found to change."""

    def __init__(self, request: TraceRequest, substitutes: Substitutes) -> None:
        call = request.call
        self.uses = Uses()
        self.uses.membership_asked = membership_asked
        self.uses.place_asked = asked_position
        self.changing = ChangingNumbers(substitutes.numbers, self.uses, lambda: call.leaves)
        self.draws = HostDraws(self.uses, substitutes.draws)
        self.stand_in = substitutes.in_numbers
        self.sizes: CallSizes | None = None
        if request.dims and request.symbols is not None:
            parts = request.dims, request.symbols, call, self.uses
            self.sizes = CallSizes(*parts, stand_in=self.stand_in)
        self._request = request
        self._scaling = frozenset(number.label for number in substitutes.numbers)
        self._paths: list[str] = []  # of the leaves of the arguments

    @property
    def for_groups(self) -> Uses | None:
        """Where uses of hyper-parameters are noted, if others stand in for those."""
        return self.uses if self.stand_in else None

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, numbers at places and random numbers have stand-ins."""
        draws = self.draws.noted() if self.stand_in else contextlib.nullcontext()
        with self.changing.standing_in(), draws:
            yield

    def bind(self, batch: Sequence[object]) -> list[object]:
        """Bind the leaves of the arguments that the run gets."""
        names = parameter_names(self._request.function)
        arguments, _ = flatten_with_paths(unflatten(list(batch), self._request.spec), names)
        self._paths = [path for path, _ in arguments]
        if not self.stand_in:
            return list(batch)
        return [self._instead_of(at, leaf) for at, leaf in enumerate(batch)]

    def _instead_of(self, at: int, leaf: object) -> object:
        key, call = ("argument", at), self._request.call
        self.uses.decisions.labels[key] = f"argument {self._paths[at]}"
        roots = frozenset({key})
        find = cast("Callable[[], Any]", functools.partial(call.leaf, at))
        if is_real(leaf):
            scales = f"argument {at}" in self._scaling
            return Number(leaf, find, roots, self.uses, scales=scales)
        if is_numeric(leaf):
            return ArrayLeaf(leaf, find, roots, self.uses)
        if type(leaf) is str:
            return Text(leaf, find, roots, self.uses)
        return leaf

    def settle_sizes(self) -> tuple[str, ...]:
        """The user's lines that needed numbers of sizes, once no run follows. ``LoweringError``
        TR-305 if a number that stands in for one is in the graph."""
        if self.sizes is None:
            return ()
        self.sizes.check()
        return tuple(dict.fromkeys(self.sizes.lines))

    def may_change(self) -> bool:
        """Whether any number or string has a stand-in, apart from hyper-parameters."""
        return bool(self.changing.keys()) or any(
            is_real(leaf) or type(leaf) is str or is_numeric(leaf) for leaf in self._request.leaves
        )

    def is_free(self, at: int) -> bool:
        """Whether nothing depends on the stand-in for this argument."""
        return self.stand_in and ("argument", at) not in self.uses.needed

    def free_arguments(self) -> frozenset[int]:
        """Leaves of the arguments on whose values nothing depends."""
        leaves = enumerate(self._request.leaves)
        return frozenset(
            at for at, x in leaves if (is_real(x) or type(x) is str) and self.is_free(at)
        )

    def free_places(self) -> Iterator[tuple[int, object]]:
        """Places on whose numbers nothing depends, though others stood in for them."""
        return (key for key in self._places() if key not in self.uses.needed)

    def _places(self) -> Iterator[tuple[int, object]]:
        yield from self.changing.keys()
        if not self.stand_in:
            return
        for optimizer in self._request.optimizers.values():
            for group in optimizer.param_groups:
                for key, value in group.items():
                    values = value if type(value) is tuple else (value,)
                    if key != "params" and all(map(is_real, values)):
                        yield id(group), key

    def objects(self) -> tuple[tuple[int, str], ...]:
        """Arguments that are neither tensors nor plain values, by their numbers and labels."""
        return tuple(
            (at, f"argument {path}")
            for at, (path, leaf) in enumerate(zip(self._paths, self._request.leaves, strict=True))
            if not isinstance(leaf, Tensor) and not is_plain(leaf)
            if not (is_numeric(leaf) and self.is_free(at))
        )

    def decisions(self) -> tuple[NumberDecision, ...]:
        """The decisions on numbers that are not in the graph."""
        return (*self.uses.decisions.beside(self.uses.needed), *self.draws.decisions())
