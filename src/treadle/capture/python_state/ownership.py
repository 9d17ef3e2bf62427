"""The owner of an object: the user, an installed package, Python's library, or the trace itself."""

import builtins
import functools
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType

from treadle.capture.integrations.registry import SHARED_OBJECTS, all_of
from treadle.capture.python_state.classes import class_module
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.introspect import is_heap
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.compat.fake import is_traced
from treadle.util.package import is_machinery_module

BUILTINS: dict[str, object] = builtins.__dict__  # type: ignore[assignment]
_REGISTRIES = tuple(shared.registry for shared in SHARED_OBJECTS)
"""Registries of shared objects, such as loggers. Objects that a step is the first to create there
stay, since others may have them."""
_UNSEEN = all_of(lambda integration: integration.unseen)
SHARED_KINDS = tuple(shared.kind for shared in SHARED_OBJECTS)
_LRU_CACHED = functools._lru_cache_wrapper  # of the module itself, reading is noted
LOADED = sys.modules
_BUILT_IN = frozenset(sys.builtin_module_names)
"""Functions of the standard library that are used while its modules are watched."""
_TRACING = all_of(lambda integration: integration.tracing_packages)


def owner_of(value: type | ModuleType) -> CodeOwner:
    """The owner of a module, or of a class by the module that made it."""
    if isinstance(value, ModuleType):
        return _owner_of_module(value)
    name = class_module(value)
    if name in ("builtins", "__main__") and is_heap(value):
        return CodeOwner.USER  # made by a text that was executed
    module = LOADED.get(name)
    return CodeOwner.USER if module is None else _owner_of_module(module)


def _owner_of_module(module: ModuleType) -> CodeOwner:
    known = ModuleType.__getattribute__(module, "__dict__")
    name, file = known.get("__name__", ""), known.get("__file__")
    if file is not None:
        return code_owner(file)
    builtin = name in _BUILT_IN or name.startswith(("torch", "_", "builtins"))
    return CodeOwner.STDLIB if builtin and name != "__main__" else CodeOwner.USER


def is_machinery_class(kind: type) -> bool:
    """Whether the tracing machinery made a class, so that its objects are not inspected."""
    if issubclass(kind, _UNSEEN):
        return not issubclass(kind, SHARED_KINDS)
    name = class_module(kind)
    if name.startswith("torch._C"):
        return False
    return is_machinery_module(name) or f"{name}.".startswith(_TRACING)


def is_machinery(value: object) -> bool:
    """Whether an object belongs to the tracing machinery, so that neither it nor its contents are
    inspected."""
    if is_stand_in(value) or is_traced(value) or isinstance(value, BuiltinFunctionType):
        return True
    if isinstance(value, FunctionType):
        return code_owner(value.__code__.co_filename) is CodeOwner.OURS
    if value is builtins or value is BUILTINS or value is LOADED:
        return True  # what of them is named is looked at by its name
    if isinstance(value, type):
        return is_machinery_class(value)
    if isinstance(value, _LRU_CACHED):
        wrapped = value.__wrapped__
        code = wrapped.__code__ if isinstance(wrapped, FunctionType) else None
        return code is None or code_owner(code.co_filename) < CodeOwner.INSTALLED
    return is_machinery_class(type(value))


def stays(value: object) -> bool:
    """Whether changes of a run there are kept: in modules that come with Python, and in the
    registries of shared objects."""
    if any(value is registry for registry in _REGISTRIES):
        return True
    return isinstance(value, ModuleType) and owner_of(value) is CodeOwner.STDLIB
