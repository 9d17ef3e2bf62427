"""What a traced run reads and changes outside of the step's function: everything is put back, and
the changes are made again at every call."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.capture.dice import Dice
from treadle.capture.places import CONTAINERS, MANY, MISSING, PLAIN, Place, Reads, tensors_held
from treadle.capture.torch_private import FakeTensor, flatten, works_for
from treadle.capture.variables import Variables
from treadle.util.errors import CaptureError

_SILENT = frozenset(vars(nn.Module()))
"""Attributes of a module whose reading is no news: modes and hooks are in every key."""
_OWN = _SILENT - {"training"}
"""Those that other code than this looks after."""

_CLOSED = (ModuleType, FunctionType, MethodType, BuiltinFunctionType, type, Enum, Tensor, Optimizer)
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of a type: made by Python code; sealed


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What holds values, ``vars(module)`` for example, with a copy from before the run."""

    label: str
    values: dict[Any, Any]
    before: dict[Any, Any]
    entries: bool = False  # of a dict, and not attributes
    fixed: bool = False  # parameters and modules: a change is refused

    def place(self, name: Any) -> Place:
        label = f"{self.label}[{name!r}]" if self.entries else f"{self.label}.{name}".lstrip(".")
        return Place(self.values, name, label)

    def changed(self) -> list[tuple[Place, Any, Any]]:
        """Places, what was there and what is there now."""
        names = dict.fromkeys([*self.before, *self.values])
        found = ((n, self.before.get(n, MISSING), self.values.get(n, MISSING)) for n in names)
        return [(self.place(n), old, new) for n, old, new in found if old is not new]


class Outside:
    """Modules, objects, variables and containers that a step's function reaches.

    Objects are met when they are read: from then on what is read of them is noted, before any of
    it is changed.
    """

    def __init__(
        self,
        variables: Variables,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        arguments: Iterable[Any] = (),
        seen: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """``arguments``: leaves of the step's own; objects among them are looked after as well.
        ``seen`` hears of each value that the step can reach, before it can be changed."""
        self._seen = seen
        self._held: dict[int, _Held] = {}
        self._lists: list[tuple[str, Any, list[Any]]] = []
        self._read: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._containers: set[int] = set()
        self._classes: dict[type, Any] = {}
        self._thread = threading.get_ident()
        for prefix, model in models.items():
            self._meet(model, prefix)
        for prefix, optimizer in optimizers.items():
            for at, group in enumerate(optimizer.param_groups):
                name = f"{prefix or 'optimizer'}.param_groups[{at}]"
                self._keep(_Held(name, group, dict(group), entries=True))
        self._variables = [(place, place.get()) for place in variables.assigned]
        for place in variables.read:
            value = place.get()
            self._variables.append((place, value))
            self._read[place.identity] = place, value
            self._meet(value, place.label)
        for owner in variables.owners:
            self._meet(owner, "self")
        for each in arguments:
            self._meet(each, type(each).__name__)
        found = [(place.label, value) for place, value in self._read.values()]
        found += [
            (held.label, each) for held in self._held.values() for each in held.before.values()
        ]
        self._dice = Dice(found)
        for _, each in found:
            seen(each)

    def _meet(self, value: Any, label: str) -> None:
        """Keep what ``value`` holds, if it can be changed in place."""
        if isinstance(value, CONTAINERS):
            self._meet_container(cast(Any, value), label)
        elif (held := _vars(value)) is not None and id(held) not in self._held:
            self._keep(_Held(label, held, dict(held)))
            for name, each in list(held.items()):
                if name not in _OWN and isinstance(each, CONTAINERS):
                    self._meet(each, f"{label}.{name}".lstrip("."))
            if isinstance(value, nn.Module):
                self._meet_module(value, label)
            elif _can_be_watched(type(value)):
                self._patch(type(value))
            else:
                self._read_all(held)

    def _meet_container(self, value: Any, label: str) -> None:
        if id(value) in self._containers:
            return
        self._containers.add(id(value))
        if isinstance(value, dict):
            self._keep(_Held(label, cast(Any, value), dict(cast(Any, value)), entries=True))
        elif not isinstance(value, tuple | frozenset):
            self._lists.append((label, value, list(value)))
        if len(value) <= MANY:
            entries: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
            for name, each in entries:
                self._meet(each, f"{label}[{name!r}]")

    def _meet_module(self, module: nn.Module, label: str) -> None:
        self._keep(_Held(label, module._buffers, dict(module._buffers)))
        for held in (module._parameters, module._modules):
            self._keep(_Held(label, held, dict(held), fixed=True))
        for name, child in module.named_children():
            self._meet(child, f"{label}.{name}".lstrip("."))
        self._patch(nn.Module)

    def _read_all(self, attributes: dict[str, Any]) -> None:
        held = self._held[id(attributes)]
        for name, value in held.before.items():
            place = held.place(name)
            self._read.setdefault(place.identity, (place, value))
            self._meet(value, place.label)

    def _keep(self, held: _Held) -> None:
        self._held.setdefault(id(held.values), held)

    def _patch(self, kind: type) -> None:
        """From now on reading an attribute of such objects is noted."""
        if kind in self._classes:
            return
        original: Callable[[Any, str], Any] = cast(Any, kind).__getattribute__

        def get(owner: Any, name: str) -> Any:
            try:
                value = original(owner, name)
            except AttributeError:
                self._note(owner, name, MISSING)
                raise
            self._note(owner, name, value)
            return value

        self._classes[kind] = vars(kind).get("__getattribute__", MISSING)
        type.__setattr__(kind, "__getattribute__", get)

    def _note(self, owner: Any, name: str, value: Any) -> None:
        if name in _SILENT or name.startswith("__") or not works_for(self._thread):
            return
        attributes = object.__getattribute__(owner, "__dict__")
        if id(attributes) not in self._held:
            return  # of a class that is watched, but not reached
        held = self._held[id(attributes)]
        if held.before.get(name, MISSING) is not value or _is_part(owner, name):
            return  # set by the run itself, or of the class
        if value is MISSING or name in held.before:
            place = held.place(name)
            self._read.setdefault(place.identity, (place, value))
            self._seen(value)
            self._meet(value, place.label)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is read; afterwards everything is as it was before."""
        try:
            yield
        finally:
            for kind, original in self._classes.items():
                if original is MISSING:
                    type.__delattr__(kind, "__getattribute__")
                else:
                    type.__setattr__(kind, "__getattribute__", original)
            self._classes.clear()
            self._restore()

    def reads(self) -> Reads:
        """What the run needed of what was there before it."""
        return Reads(self._read.values())

    def places_of_tensors(self) -> Mapping[int, tuple[Place, int]]:
        """By its id, where a tensor was read: a place, and which tensor of what is there."""
        return {
            id(tensor): (place, at)
            for place, value in self._read.values()
            for at, tensor in enumerate(tensors_held(value))
        }

    def changes(self) -> list[tuple[Place, Any, Any]]:
        """Places whose values the run changed, with the old and the new ones.

        ``CaptureError`` TR-117 to TR-119 for what cannot be made again at every call.
        """
        self._dice.refuse()
        for label, value, before in self._lists:
            if _differ(value, before):
                raise _grows(label, type(value).__name__)
        found = [(p, old, p.get()) for p, old in self._variables if p.get() is not old]
        for held in self._held.values():
            changed = [each for each in held.changed() if each[0].name not in _OWN]
            if held.fixed and changed:
                raise _grows(changed[0][0].label, "part of a module")
            found += changed
        for place, old, new in found:
            if self._is_read(place) and _counts(old, new):
                raise _counted(place.label, old, new)
            if any(_hides_traced(leaf) for leaf in flatten(new)[0]):
                raise _grows(place.label, type(new).__name__)
        return [(p, old, new) for p, old, new in found if not _are_equal(old, new)]

    def _is_read(self, place: Place) -> bool:
        """Entries of a dict are read with it."""
        held = self._held.get(id(place.holder))
        return place.identity in self._read or (held is not None and held.entries)

    def _restore(self) -> None:
        self._dice.restore()
        for place, before in self._variables:
            if place.get() is not before:
                place.put(before)
        for held in self._held.values():
            for place, before, _ in held.changed():
                place.put(before)
        for _, value, before in self._lists:
            if _differ(value, before):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(before)


def refuse_new_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], given: Iterable[Any]) -> None:
    """TR-117 if the step puts a tensor into one of its arguments, of which it gets copies."""
    known = {id(each) for each in given}
    for leaf in flatten((args, kwargs))[0]:
        if isinstance(leaf, FakeTensor) and id(leaf) not in known:
            raise _grows("what it is given", "container or an object")


def _vars(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's; ``None`` for what is closed."""
    if isinstance(value, _CLOSED) or type(value) in PLAIN:
        return None
    kind = type(value)
    torch_s = kind.__module__.partition(".")[0] in ("torch", "treadle")
    if torch_s and not isinstance(value, nn.Module | LRScheduler):
        return None
    if not _can_be_watched(kind) and kind is not SimpleNamespace:
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:  # a class with slots
        return None


def _can_be_watched(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP and not kind.__flags__ & _IMMUTABLE)


def _is_part(owner: Any, name: str) -> bool:
    """Whether it is a parameter, buffer or module of a module: not one of its plain attributes."""
    if not isinstance(owner, nn.Module):
        return False
    held = object.__getattribute__(owner, "__dict__")
    return any(name in held[kind] for kind in ("_parameters", "_buffers", "_modules"))


def _differ(now: Iterable[Any], before: list[Any]) -> bool:
    found = list(now)
    return len(found) != len(before) or any(a is not b for a, b in zip(found, before, strict=True))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _counts(before: Any, now: Any) -> bool:
    return _is_number(before) and _is_number(now) and before != now


def _are_equal(old: Any, new: Any) -> bool:
    return type(new) in PLAIN and type(new) is type(old) and bool(new == old)


def _hides_traced(value: Any, depth: int = 0) -> bool:
    """Whether an object that is no container holds a tensor of the run, deep inside."""
    if isinstance(value, FakeTensor):
        return depth > 0
    if depth > 4:
        return False
    entries = value if isinstance(value, list | tuple | set | deque) else ()
    held = value if isinstance(value, dict) else _vars(value)
    if held is not None and not isinstance(value, nn.Module):
        entries = held.values()
    return any(_hides_traced(each, depth + 1) for each in entries)


def _grows(label: str, kind: str) -> CaptureError:
    return CaptureError(
        f"the step changes {label}, a {kind} outside of it: that would happen when the step is "
        "captured, and not at later calls",
        code="TR-117",
        remedy="return the value and keep it outside, or assign a new one",
    )


def _counted(label: str, before: Any, now: Any) -> CaptureError:
    return CaptureError(
        f"the step counts: it reads {label} and changes it from {before!r} to {now!r}; with "
        "another number at every call it would be compiled at every call",
        code="TR-118",
        remedy="count outside of the step, and pass the number as an argument or a tensor",
    )


__all__ = ["Outside", "refuse_new_tensors"]
