"""The facts about models and optimizers that are in a call's key, read again only if they may
differ.

For modules, the dicts of modes, parameters, buffers and hooks are watched; for tensors, the
layouts, all at once; for optimizers, the groups. Facts that no watch covers are read as before.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.optimizers.registry import update_rules
from treadle.capture.python_state.plain_values import is_real
from treadle.compat.hooks import has_tensor_hooks, hook_dicts, step_hook_dicts
from treadle.guards.dict_fingerprint import of_dict
from treadle.guards.tensor_fingerprint import grad_word, no_grad, of_tensor
from treadle.guards.watching import FingerprintWatch, Unchanged, Watches, watch_dicts, watch_tensors

Facts = tuple[Any, ...]
_GRAD = operator.attrgetter("grad")
T = TypeVar("T")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Each module once, in the order of ``model.modules()``, at a third of its time."""
    seen: dict[int, nn.Module] = {}
    left = [model]
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return list(seen.values())


def are_grads(parameters: Iterable[nn.Parameter]) -> tuple[bool, ...]:
    """Which parameters have gradients."""
    return tuple([grad is not None for grad in map(_GRAD, parameters)])


_IN_VAIN = 4  # watches in a row
_MOST_WITHOUT = 16
"""Calls for which no watch is made, where those before were in vain."""


@final
class CachedFact(Generic[T]):
    """A value that ``compute`` gives, and what has to be as it was for it to be the same.

    Where something is written at every call (``weight_norm`` assigns a weight to its module), a
    watch costs more than it saves: after some in vain they are made less and less often.
    """

    def __init__(self, compute: Callable[[], T], watch: Callable[[], Unchanged | None]) -> None:
        self._compute = compute
        self._make = watch
        self.watch: Unchanged | None = None
        self._known: list[T] = []
        self._in_vain = 0  # watches in a row that saw something written at the next call
        self._without = 0  # calls to come for which none is made

    def get(self) -> T:
        """What ``compute`` would give now; equal values are the very same object."""
        if self.watch is not None and self.watch.is_same():
            self._in_vain = 0
            return self._known[0]
        makes = self._makes_watch()
        self.watch = None  # of a value that is known no longer, should there be an error
        fact = self._compute()
        if not self._known or self._known[0] != fact:
            self._known = [fact]
        self.watch = self._make() if makes else None
        return self._known[0]

    def _makes_watch(self) -> bool:
        """Whether the value is watched until the next call, since it is not as it was."""
        if self.watch is not None:
            self._in_vain += 1
            twice = 1 << max(0, self._in_vain - _IN_VAIN)
            self._without = min(twice - 1, _MOST_WITHOUT)
        elif self._without:
            self._without -= 1
        return not self._without

    def is_known(self) -> bool:
        """Whether ``compute`` gives now what it gave last."""
        return bool(self._known) and self._compute() == self._known[0]


@final
class ModelWatch:
    """Models by the words of their modules' dicts and of their tensors; which parameters have
    gradients is looked at beside them."""

    def __init__(
        self, words: FingerprintWatch, parameters: Sequence[Tensor], whole: Iterable[object]
    ) -> None:
        """``whole``: the dicts and tensors whose words these are."""
        self._whole = frozenset(map(id, whole))
        places = {
            at: word for at, parameter in enumerate(parameters) if (word := grad_word(parameter))
        }
        self._at = list(places)
        self._words = words.settle(list(places.values()), no_grad())
        self.same_grads = False  # whether they are what ``note_grads`` was told
        self._noted = False  # not yet, should a call fail before

    def is_same(self) -> bool:
        """Whether all but the gradients is as it was; of these ``same_grads`` says it."""
        same, there = self._words.are_same()
        self.same_grads = there and self._noted
        return same

    def note_grads(self, there: Sequence[bool]) -> None:
        """Which parameters have gradients."""
        self._words.set_flags([there[at] for at in self._at])
        self._noted = True

    def join(self, watches: Watches) -> None:
        """All of it, gradients included, while these are what ``note_grads`` was told."""
        watches.add(self._words)
        watches.whole |= self._whole


@final
class PolledModels:
    """Models whose tensors are asked."""

    def __init__(self, dicts: Unchanged, tensors: Unchanged, parameters: Sequence[Tensor]) -> None:
        self._dicts = dicts
        self._tensors = tensors
        self._parameters = parameters

    def is_same(self) -> bool:
        """Whether all but the gradients is as it was."""
        return (
            self._dicts.is_same()
            and self._tensors.is_same()
            and not has_tensor_hooks(self._parameters)
        )


def watch_models(models: Mapping[str, nn.Module]) -> ModelWatch | PolledModels | None:
    """For the modes, hooks and tensors of models; ``None`` where they cannot be watched."""
    dicts: list[dict[Any, Any]] = []
    parameters: list[Tensor] = []
    buffers: list[Tensor] = []
    for model in models.values():
        for module in modules_of(model):
            held = module._parameters, module._buffers, module._modules
            hooks = hook_dicts(module)
            if any(type(mapping) is not dict for mapping in held) or not _is_plain(module):
                return None
            if any(len(hook) > 1 for hook in hooks):
                return None  # their order may be another one, which is not a write
            dicts += (vars(module), *held, *hooks)
            parameters += [parameter for parameter in held[0].values() if parameter is not None]
            buffers += [buffer for buffer in held[1].values() if buffer is not None]
    if has_tensor_hooks(parameters):
        return None
    unique = list({id(parameter): parameter for parameter in (*parameters, *buffers)}.values())
    looks = [partial(of_dict, mapping) for mapping in dicts] + [
        partial(of_tensor, t) for t in unique
    ]
    words = FingerprintWatch()
    if all(map(words.add, looks)):
        return ModelWatch(words, parameters, (*dicts, *unique))
    tensors = watch_tensors(unique)
    return None if tensors is None else PolledModels(watch_dicts(dicts), tensors, parameters)


def _is_plain(module: nn.Module) -> bool:
    """Whether its mode is an attribute of its own, and of no class."""
    classes = type(module).__mro__
    return "training" in vars(module) and not any("training" in vars(cls) for cls in classes)


@final
@dataclass(frozen=True, slots=True)
class _SteppingOptimizer:
    """An optimizer's class, how it steps, its groups, and how many parameters each of them has."""

    optimizer: Optimizer
    kind: type[Optimizer]
    step: Callable[..., object]
    groups: tuple[tuple[dict[str, Any], int], ...]

    @staticmethod
    def of(optimizer: Optimizer) -> "_SteppingOptimizer":
        kind = type(optimizer)
        groups = tuple((group, len(group["params"])) for group in optimizer.param_groups)
        return _SteppingOptimizer(optimizer, kind, kind.step, groups)

    def is_same(self) -> bool:
        kind, now = type(self.optimizer), self.optimizer.param_groups
        if kind is not self.kind or kind.step is not self.step or len(now) != len(self.groups):
            return False
        for group, (known, count) in zip(now, self.groups, strict=True):
            if group is not known or len(group["params"]) != count:
                return False
        return True


@final
class OptimizerWatch:
    """Optimizers: their groups, how many parameters each has, how they step."""

    def __init__(
        self, dicts: Sequence[dict[object, object]], optimizers: Sequence[Optimizer]
    ) -> None:
        self._dicts = watch_dicts(dicts)
        self._optimizers = optimizers
        self._seen = [_SteppingOptimizer.of(optimizer) for optimizer in optimizers]

    def is_same(self) -> bool:
        """Whether all of it is as it was."""
        return self._dicts.is_same() and self._is_same_beside_dicts()

    def _is_same_beside_dicts(self) -> bool:
        for seen in self._seen:  # noqa: SIM110  # asked at every call
            if not seen.is_same():
                return False
        return True

    def join(self, watches: Watches, is_known: Callable[[], bool]) -> None:
        """All of it. ``is_known``: whether what decides the graph is what it was, which schedulers,
        who write to a group at every step, leave as it is."""
        if isinstance(self._dicts, FingerprintWatch):
            self._dicts.excuse = lambda _: self._are_sealed() and is_known()
        watches.add(self._dicts)
        watches.polled.append(self._is_same_beside_dicts)

    def _are_sealed(self) -> bool:
        return all(
            map(
                _is_sealed_group,
                (g for optimizer in self._optimizers for g in optimizer.param_groups),
            )
        )


def watch_optimizers(optimizers: Mapping[str, Optimizer]) -> OptimizerWatch | None:
    """For what of their groups decides the graph; ``None`` where it cannot be watched."""
    dicts: list[dict[Any, Any]] = [update_rules(), *step_hook_dicts(optimizers.values())]
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            if not _is_sealed_group(group):
                return None
            dicts.append(group)
        dicts.append(vars(optimizer))
    if any(type(hooks) not in (dict, OrderedDict) for hooks in dicts):
        return None
    return OptimizerWatch(dicts, list(optimizers.values()))


def _is_sealed_group(group: dict[str, object]) -> bool:
    """Whether a change of its options is a write to it."""
    values = (value for name, value in group.items() if name != "params")
    return type(group) is dict and all(map(_is_sealed, values))


def _is_sealed(value: object) -> bool:
    """Whether it is what it is: a tensor's number may change, and a list's."""
    if type(value) is tuple:
        return all(map(_is_sealed, value))
    return value is None or type(value) in (bool, str) or is_real(value)


__all__ = [
    "CachedFact",
    "Facts",
    "ModelWatch",
    "OptimizerWatch",
    "are_grads",
    "modules_of",
    "watch_models",
    "watch_optimizers",
]  # fmt: skip
