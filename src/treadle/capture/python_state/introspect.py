"""The parts of a Python object, read past anything that its class may override.

All questions about the contents of objects are answered here: the changes of a run are differences
between two readings of parts, and what a later call must find unchanged is a reading of parts.
Classes are imported by name, because each read of an attribute of a module that a step uses is
noted.
"""

import copyreg
import gc
import itertools
import struct
from abc import ABCMeta
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from functools import _lru_cache_wrapper as _LruCached
from functools import lru_cache, partial
from threading import local
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, cast
from weakref import ReferenceType

from torch import Generator, Tag, Tensor, finfo, iinfo

from treadle.capture.integrations.registry import SHARED_GENERATORS, all_of, table_of
from treadle.capture.python_state.computed_parts import (
    Computed,
    ContextVariable,
    Items,
    Referent,
    Registered,
)
from treadle.capture.python_state.container_parts import Entries, Members, Sequenced
from treadle.capture.python_state.parts import (
    Accessors,
    Attributes,
    ClassAttributes,
    FixedAttributes,
    OfFunction,
    OwnAttributes,
    Part,
    Reading,
    Slots,
    Variable,
)
from treadle.capture.python_state.plain_values import is_plain, plain_fact
from treadle.capture.python_state.remembered import RememberedResults
from treadle.capture.python_state.virtual_subclasses import VirtualSubclasses

ARRAYS = table_of(lambda integration: integration.arrays)
"""By class of an array of a library's, the part that its numbers are."""
_NUMBERS = (bool, int, float, complex, str, bytes)
_MUTABLE_BYTES = (bytearray, memoryview, array, *ARRAYS)
_SEALED = (
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
    ClassMethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    CodeType,
    FrameType,
    TracebackType,
    GenericAlias,
    UnionType,
    *all_of(lambda integration: integration.sealed),
)
"""Classes whose objects hold nothing that Python code could set."""


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """An object that only itself is equal to."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The parts of an object. ``opaque``: nothing is known about its contents."""

    parts: tuple[Part, ...] = ()
    opaque: bool = False


def parts_of(value: object, label: str) -> ObjectLayout:
    """The parts of any object but a plain value. Tensors have attributes; their numbers are
    inputs."""
    match value:
        case Tensor():
            return ObjectLayout((Attributes(label, vars(value)),))
        case FunctionType():
            return ObjectLayout((OfFunction(label, value), OwnAttributes(label, value)))
        case CellType():
            return ObjectLayout((Variable(label, value),))
        case MethodType():
            return ObjectLayout(
                (FixedAttributes(label, {"self": value.__self__, "func": value.__func__}),)
            )
        case partial():
            held: Reading = {"func": value.func, "args": value.args, "keywords": value.keywords}
            return ObjectLayout((FixedAttributes(label, held), Attributes(label, value.__dict__)))
        case _LruCached():
            wrapped = FixedAttributes(label, {"func": value.__wrapped__})
            return ObjectLayout((wrapped, Computed(label, partial(RememberedResults, value))))
        case ModuleType():
            return ObjectLayout((Attributes(label, value.__dict__),))
        case type():
            parts: tuple[Part, ...] = (ClassAttributes(label, value),)
            if isinstance(value, ABCMeta) and is_heap(value):
                parts += (Registered(label, partial(VirtualSubclasses, value)),)
            return ObjectLayout(parts)
        case property():
            return ObjectLayout((Accessors(label, value),))
        case staticmethod() | classmethod():
            return ObjectLayout((FixedAttributes(label, {"func": value.__func__}),))
        case MappingProxyType():
            return ObjectLayout((Items(label, lambda: dict(value)),))
        case KeysView() | ValuesView() | ItemsView() if not is_heap(type(value)):
            view = cast("Iterable[object]", value)
            return ObjectLayout((Items(label, lambda: dict(enumerate(view))),))
        case ReferenceType():
            return ObjectLayout((Referent(label, value),))
        case ContextVar():
            return ObjectLayout((ContextVariable(label, value),))
        case GeneratorType():
            return ObjectLayout((Computed(label, partial(_advanced, value)),), opaque=True)
        case _ if any(value is shared.generator for shared in SHARED_GENERATORS):
            return ObjectLayout()  # likewise
        case Generator():
            return ObjectLayout()  # its state is that of a generator: read and restored as such
        case Tag() | finfo() | iinfo():
            return ObjectLayout()
        case _ if isinstance(value, _SEALED):
            return ObjectLayout()
        case _:
            return _of_object(value, label)


def _advanced(generator: "GeneratorType[object, object, object]") -> int | None:
    """The progress of an iterator."""
    frame = generator.gi_frame
    return None if frame is None else frame.f_lasti


def _of_object(value: object, label: str) -> ObjectLayout:
    """Contents, attributes and slots."""
    parts: list[Part] = []
    match value:
        case dict():
            parts.append(Entries(label, value))
        case list() | tuple() | deque():
            parts.append(Sequenced(label, value))
        case set() | frozenset():
            parts.append(Members(label, value))
        case _ if isinstance(value, _MUTABLE_BYTES) or has_buffer(value):
            parts.append(_of_array(value, label))
        case _ if isinstance(value, _NUMBERS):
            parts.append(FixedAttributes(label, {"value": _base(value)}))
        case _:
            pass
    if type(value) is OrderedDict:
        parts.append(OwnAttributes(label, value))
    elif (attributes := attributes_of(value)) is not None:
        parts.append(Attributes(label, attributes))
    members = slots_of(type(value))
    if members:
        parts.append(Slots(label, value, members))
    base = _made_in_c(type(value))
    if base in _OPEN or issubclass(base, (BaseException, *ARRAYS)) or has_buffer(value):
        return ObjectLayout(tuple(parts))
    if _reduced(value) is None:
        return ObjectLayout(tuple(parts), opaque=True)
    parts.append(Computed(label, partial(_reduced, value)))
    parts.append(Items(label, partial(_referents, value)))
    return ObjectLayout(tuple(parts))


_OPEN = frozenset(
    {
        object, dict, list, tuple, deque, set, frozenset, OrderedDict, defaultdict, bytearray,
        memoryview, SimpleNamespace, local, array, *_NUMBERS,
    }
)  # fmt: skip
"""C classes whose objects are described completely by their parts."""


@lru_cache(maxsize=1 << 12)
def _made_in_c(kind: type) -> type:
    """The nearest class of its bases that no Python code made: it may hold what cannot be seen."""
    return next(base for base in kind.__mro__ if base in _OPEN or not _made_in_python(base))


def _made_in_python(kind: type) -> bool:
    """Whether its slots, ``__dict__`` and weak references are all that instances add to those of
    the base."""
    if not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE or kind.__base__ is None:
        return False
    own = vars(kind)
    places = sum(isinstance(attribute, MemberDescriptorType) for attribute in own.values())
    known = places * ("__slots__" in own) + ("__dict__" in own) + ("__weakref__" in own)
    return kind.__basicsize__ - kind.__base__.__basicsize__ <= _POINTER * known


def is_heap(kind: type) -> bool:
    """Made by Python code, and open."""
    return bool(kind.__flags__ & _HEAP and not kind.__flags__ & _IMMUTABLE)


_POINTER = struct.calcsize("P")
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of a type: made by Python code; sealed


def attributes_of(value: object) -> dict[str, object] | None:
    """``vars(value)``, whatever its class overrides; ``None`` if there is none."""
    own: Any = local if isinstance(value, local) else object
    try:
        namespace: object = own.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return namespace if isinstance(namespace, dict) else None


@lru_cache(maxsize=1 << 12)
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a class and its bases, by name."""
    slots: dict[str, MemberDescriptorType] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, MemberDescriptorType) and "__slots__" in vars(base):
                slots[name] = value
    return slots


def _of_array(value: object, label: str) -> Part:
    """The numbers of an array, the bytes of a buffer."""
    for kind, part_of in ARRAYS.items():
        if isinstance(value, kind):
            return part_of(value, label)
    if isinstance(value, bytearray):
        return _of_bytes(value, label)
    if isinstance(value, array):
        return Computed(label, value.tobytes)
    return _of_buffer(value, label)


def _of_bytes(value: bytearray, label: str) -> Part:
    def put(kept: bytes) -> None:
        value[:] = kept

    return Computed(label, lambda: bytes(value), put)


def _of_buffer(value: Any, label: str) -> Part:
    def fill(kept: bytes) -> None:
        memoryview(value).cast("B")[:] = kept

    return Computed(label, lambda: memoryview(value).tobytes(), fill)


def has_buffer(value: Any) -> bool:
    """Whether its memory can be read: that of ``ctypes`` arrays and mapped files."""
    try:
        memoryview(value).release()
    except (TypeError, BufferError):
        return False
    return not isinstance(value, _NUMBERS)


def _base(value: object) -> str:
    """The number or string of an object of a subclass."""
    kind: Any = next(base for base in _NUMBERS if isinstance(value, base))
    return kind.__repr__(value)


def _referents(value: object) -> Reading:
    """The objects that an object made in C refers to."""
    referents = (referent for referent in gc.get_referents(value) if not isinstance(referent, type))
    return dict(enumerate(referents))


_ITERATED = (list, tuple, dict, set, str, bytes, range)


def _reduced(value: object) -> object:
    """Its pickled form, as values that can be compared; ``None`` if it cannot be pickled.

    Only for classes made in C: no code of the user's runs.
    """
    if _made_in_python(type(value)):
        return None
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced: object = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    return _frozen(reduced, 0)


def _frozen(value: object, depth: int) -> object:
    if is_plain(value):
        return plain_fact(value)
    if isinstance(value, list | tuple) and depth < 8:
        items = itertools.islice(value, 1 << 12)
        return type(value), tuple(_frozen(item, depth + 1) for item in items)
    if type(value) is dict and depth < 8:
        pairs = value.items()
        return dict, tuple((_frozen(k, depth + 1), _frozen(v, depth + 1)) for k, v in pairs)
    if isinstance(value, type | BuiltinFunctionType):
        return value
    if not is_heap(type(value)) and depth < 8 and not callable(value):
        reduced = _reduced(value)
        return Identity(value) if reduced is None else reduced
    return Identity(value)
