"""Which attributes of which objects matter for a step, and how far its reads are followed."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Set
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType

from torch.optim import Optimizer

from treadle.capture.integrations.registry import SHARED_OBJECTS, table_of
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.computed_parts import Computed
from treadle.capture.python_state.introspect import is_heap
from treadle.capture.python_state.parts import OfFunction, Part
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.python_state.reads.object_graph import (
    ClassNames,
    Location,
    Names,
    ObjectReads,
    Space,
    Without,
)

_CACHES = table_of(lambda integration: integration.caches)
_CONTAINERS = (OrderedDict, ContextVar, threading.local)
_LOADED = sys.modules
_CALLED = (type, FunctionType, ModuleType, *(shared.kind for shared in SHARED_OBJECTS))


def is_sealed(value: object) -> bool:
    """Whether it is a function of Python's or a library's without own state that could change."""
    if not isinstance(value, FunctionType) or value.__closure__:
        return False
    if code_owner(value.__code__.co_filename) is CodeOwner.USER:
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return all(map(is_plain, defaults))


@dataclass(frozen=True, slots=True)
class ReadNames:
    """Which attributes of which objects were read. ``of``: of one object, where that was watched;
    of others those that any code of the run mentions (``mentioned``; ``None``: all).
    ``whole_kinds``: classes of objects all of whose attributes were read. ``of_library``: those
    mentioned, for modules that come with Python and only their like used."""

    of: Callable[[object], ObjectReads]
    whole_kinds: Set[type]
    mentioned: frozenset[str] | None
    of_library: frozenset[str]
    ours: Callable[[object], bool]  # is it an object that the compiler itself looks after?
    owner: Callable[[type | ModuleType], CodeOwner]  # of a class or a module

    def of_part(self, value: object, part: Part, read: ObjectReads) -> Names | None:
        """The names of a part of ``value`` that count; ``None``: all."""
        if isinstance(value, type) and not isinstance(part, Computed):
            return ClassNames(None if read.whole else self.mentioned)
        if part.entries:
            return read.entries
        if not part.settable:
            return None
        if isinstance(part, OfFunction):
            return None
        if isinstance(value, CellType):
            return None
        if isinstance(value, Optimizer) and (read.whole or read.names is not None):
            return Without(None if read.whole else read.names, frozenset({"state"}))  # its inputs
        if read.whole:
            return None
        if read.names is not None:
            return read.names
        if isinstance(value, ModuleType) and self.owner(value) is CodeOwner.STDLIB:
            return self.of_library
        return self.mentioned

    def of_copy(self, kind: type, parts: frozenset[object]) -> Names:
        """Of an argument, of which the run had a copy: the names that count beside its parts."""
        return Without(None if kind in self.whole_kinds else self.mentioned, parts)

    def is_followed(self, value: object, read: ObjectReads) -> bool:
        """Whether the contents of an object are followed: not those of classes and modules of torch
        and the standard library."""
        if isinstance(value, type | ModuleType):
            known = read.names is not None  # what was read of it is followed
            return known or self.owner(value) >= CodeOwner.INSTALLED
        return True

    def is_state(self, place: Location, value: object) -> bool:
        """Whether a variable of the library's holds what others may have put there: their objects
        and functions, the environment, hooks of all modules, the library's own modules. Dicts and
        lists of torch's do not count: those that users set are switches or ordered, the others are
        memories."""
        if type(value) in _CONTAINERS or self._is_theirs(value):
            return True
        module = place.node.value if isinstance(place.node.value, ModuleType) else None
        if isinstance(place.node.value, Space):
            module = _LOADED.get(vars(place.node.value).get("__name__", ""))
        if module is None or self.owner(module) is not CodeOwner.STDLIB:
            return False
        if isinstance(value, ModuleType):
            return self.owner(value) is CodeOwner.STDLIB
        return not isinstance(value, _CALLED)

    def _is_theirs(self, value: object) -> bool:
        """Whether the user or installed packages made it, or its class."""
        if isinstance(value, FunctionType):
            return code_owner(value.__code__.co_filename) >= CodeOwner.INSTALLED
        kind = value if isinstance(value, type) else type(value)
        return is_heap(kind) and self.owner(kind) >= CodeOwner.INSTALLED


def is_memory(place: Location) -> bool:
    """Whether a variable or an attribute decides nothing: the known caches of libraries. An unknown
    one costs a variant, which is reported."""
    owner = place.node.value
    if not isinstance(owner, type | ModuleType | Space):
        return False
    module = vars(owner).get("__module__" if isinstance(owner, type) else "__name__")
    return type(module) is str and place.name in _CACHES.get(module, ())
