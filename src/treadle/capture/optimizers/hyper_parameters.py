"""Hyper-parameters while a step is captured: numbers that stand in for those of the groups, and
what the step sets before an update that reads them.

::

    group["lr"] = lr_at(self.n); optimizer.step()     the update's rate is an input of the graph

An update reads the hyper-parameters of its group when it is called. Values that an update rule
derives from them (``beta1`` of ``betas``) are recomputed at every call; a tensor, or a number that
is known after the launch, is used directly if the rule passes it on.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.failures import of_torch
from treadle.capture.optimizers.registry import OptimizerUpdate
from treadle.capture.python_state.plain_values import RealNumber, is_real
from treadle.capture.symbolic.deferred import is_deferred
from treadle.capture.symbolic.numbers import Number, Uses, is_number
from treadle.compat.fake import is_traced
from treadle.compat.tracing import outside_modes
from treadle.util.errors import CaptureError

Values = dict[str, Any]
_PROBES = (0.0, 0.375, 0.625)
"""Stands for an entry that a rule must pass on unchanged."""


def standing_in(value: object, optimizer: Optimizer, at: int, key: str, uses: Uses) -> object:
    """A hyper-parameter of a group, or several in a tuple, as numbers that are read at every call
    from the group that the optimizer has then."""
    owner = id(optimizer.param_groups[at])
    roots = frozenset({(owner, key)})
    uses.decisions.labels[owner, key] = f"a parameter group's {key}"
    if is_real(value):
        find = functools.partial(_of_group, optimizer, at, key)
        return Number(value, find, roots, uses, scales=True)
    if type(value) is tuple and all(map(is_real, cast("tuple[object, ...]", value))):
        return tuple(
            Number(
                number,
                functools.partial(_nth, optimizer, at, key, n),
                roots,
                uses,
                scales=True,
                key=uses.decisions.key_of(roots, n),
            )
            for n, number in enumerate(cast("tuple[RealNumber, ...]", value))
        )
    return value


def _of_group(optimizer: Optimizer, at: int, key: str) -> object:
    return optimizer.param_groups[at][key]


def _nth(optimizer: Optimizer, at: int, key: str, n: int) -> object:
    return optimizer.param_groups[at][key][n]


@final
class HyperParameters:
    """The hyper-parameters of one run. ``traced_for``: the traced tensor for one of the user's, if
    the step has met it."""

    def __init__(self, uses: Uses, traced_for: Callable[[Tensor], Tensor | None]) -> None:
        self._uses, self._traced_for = uses, traced_for
        self._before: dict[int, list[Values]] = {}

    def begin(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Note the values at the beginning of a call."""
        for optimizer in optimizers.values():
            self._before[id(optimizer)] = [dict(group) for group in optimizer.param_groups]

    def set_in(self, optimizer: Optimizer, at: int) -> Values:
        """The entries of a group that the step has set or written to."""
        before = self._before.get(id(optimizer), [])
        if at >= len(before):
            return {}
        return {
            key: value
            for key, value in optimizer.param_groups[at].items()
            if key != "params"
            and key in before[at]
            and (_unlike(value, before[at][key]) or self._is_written(value))
        }

    def _is_written(self, value: object) -> bool:
        traced = self._traced_for(value) if isinstance(value, Tensor) else None
        return traced is not None and traced._version > 0

    def at_update(self, optimizer: Optimizer, at: int, group: Mapping[str, object]) -> "SetGroup":
        """The hyper-parameters that an update reads. ``group``: the group as it was before the
        run."""
        return SetGroup(optimizer, at, group, self.set_in(optimizer, at), self._uses)

    def set_values(self, optimizer: Optimizer) -> Iterator[tuple[int, str, Callable[[], object]]]:
        """The values that the step has set, by the number of a group and a key, as a call computes
        them before the launch. TR-139 for values that are known only after it."""
        for at in range(len(optimizer.param_groups)):
            for key, value in self.set_in(optimizer, at).items():
                if any(is_deferred(e) or is_traced(e) for e in _items(value)):
                    raise sets_hyper_parameter(optimizer, key, _COMPUTED)
                yield at, key, functools.partial(_now, value)


@final
@dataclass(frozen=True, slots=True)
class SetGroup:
    """A group as an update finds it: ``before`` the run, and what the step has ``set``."""

    optimizer: Optimizer
    at: int
    before: Mapping[str, Any]
    set: Values
    uses: Uses

    def values(self, rule: OptimizerUpdate) -> Values:
        """The values of this run, with guards on what they decide in the graph. TR-139 if the
        update would keep other state than with the values before the run."""
        values = {key: _plain(value) for key, value in {**self.before, **self.set}.items()}
        self._refuse_unfit(rule, values)
        for key in self._handed_on():
            probed = [rule.structure({**values, key: probe}) for probe in _PROBES]
            if any(structure != probed[0] for structure in probed):
                raise sets_hyper_parameter(self.optimizer, key, _COMPUTED)
            values[key] = _PROBES[1]
        for parameter in self.optimizer.param_groups[self.at]["params"][:1]:
            kept, now = (
                rule.states(parameter, group_values).keys()
                for group_values in (self.before, values)
            )
            if kept != now:
                chosen = [
                    key
                    for key in self.set
                    if rule.states(parameter, {**self.before, key: values[key]}).keys() != kept
                ]
                keys = ", ".join(chosen or self.set)
                raise sets_hyper_parameter(self.optimizer, keys, _OTHER_STATE)
        self._refuse_counted(rule, values)
        self._decide(rule, values)
        return values

    def _refuse_unfit(self, rule: OptimizerUpdate, values: Values) -> None:
        """TR-132 for a value with which no update can be computed, such as a string."""
        known = {**values, **dict.fromkeys(self._handed_on(), _PROBES[1])}
        try:
            rule.structure(known)
            rule.scalars(known)
        except (TypeError, ValueError) as error:
            shown = ", ".join(f"{key}={values[key]!r}" for key in self.set)
            text = f"{type(self.optimizer).__name__} cannot step with {shown}: {error}"
            raise of_torch(TypeError(text), here()) from error

    def _refuse_counted(self, rule: OptimizerUpdate, values: Values) -> None:
        """Counters advance by the group as it is at the beginning of a call, or at its end."""
        asked = _RecordedGroup(values)
        rule.advanced({name: counter + 1.0 for name, counter in rule.counters.items()}, asked)
        for key in sorted(asked.keys_asked & self.set.keys()):
            raise sets_hyper_parameter(self.optimizer, key, _COUNTED)

    def _decide(self, rule: OptimizerUpdate, values: Values) -> None:
        """Add a guard that the structure is the same at every call that the graph serves."""
        numbers = [n for value in self.set.values() for n in _items(value) if is_number(n)]
        roots = frozenset[object]().union(*(number.roots for number in numbers))
        if roots:
            keys = tuple((name, *map(id, _items(value))) for name, value in self.set.items())
            key = self.uses.decisions.key_of("structure", id(rule), self.at, keys)
            outcome = rule.structure(values)
            compute = functools.partial(self._structure, rule)
            self.uses.decisions.add(key, compute, outcome, roots)

    def _structure(self, rule: OptimizerUpdate) -> tuple[object, ...]:
        return rule.structure(self._at_call())

    def _handed_on(self) -> list[str]:
        return [key for key, value in self.set.items() if is_deferred(value) or _is_tensor(value)]

    def _at_call(self) -> Values:
        """The group of a call as the update reads it, as far as that is known before the launch."""
        values = {**self.optimizer.param_groups[self.at], **self.set}
        known = {key: _now(value) for key, value in values.items() if key not in self._handed_on()}
        return known | dict.fromkeys(self._handed_on(), _PROBES[1])

    def scalars(
        self, rule: OptimizerUpdate, device: torch.device, traced_for: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The values that the rule computes from them, as inputs of the graph."""
        group = {key: _plain(entry) for key, entry in {**self.before, **self.set}.items()}
        inputs: dict[str, Tensor] = {}
        for key in self._handed_on():
            seen = [rule.scalars({**group, key: probe}) for probe in _PROBES]
            others = [{**named, key: None} for named in seen]
            if [e.get(key) for e in seen] != [*_PROBES] or any(e != others[0] for e in others):
                raise sets_hyper_parameter(self.optimizer, key, _COMPUTED)
            value = self.set[key]
            value = value.in_graph and value.in_graph() if is_deferred(value) else traced_for(value)
            if value is None:
                raise sets_hyper_parameter(self.optimizer, key, _COMPUTED)
            inputs[key] = value.detach().reshape(()).to(device=device, dtype=torch.float64)
            group[key] = _PROBES[1]
        for name, value in rule.scalars(group).items():
            if name not in inputs:
                compute = functools.partial(self._scalar, rule, name)
                key = self.uses.decisions.key_of("scalar", id(self), name)
                number = Number(value, compute, frozenset(), self.uses, scales=True, key=key)
                inputs[name] = number.entry(device)
        return inputs

    def _scalar(self, rule: OptimizerUpdate, name: str) -> float:
        return rule.scalars(self._at_call())[name]


_OTHER_STATE = "which then needs other state than the group has at the beginning of the call"
_COUNTED = "and the optimizer counts by it from call to call"
_COMPUTED = (
    "to a number that it computes in the same call, but what the update computes depends on it"
)
"""Why a hyper-parameter cannot be set there."""


class _RecordedGroup(dict[str, object]):
    """A group that knows which of its entries were asked for."""

    def __init__(self, group: Mapping[str, object]) -> None:
        super().__init__(group)
        self.keys_asked: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        """Like ``dict.get``."""
        self.keys_asked.add(key)
        return super().get(key, default)


def _items(value: object) -> Sequence[object]:
    return value if type(value) is tuple or type(value) is list else (value,)


def _each(function: Callable[[object], object], value: object) -> object:
    if type(value) is tuple:
        return tuple(map(function, value))
    return list(map(function, value)) if type(value) is list else function(value)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and not is_number(value)


def _now(value: object) -> object:
    """The value at a call."""
    return _each(lambda number: number.compute() if is_number(number) else number, value)


def _plain(value: object) -> object:
    """The value in this run; for a tensor that nobody writes to, its number."""

    def one(number: object) -> object:
        if is_number(number):
            return number.value
        if isinstance(number, Tensor) and not is_traced(number):
            with outside_modes():
                return number.item() if number.numel() == 1 else number
        return number

    return _each(one, value)


def _unlike(now: object, before: object) -> bool:
    """Whether a hyper-parameter differs from the value at the beginning of the run."""
    if type(now) is tuple and type(before) is tuple:
        return len(now) != len(before) or any(map(_unlike, now, before))
    return now is not before


def sets_hyper_parameter(optimizer: Optimizer, key: str, why: str) -> CaptureError:
    """TR-139."""
    return CaptureError(
        f"the step sets {key} of {type(optimizer).__name__} before the update of the same call, "
        f"{why}",
        code="TR-139",
        where=here(),
        remedy="set it before the call, or after the update for the next call",
    )
