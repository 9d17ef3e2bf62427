"""What a compiled variant depends on, and messages about changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.captured import Captured
from treadle.capture.optimizers.registry import has_update_rule, update_rule
from treadle.capture.python_state.flatten import FlatArguments, FlatCalls, Structure
from treadle.capture.python_state.plain_values import NUMBERS, is_plain, number_of, plain_fact
from treadle.capture.python_state.reads.object_graph import (
    first_of_each,
    place_of_tensor,
    tensor_fact,
)
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.symbolic.arrays.arrays import array_fact, is_numeric, overlaps
from treadle.compat.distributed.fully_sharded import sharded_facts
from treadle.compat.hooks import module_hooks, step_hooks, tensor_hooks
from treadle.compat.switches import Switches
from treadle.guards.watching import Watches
from treadle.session.variants.cached_facts import (
    CachedFact,
    Facts,
    ModelWatch,
    OptimizerWatch,
    are_grads,
    modules_of,
    watch_models,
    watch_optimizers,
)

ArgumentFact = tuple[Any, ...]
"""What of an argument decides the graph: a ``TensorFact``, or its type's name and what it is."""
_NUMBERS = frozenset(number_type.__name__ for number_type in NUMBERS)
ANY = object()
_ANY_VALUE = ("any value",)
"""In the place of a value on which nothing depends."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """What of a key a captured variant does not depend on: the ids of parameters whose ``.grad``
    at the start does not matter, leaves of the arguments whose values do not, and modules, by their
    numbers, whose mode does not."""

    grads: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    modes: frozenset[int] = frozenset()

    @staticmethod
    def of(captured: Captured) -> "Ignored":
        """What is known of a captured step."""
        grads = (*captured.gradients.fresh, *captured.gradients.untouched)
        return Ignored(
            frozenset(map(id, grads)),
            captured.dependencies.free,
            captured.dependencies.unread_modes,
        )


@dataclass(frozen=True, slots=True)
class GuardKey:
    """Equal keys run the same compiled variant.

    ``structure``: of lists, tuples, dicts and other containers among the arguments. ``same``: for
    each argument the first one that is the same tensor object, which arrays share memory, and which
    arguments are parameters.
    ``identity``: the parameters as objects, which a variant is bound to.
    """

    arguments: tuple[tuple[str, ArgumentFact], ...]
    structure: Structure
    same: tuple[object, ...]
    identity: tuple[int, ...]
    training: tuple[object, ...]  # by module; ``ANY`` where its mode does not matter
    hooks: Facts
    parameters: Facts
    optimizers: Facts
    modes: Facts
    grads: tuple[bool, ...]  # by parameter: whether ``.grad`` is there
    plans: Facts = ()  # of models that were given to ``fully_shard``
    outside: ReadsGuard | None = None  # known once a variant has been captured
    ignored: Ignored = Ignored()  # what such a one does not depend on

    def of(self, outside: ReadsGuard | None, ignored: Ignored) -> "GuardKey":
        """As the key of a variant that reads this outside, and ignores this."""
        free, modes = ignored.values, ignored.modes
        args_ = tuple(
            (path, (fact[0], ANY)) if at in free and len(fact) == 2 else (path, fact)
            for at, (path, fact) in enumerate(self.arguments)
        )
        training = tuple(ANY if at in modes else mode for at, mode in enumerate(self.training))
        return replace(
            self,
            arguments=args_ if free else self.arguments,
            grads=self.without_grads(ignored).grads if ignored.grads else self.grads,
            training=training if modes else self.training,
            outside=outside,
            ignored=ignored,
        )

    def without_grads(self, ignored: Ignored) -> "GuardKey":
        """Without the gradients that make no difference."""
        there = zip(self.grads, self.identity, strict=True)
        return replace(self, grads=tuple(grad and at not in ignored.grads for grad, at in there))

    def without_values(self, ignored: Ignored) -> "GuardKey":
        """Without the plain values among the arguments, if none of them makes a difference; else
        itself."""
        plain = [at for at, (_, fact) in enumerate(self.arguments) if len(fact) == 2]
        if not plain or not ignored.values.issuperset(plain):
            return self
        return self.of_any_values()

    def of_any_values(self) -> "GuardKey":
        """With the kinds of the plain values among the arguments alone."""
        arguments = tuple(
            (path, (fact[0], _ANY_VALUE) if len(fact) == 2 else fact)
            for path, fact in self.arguments
        )
        return replace(self, arguments=arguments)

    def as_seen_by(self, other: "GuardKey") -> "GuardKey":
        """This key as that of the variant that ``other`` is the key of."""
        return self.of(other.outside, other.ignored)


class Called(NamedTuple):
    """What of a key the call itself decides: its arguments, and PyTorch's modes and switches."""

    arguments: tuple[tuple[str, ArgumentFact], ...]
    structure: Structure
    same: tuple[object, ...]
    modes: Facts


@dataclass(frozen=True, slots=True)
class PassedParameter:
    """An argument, by its place among those that are tensors, which is a parameter of the step: one
    input of the graph."""

    at: int
    identity: int


class Keys:
    """The keys of a step's calls. What is as it was at the call before is not looked at again, and
    is the very same object in both keys. ``names``: of the arguments by position."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        names: Sequence[str] = (),
    ) -> None:
        self._calls = FlatCalls(names)
        self._trained = models
        self._switches = Switches()
        self._there: tuple[bool, ...] = ()  # gradients at the last call
        self._models = CachedFact(lambda: _model_facts(models), lambda: watch_models(models))
        self._optimizers = CachedFact(
            lambda: _optimizer_facts(optimizers), lambda: watch_optimizers(optimizers)
        )

    def called(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, update: bool = True
    ) -> tuple[Called, FlatArguments]:
        """What the call itself decides, and its arguments. Python values among their leaves are
        part of it as they are; ``update``: whether the optimizers step."""
        inputs, paths, structure = self._calls.of(args, kwargs)
        leaves = inputs.leaves
        facts: list[ArgumentFact] = []
        tensors: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                facts.append(tensor_fact(leaf))
            else:
                facts.append(_fact(leaf))
        several = len(leaves) > 1
        called = Called(
            tuple(zip(paths, facts, strict=True)),
            structure,
            (
                *(first_of_each(tensors) if several else (0,) * len(tensors)),
                *(overlaps(leaves) if several else ()),
                *self._passed(tensors),
            ),
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                self._switches.now(),
                update,
            ),
        )
        return called, inputs

    def _passed(self, tensors: Sequence[Tensor]) -> tuple[PassedParameter, ...]:
        """Which of the arguments are parameters."""
        likely = [at for at, tensor in enumerate(tensors) if _may_be_parameter(tensor)]
        if not likely:
            return ()
        owned = {id(p) for model in self._trained.values() for p in model.parameters()}
        passed = (PassedParameter(at, id(tensors[at])) for at in likely)
        return tuple(parameter for parameter in passed if parameter.identity in owned)

    def key(self, called: Called) -> GuardKey:
        """The whole key of such a call."""
        facts = self._models.get()
        return GuardKey(
            called.arguments,
            called.structure,
            called.same,
            facts.identity,
            facts.training,
            facts.hooks,
            facts.tensors,
            self._optimizers.get(),
            called.modes,
            self._grads(facts.parameters),
            facts.plans,
        )

    def join(self, watches: Watches) -> bool:
        """What of the last key the call itself does not decide, while it is as it was; whether that
        can be said. What changes often comes first."""
        models, optimizers = self._models.watch, self._optimizers.watch
        if not isinstance(models, ModelWatch) or not isinstance(optimizers, OptimizerWatch):
            return False
        optimizers.join(watches, self._optimizers.is_known)
        models.join(watches)
        return True

    def are_without_gradients(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether none of these has one at a call of the last key, as far as that is known."""
        owned = set(map(id, self._models.get().parameters))
        return not any(self._there) and owned.issuperset(map(id, parameters))

    def _grads(self, parameters: Sequence[nn.Parameter]) -> tuple[bool, ...]:
        """Which parameters have gradients."""
        watch = self._models.watch
        if isinstance(watch, ModelWatch) and watch.same_grads:
            return self._there
        self._there = are_grads(parameters)
        if isinstance(watch, ModelWatch):
            watch.note_grads(self._there)
        return self._there


def _optimizer_facts(optimizers: Mapping[str, Optimizer]) -> Facts:
    return tuple(
        (
            len(group["params"]),
            step_hooks(optimizer),
            bool(group.get("differentiable")),
            *_structure(optimizer, group),
        )
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
    )


def _structure(optimizer: Optimizer, group: dict[str, object]) -> Facts:
    """What of the group's options decides the graph; nothing where the optimizer is not in it."""
    if not has_update_rule(optimizer):
        return ("eager", type(optimizer))
    return update_rule(optimizer).structure(group)


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    """Modes of modules, parameters as objects, the types of parameters and buffers, hooks."""

    training: tuple[bool, ...]
    identity: tuple[int, ...]
    tensors: Facts
    hooks: Facts
    plans: Facts
    parameters: tuple[nn.Parameter, ...] = field(compare=False)  # by ``identity``


def _model_facts(models: Mapping[str, nn.Module]) -> _ModelFacts:
    training: list[bool] = []
    parameters: list[nn.Parameter] = []
    tensors: list[object] = []
    hooks: list[object] = []
    for model in models.values():
        for module in modules_of(model):  # one walk: ``parameters()``, ``buffers()`` cost thrice
            training.append(module.training)
            hooks += module_hooks(module)
            for p in module._parameters.values():
                if p is not None:
                    parameters.append(p)
                    hooks += tensor_hooks(p)
                    place = place_of_tensor(p)
                    tensors.append((p.requires_grad, p.dtype, p.shape, p.stride(), place))
            tensors += [
                (b.dtype, b.shape, b.stride(), place_of_tensor(b))
                for b in module._buffers.values()
                if b is not None
            ]
    identity = tuple(map(id, parameters))
    facts = tuple(training), identity, tuple(tensors), tuple(map(id, hooks))
    return _ModelFacts(*facts, sharded_facts(models.values()), tuple(parameters))


def _may_be_parameter(tensor: Tensor) -> bool:
    """Also one of no class of its own, if it has attributes: PyTorch asks for one of those."""
    if type(tensor) is Tensor and not tensor.requires_grad and not vars(tensor):
        return False
    return tensor.requires_grad or isinstance(tensor, nn.Parameter)


def _fact(value: object) -> ArgumentFact:
    """What of an argument that is no tensor decides the graph; of objects only their kind: what
    they hold is looked at as what a step reads outside is."""
    if is_plain(value):
        kind, fact = plain_fact(value)
        return (kind.__name__, fact)
    if is_numeric(value):
        return ("ndarray", type(value), array_fact(value))
    return (type(value).__name__, type(value), "object")


@dataclass(frozen=True, slots=True)
class Names:
    """The user's names in the order of a key's facts: of modules, and of their tensors."""

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    parameters: tuple[str, ...]


def names_of(models: Mapping[str, nn.Module]) -> Names:
    """In the order of a key."""
    modules: list[str] = []
    tensors: list[str] = []
    parameters: list[str] = []
    for prefix, model in models.items():
        paths = {id(module): path for path, module in model.named_modules()}
        for module in modules_of(model):
            path = f"{prefix}.{paths[id(module)]}".strip(".")
            modules.append(path or "the model")
            own, buffers = (
                [
                    f"{path}.{name}".lstrip(".")
                    for name, tensor in held.items()
                    if tensor is not None
                ]
                for held in (module._parameters, module._buffers)
            )
            parameters += own
            tensors += own + buffers
    return Names(tuple(modules), tuple(tensors), tuple(parameters))


def explain_difference(old: GuardKey, new: GuardKey, names: Names) -> str:
    """Which argument and dim changed, or what else did. ``names``: of the models of ``new``."""
    new = new.as_seen_by(old)
    before, after = dict(old.arguments), dict(new.arguments)
    for path, fact in after.items():
        if path not in before:
            return f"argument {path} is new"
        if fact != before[path]:
            return f"argument {path}: {_change(before[path], fact)}"
    if set(before) - set(after):
        return f"argument {sorted(set(before) - set(after))[0]} is missing"
    if old.structure != new.structure:
        return "lists, tuples or other containers among the arguments changed their type"
    if _passed_in(old) != _passed_in(new):
        return "an argument became a parameter or another parameter, or no longer is one"
    if old.same != new.same:
        return "arguments that were one tensor are now several, or several are now one"
    if old.identity != new.identity:
        return "parameters were replaced by other objects"
    if old.training != new.training:
        return _switched(old, new, names)
    if old.hooks != new.hooks:
        return "a hook of a module or a parameter was added or removed"
    if old.plans != new.plans:
        return "the settings of fully_shard changed"
    if old.modes[-1] != new.modes[-1]:
        return f"update={old.modes[-1]} became update={new.modes[-1]}"
    if old.parameters != new.parameters:
        return _other_tensors(old, new, names)
    if old.grads != new.grads:
        return _other_grads(old, new, names)
    if old.optimizers != new.optimizers:
        return "an optimizer's options or parameter groups changed"
    return "grad mode, autocast or another PyTorch switch changed"


def differing_arguments(old: GuardKey, new: GuardKey) -> int:
    """How many arguments, of either call, are not those of the other one."""
    return len({*old.arguments} ^ {*new.as_seen_by(old).arguments})


def _passed_in(key: GuardKey) -> list[object]:
    return [passed for passed in key.same if isinstance(passed, PassedParameter)]


def differing_numbers(old: GuardKey, new: GuardKey) -> list[int]:
    """Leaves of the arguments that are other numbers of the same kind, if nothing else differs."""
    pairs = list(zip(old.arguments, new.arguments, strict=False))
    if len(old.arguments) != len(new.arguments) or old.structure != new.structure:
        return []
    return [
        at
        for at, ((_, a), (_, b)) in enumerate(pairs)
        if a != b and {a[0], b[0]} <= _NUMBERS and len(a) == 2 and at not in old.ignored.values
    ]


def _switched(old: GuardKey, new: GuardKey, names: Names) -> str:
    changed = [
        (name, now)
        for name, before, now in zip(names.modules, old.training, new.training, strict=False)
        if before != now
    ]
    if not changed or len(old.training) != len(new.training):
        return "the model has other modules"
    name, now = changed[0]
    others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{name}{others}: switched to {'train()' if now else 'eval()'}"


def _other_tensors(old: GuardKey, new: GuardKey, names: Names) -> str:
    if len(old.parameters) != len(new.parameters):
        return "the model has other buffers"
    pairs = zip(names.tensors, old.parameters, new.parameters, strict=True)
    name, before, now = next((n, a, b) for n, a, b in pairs if a != b)
    words = ("requires_grad", "dtype", "shape", "strides", "device")
    if len(now) != len(words):
        words = ("dtype", "shape", "strides", "device")
    at = next(at for at, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    shown = [
        list(facts[at]) if isinstance(facts[at], tuple) else facts[at] for facts in (before, now)
    ]
    return f"{name}: {words[at]} {shown[0]} became {shown[1]}"


def _other_grads(old: GuardKey, new: GuardKey, names: Names) -> str:
    rows = zip(names.parameters, old.grads, new.grads, strict=True)
    name, there = next((name, is_) for name, was, is_ in rows if was != is_)
    return f"{name}.grad {'is set now' if there else 'was set, and is None now'}"


def _change(old: ArgumentFact, new: ArgumentFact) -> str:
    if old[0] == new[0] == "ndarray":
        return "{}, shape {}, strides {} became {}, {}, {}".format(*old[2], *new[2])
    if len(old) != 5 or len(new) != 5:
        return _change_of_value(old, new)
    if old[0] != new[0]:
        return f"dtype {old[0]} became {new[0]}"
    if old[1] != new[1]:
        dims = [
            f"dim {at}: {a} -> {b}"
            for at, (a, b) in enumerate(zip(old[1], new[1], strict=False))
            if a != b
        ]
        changed = f" ({', '.join(dims)})" if len(old[1]) == len(new[1]) else ""
        return f"shape {list(old[1])} became {list(new[1])}{changed}"
    if old[4] != new[4]:
        return f"requires_grad={old[4]} became {new[4]}"
    return f"strides or device: {old[2]}, {old[3]} became {new[2]}, {new[3]}"


def _change_of_value(old: ArgumentFact, new: ArgumentFact) -> str:
    return f"{_shown(old)} became {_shown(new)}"


def _shown(fact: ArgumentFact) -> str:
    if len(fact) == 5:
        return "a tensor"
    if len(fact) == 3:
        return f"a {fact[0]}"
    if fact[1] is ANY:
        return f"any {fact[0]}"
    if fact[0] in ("float", "complex", "slice"):
        return fact[1]
    if isinstance(fact[1], bytes) and fact[0] != "bytes":
        number = number_of(fact[0], fact[1])
        return f"another {fact[0]}" if number is None else f"{fact[0]} {number}"
    return repr(fact[1])
