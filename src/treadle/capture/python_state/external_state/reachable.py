"""Saves what a step can reach before code runs that may change it.

Everything reachable from the step's function, models, optimizers and arguments is visited at once,
except values under names that no code has mentioned yet, and attributes that nothing has read yet.
"""

from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import final

import torch
from torch import Tensor

from treadle.capture.python_state.attribute_watch import AttributeWatch
from treadle.capture.python_state.changes import Kept
from treadle.capture.python_state.code.code_references import references_in
from treadle.capture.python_state.code.frames import CodeOwner, ExecutionRecord, code_owner
from treadle.capture.python_state.code.reflection import Reflection
from treadle.capture.python_state.external_state.kept_state import KeptState
from treadle.capture.python_state.introspect import is_heap, parts_of
from treadle.capture.python_state.ownership import BUILTINS, LOADED, is_machinery, owner_of
from treadle.capture.python_state.parts import MISSING, OF_DECLARATION, Attributes, Part
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.python_state.reads.read_names import is_sealed
from treadle.capture.tensors.rng_guard import PythonRngGuard


@final
class ReachableObjects:
    """Meets objects, and learns from ``watch`` and ``reflection`` which of their attributes
    count."""

    def __init__(
        self,
        executed: ExecutionRecord,
        kept: KeptState,
        rng: PythonRngGuard,
        hears: Callable[[object], None],
        is_importing: Callable[[FrameType], bool],
    ) -> None:
        """``hears`` is called with each generator before a draw from it is possible."""
        self._executed, self._kept, self._rng, self._hears = executed, kept, rng, hears
        self.watch = AttributeWatch(kept.parts, self.meet, self._hears_name, is_importing)
        self.reflection = Reflection(executed, self.watch, self, is_importing)
        self._waiting: dict[object, list[tuple[Part, object]]] = {}
        self._known_names: set[object] = set()
        self._past = False  # whether attributes are read past what is watched
        self._past_names: set[str] = set()  # likewise, under these names

    def enters(self, frame: FrameType) -> None:
        """Called when code of the user's or of installed packages begins."""
        code, space = frame.f_code, frame.f_globals
        references = references_in(code)
        self.learn_names()
        known = self._kept.variables.setdefault(id(space), {})
        used = (references.reads | references.assigns) - frozenset(code.co_freevars)
        new = used - known.keys()
        self.meet_variables(space, new)
        if (
            any(known[name] is type for name in new)
            and code_owner(code.co_filename) is CodeOwner.USER
        ):
            self._executed.asks_types = True  # by another name
        for name in references.modules & LOADED.keys():
            self.meet(LOADED[name], name)

    def meet_variables(self, space: dict[str, object], names: Iterable[str]) -> None:
        """Called when globals are read."""
        known = self._kept.variables.setdefault(id(space), {})
        for name in names:
            if name not in known:
                known[name] = space.get(name, MISSING)
                self.meet(BUILTINS.get(name) if known[name] is MISSING else known[name], name)

    def _hears_name(self, name: str) -> None:
        if name not in self._executed.names:
            self._executed.names.add(name)
            self.learn_names()

    def meet_attributes(self, owner: object) -> None:
        """Called when all attributes of an object are read."""
        for kept in self._kept.attributes_of(id(owner)):
            for name, value in kept.before.items():
                self.meet(value, kept.part.where(name))

    def learn_names(self) -> None:
        """Meet values under names that code mentions now for the first time."""
        executed = self._executed
        new = set(self._waiting) if executed.any_name else executed.names - self._known_names
        self._known_names |= new
        for name in new & self._waiting.keys():
            for part, value in self._waiting.pop(name, ()):
                self.meet(value, part.where(name))
        for name in executed.past_names - self._past_names:
            self._past_names.add(name)
            for kept in [kept for key in self.watch.read for kept in self._kept.attributes_of(key)]:
                if name in kept.before:
                    self.meet(kept.before[name], kept.part.where(name))
        if executed.past and not self._past:
            self._past = True
            for kept in [kept for key in self.watch.read for kept in self._kept.attributes_of(key)]:
                for name, value in kept.before.items():
                    self.meet(value, kept.part.where(name))

    def meet(self, value: object, label: str) -> None:
        """Save the contents of ``value``, and of everything reachable from it, before anything
        changes them."""
        left = [(value, label)]
        while left:
            current, name = left.pop()
            if is_plain(current) or id(current) in self._kept.objects or is_machinery(current):
                continue
            self._kept.objects[id(current)] = current
            left += self._open(current, name)

    def _open(self, value: object, label: str) -> list[tuple[object, str]]:
        inside: list[tuple[object, str]] = []
        if isinstance(value, type | ModuleType) and owner_of(value) < (
            CodeOwner.INSTALLED if isinstance(value, type) else CodeOwner.STDLIB
        ):
            return inside  # what a step sets there is not looked after
        if is_sealed(value):
            return inside
        self._rng.meet(value, label)
        self.reflection.meets(value)
        if isinstance(value, torch.Generator):
            self._hears(value)
        watched = not isinstance(value, Tensor) and self.watch.watch(value)
        whole = id(value) in self._executed.whole
        for at, part in enumerate(parts_of(value, label).parts):
            before = part.now()
            self._kept.parts[id(value), at] = Kept(value, at, part, before)
            named = isinstance(part, Attributes) or isinstance(value, type)
            if named and watched and not self._past and not isinstance(value, type):
                read = self.watch.of_object(value) | self._past_names
                inside += [(before[name], part.where(name)) for name in read & before.keys()]
                continue  # met when it is read
            for name, held in before.items():
                if part.entries and not is_plain(name):
                    inside.append((name, part.where(name)))
                if is_plain(held) or id(held) in self._kept.objects:
                    continue
                if not named or whole or self._is_named(name):
                    inside.append((held, part.where(name)))
                else:
                    self._waiting.setdefault(name, []).append((part, held))
        if not isinstance(value, Tensor) and is_heap(type(value)):
            inside.append((type(value), type(value).__qualname__))  # of a class its metaclass
        if isinstance(value, type):
            inside += [(base, base.__qualname__) for base in value.__mro__[1:-1]]
        return inside

    def _is_named(self, name: object) -> bool:
        if self._executed.any_name or name in self._known_names:
            return True
        special = isinstance(name, str) and name.startswith("__") and name.endswith("__")
        return special and name not in OF_DECLARATION
