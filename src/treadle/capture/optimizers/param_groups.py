"""Parameters that an optimizer steps together: their scalars and step counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.optimizers.counters import SharedCounters
from treadle.capture.optimizers.registry import OptimizerUpdate, update_rule
from treadle.capture.stored.names import NOT_STORED
from treadle.compat.hooks import note_stepped
from treadle.guards.watching import Watches


@final
@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """Parameters of one group of one optimizer whose step counters agree."""

    optimizer: Optimizer
    at: int  # index of the group
    parameters: tuple[nn.Parameter, ...]
    label: str
    active: list[nn.Parameter]  # those that have gradients, once the step has been traced
    taken: dict[nn.Parameter, int] = field(default_factory=dict[nn.Parameter, int])
    """How many steps a parameter takes in one call."""
    known: list[SharedCounters] = field(default_factory=list[SharedCounters], metadata=NOT_STORED)
    """Where the counters were found last; ``None`` if that is not tracked."""

    @property
    def group(self) -> dict[str, object]:
        """The optimizer's group as it is now."""
        return self.optimizer.param_groups[self.at]

    def scalar_names(self, group: Mapping[str, object] | None = None) -> tuple[str, ...]:
        """The names of its scalars: hyper-parameters, then step counters; ``first`` where the rule
        has no counters. ``group``: replaces the optimizer's."""
        rule = update_rule(self.optimizer)
        scalars = rule.scalars(self.group if group is None else group)
        return (*scalars, *(rule.counters or ("first",)))

    def state_names(self, parameter: nn.Parameter) -> frozenset[str]:
        """The names of a parameter's state."""
        rule = update_rule(self.optimizer)
        return frozenset((*rule.counters, *rule.states(parameter, self.group)))

    def values(self, nth: int = 0, *, found: bool = False) -> dict[str, float]:
        """The scalars now, for the ``nth`` step of a call. ``step`` counts the step to come;
        ``first``: is there no state yet? ``found``: the counters are where they were known to
        be."""
        rule = update_rule(self.optimizer)
        group = self.group
        scalars = rule.scalars(group)
        if rule.counters:
            return scalars | self._counters(rule, group, nth, found=found)
        state = self.optimizer.state.get(self.active[0], {})
        return scalars | {"first": float(nth == 0 and state.get("momentum_buffer") is None)}

    def _counters(
        self, rule: OptimizerUpdate, group: dict[str, object], nth: int, *, found: bool
    ) -> dict[str, float]:
        """The counters for the ``nth`` step of a call."""
        if found and self.known:
            now = self.known[0].now()
        else:
            state = self.optimizer.state.get(self.active[0], {})
            now = {name: float(state.get(name, start)) for name, start in rule.counters.items()}
        now = _stepped(now)
        for _ in range(nth):
            now = _stepped(rule.advanced(now, group))
        return now

    def agrees(self) -> bool:
        """Whether the counters of the parameters that step are still equal, as the graph assumes.
        They differ after some were frozen for a while, or after loading a checkpoint of another
        run."""
        if self.known and self.known[0].hold():
            return self.known[0].agree()
        agrees = self._agree()
        names = tuple(update_rule(self.optimizer).counters)
        counters = SharedCounters.of(self.optimizer, self.active, names) if agrees else None
        self.known[:] = [] if counters is None else [counters]
        return agrees

    def join(self, watches: Watches) -> bool:
        """Watch that the counters still agree; whether their places are known."""
        for key in self.known:
            key.join(watches)
        return bool(self.known)

    def _agree(self) -> bool:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.active]
        names = tuple(update_rule(self.optimizer).counters)
        for name in names or ("momentum_buffer",):
            entries = [state.get(name) for state in states]
            if len({entry is None for entry in entries}) > 1:
                return False
            values = (
                [torch.as_tensor(entry) for entry in entries if entry is not None] if names else []
            )
            if values and not bool((torch.stack(values) == values[0]).all()):
                return False
        return True

    def advance(self, *, found: bool = False) -> None:
        """The counters of every parameter after a step. ``found``: where they were known to be, at
        the beginning of this call."""
        rule = update_rule(self.optimizer)
        note_stepped(self.optimizer)
        if not rule.counters:
            return
        group = self.group
        after: dict[int, dict[str, float]] = {}
        for count in set(self.taken.values()):
            counters = self._counters(rule, group, count - 1, found=found)
            after[count] = rule.advanced(counters, group)
        if len(after) == 1 and self.known and (found or self.known[0].hold()):
            self.known[0].write(*after.values())
            return
        for parameter in self.active:
            state = self.optimizer.state.get(parameter, {})
            for name, value in after[self.taken[parameter]].items():
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(value)
                elif name in state:
                    state[name] = int(value)


def _stepped(counters: dict[str, float]) -> dict[str, float]:
    if "step" in counters:
        counters["step"] += 1.0
    return counters


ParamGroups = list[ParamGroup]


def param_groups_of(optimizers: Mapping[str, Optimizer]) -> ParamGroups:
    """Every group, split where its parameters' counters differ."""
    groups: ParamGroups = []
    for name, optimizer in optimizers.items():
        for at, group in enumerate(optimizer.param_groups):
            by_count: dict[tuple[float, bool], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                count = float(state.get("step", 0.0))
                first = state.get("momentum_buffer") is None
                by_count.setdefault((count, first), []).append(parameter)
            label = f"{name}.{type(optimizer).__name__.lower()}".lstrip(".")
            groups += [
                ParamGroup(optimizer, at, tuple(members), label, members)
                for members in by_count.values()
            ]
    return groups
