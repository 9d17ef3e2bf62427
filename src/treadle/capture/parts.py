"""What a Python object is made of: the namespaces and containers in which it keeps its values.

Everything that asks what an object holds asks here: what a run may have changed is a difference
between two readings of parts, what a later call must find unchanged is a reading of parts.
"""

import abc
import array
import contextvars
import copyreg
import functools
import gc
import itertools
import operator
import struct
import threading
import types
import weakref
from _abc import _get_dump as get_dump  # pyright: ignore
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from treadle.util.memory_words import has_space

MISSING: Any = object()
"""In the place of a value that is not there."""

PLAIN = frozenset(
    {
        bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range,
        torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
    }
)  # fmt: skip
"""Types whose values are what they are."""
_NUMBERS = (bool, int, float, complex, str, bytes)
_MUTABLE_BYTES = (bytearray, np.ndarray, memoryview, array.array)
_SEALED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    types.GenericAlias,
    types.UnionType,
    np.ufunc,
    np.dtype,
)
"""What holds nothing that Python code could set."""


def is_plain(value: Any) -> bool:
    """A value that says everything about itself, and cannot be changed."""
    kind = cast(type[Any], type(value))
    return kind in PLAIN or issubclass(kind, np.generic | slice)


def plain_fact(value: Any) -> Any:
    """Equal for plain values that are the same: ``1`` is not ``True``, ``0.0`` is not ``-0.0``."""
    kind = cast(type[Any], type(value))
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if kind in (float, complex):
        return kind, repr(value)
    if kind is slice:
        return kind, repr(value)
    return kind, value


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two plain values are the same."""
    return is_plain(one) and is_plain(other) and plain_fact(one) == plain_fact(other)


OF_DECLARATION = frozenset(
    {
        "__abstractmethods__", "__annotations__", "__annotate__", "__builtins__", "__cached__",
        "__dataclass_fields__", "__dataclass_params__", "__loader__", "__match_args__",
        "__orig_bases__", "__slotnames__", "__parameters__", "__spec__", "__static_attributes__",
    }
)  # fmt: skip
"""What Python notes about a class or a module when it is made, and reads by name alone."""


class Part:
    """One namespace or container of an object. Subclasses say how to list and how to set."""

    __slots__ = ("label",)
    entries = False  # whether its values are entries of a container, and not attributes
    settable = True  # whether a single value can be put in its place

    def __init__(self, label: str) -> None:
        self.label = label

    def now(self) -> dict[Any, Any]:
        """What it holds, in order."""
        raise NotImplementedError

    def get(self, name: Any) -> Any:
        """One value, or ``MISSING``."""
        return self.now().get(name, MISSING)

    def put(self, name: Any, value: Any) -> None:
        """From now on ``value`` is there; ``MISSING`` for nothing."""
        raise NotImplementedError

    def is_same(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        """Whether two readings found the very same objects under the same names, in one order."""
        if len(one) != len(other) or not all(map(operator.is_, one.values(), other.values())):
            return False
        pairs = zip(one, other, strict=True)
        return all(a is b or is_same_value(a, b) for a, b in pairs)

    def restore(self, before: dict[Any, Any]) -> None:
        """Hold again what a reading says, in its order."""
        now = self.now()
        for name in now.keys() - before.keys():
            self.put(name, MISSING)
        for name, value in before.items():
            if now.get(name, MISSING) is not value:
                self.put(name, value)

    def dictionary(self) -> dict[Any, Any] | None:
        """The dict behind it, for its version; ``None`` if there is none."""
        return None

    def where(self, name: Any) -> str:
        """The user's words for one of its values."""
        if self.entries:
            key = repr(name) if isinstance(name, str | int | float | bytes | tuple) else "..."
            return f"{self.label}[{key}]"
        return f"{self.label}.{name}".lstrip(".")


class Attributes(Part):
    """``vars`` of an object or a module."""

    __slots__ = ("values",)

    def __init__(self, label: str, values: dict[str, Any]) -> None:
        super().__init__(label)
        self.values = values

    def now(self) -> dict[Any, Any]:
        return dict(self.values)

    def get(self, name: Any) -> Any:
        return self.values.get(name, MISSING)

    def put(self, name: Any, value: Any) -> None:
        if value is MISSING:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def dictionary(self) -> dict[Any, Any] | None:
        return self.values


@final
class OwnAttributes(Attributes):
    """Likewise, where Python makes the ``__dict__`` when somebody asks for it: of functions and
    ordered dicts. Nobody asks here; thousands of empty dicts would lie scattered in memory, and
    every call would look at them."""

    __slots__ = ("owner",)

    def __init__(self, label: str, owner: Any) -> None:
        Part.__init__(self, label)
        self.owner = owner

    @property
    def values(self) -> dict[str, Any]:  # type: ignore[override]
        """What is there now."""
        return self.owner.__dict__ if has_space(self.owner) else {}

    def put(self, name: Any, value: Any) -> None:
        if value is MISSING:
            self.values.pop(name, None)
        else:
            self.owner.__dict__[name] = value

    def dictionary(self) -> dict[Any, Any] | None:
        return None


@final
class Entries(Part):
    """Those of a dict, also of one with a class of its own."""

    __slots__ = ("_kind", "values")
    entries = True

    def __init__(self, label: str, values: dict[Any, Any]) -> None:
        super().__init__(label)
        self.values = values
        self._kind: Any = OrderedDict if isinstance(values, OrderedDict) else dict
        """Whose methods are used: an ``OrderedDict`` holds an order beside that of the dict."""

    def now(self) -> dict[Any, Any]:
        kind = self._kind
        return dict(zip(kind.keys(self.values), kind.values(self.values), strict=True))

    def get(self, name: Any) -> Any:
        return dict.get(self.values, name, MISSING)

    def put(self, name: Any, value: Any) -> None:
        if value is not MISSING:
            self._kind.__setitem__(self.values, name, value)
        elif dict.__contains__(self.values, name):
            self._kind.__delitem__(self.values, name)

    def restore(self, before: dict[Any, Any]) -> None:
        now = self.now()
        if list(now) != list(before):
            self._kind.clear(self.values)
            for name, value in before.items():
                self._kind.__setitem__(self.values, name, value)
            return
        super().restore(before)

    def dictionary(self) -> dict[Any, Any] | None:
        """None where entries may change places, which the dict's version does not count."""
        moves = self._kind is OrderedDict and len(self.values) > 1
        return None if moves else self.values


@final
class Sequenced(Part):
    """Entries of a list or deque; those of a tuple, which stay."""

    __slots__ = ("values",)
    entries = True

    def __init__(self, label: str, values: Any) -> None:
        super().__init__(label)
        self.values = values

    @property
    def settable(self) -> bool:  # type: ignore[override]
        return not isinstance(self.values, tuple)

    def now(self) -> dict[Any, Any]:
        kind: Any = next(k for k in (list, tuple, deque) if isinstance(self.values, k))
        return dict(enumerate(kind.__iter__(self.values)))

    def put(self, name: Any, value: Any) -> None:
        self.values[name] = value

    def restore(self, before: dict[Any, Any]) -> None:
        if not self.settable or list(map(id, before.values())) == list(
            map(id, self.now().values())
        ):
            return
        self.values.clear()
        self.values.extend(before.values())


@final
class Members(Part):
    """Those of a set, by what they are."""

    __slots__ = ("values",)
    entries = True
    settable = False

    def __init__(self, label: str, values: Any) -> None:
        super().__init__(label)
        self.values = values

    def now(self) -> dict[Any, Any]:
        return (
            {_member(each): each for each in set.__iter__(self.values)}
            if isinstance(self.values, set)
            else {_member(each): each for each in frozenset.__iter__(self.values)}
        )

    def is_same(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        return one.keys() == other.keys()

    def restore(self, before: dict[Any, Any]) -> None:
        if isinstance(self.values, set) and self.now().keys() != before.keys():
            self.values.clear()
            self.values.update(before.values())


def _member(value: Any) -> Any:
    return plain_fact(value) if is_plain(value) else (None, id(value))


@final
class Variable(Part):
    """What a cell of a closure holds."""

    __slots__ = ("cell",)

    def __init__(self, label: str, cell: types.CellType) -> None:
        super().__init__(label)
        self.cell = cell

    def now(self) -> dict[Any, Any]:
        try:
            return {"": self.cell.cell_contents}
        except ValueError:  # a variable that is not assigned yet
            return {}

    def put(self, name: Any, value: Any) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value

    def where(self, name: Any) -> str:
        return self.label


@final
class Slots(Part):
    """Values in ``__slots__``, of classes made by Python code and of some made in C."""

    __slots__ = ("members", "owner")

    def __init__(self, label: str, owner: Any, members: dict[str, Any]) -> None:
        super().__init__(label)
        self.owner = owner
        self.members = members

    def now(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for name, member in self.members.items():
            try:
                found[name] = member.__get__(self.owner)
            except (AttributeError, TypeError):  # empty; or the object has got another class
                continue
        return found

    def put(self, name: Any, value: Any) -> None:
        if value is MISSING:
            self.members[name].__delete__(self.owner)
        else:
            self.members[name].__set__(self.owner, value)


@final
class OfClass(Part):
    """Attributes of a class itself."""

    __slots__ = ("_values", "kind")

    def __init__(self, label: str, kind: type) -> None:
        super().__init__(label)
        self.kind = kind
        (self._values,) = gc.get_referents(type.__dict__["__dict__"].__get__(kind))

    def now(self) -> dict[Any, Any]:
        return dict(self._values)

    def get(self, name: Any) -> Any:
        return self._values.get(name, MISSING)

    def put(self, name: Any, value: Any) -> None:
        if value is MISSING:
            type.__delattr__(self.kind, name)
        else:
            type.__setattr__(self.kind, name, value)

    def dictionary(self) -> dict[Any, Any] | None:
        return self._values


@final
class OfFunction(Part):
    """Code, defaults and the variables of its closure."""

    __slots__ = ("function",)
    _NAMES = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, label: str, function: types.FunctionType) -> None:
        super().__init__(label)
        self.function = function

    def now(self) -> dict[Any, Any]:
        f = self.function
        found: dict[Any, Any] = {
            "__code__": f.__code__,
            "__defaults__": f.__defaults__,
            "__kwdefaults__": f.__kwdefaults__,
        }
        free = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        return found | {f"<{name}>": cell for name, cell in free}

    def put(self, name: Any, value: Any) -> None:
        if name in self._NAMES:
            setattr(self.function, name, None if value is MISSING else value)

    def where(self, name: Any) -> str:
        if name.startswith("<"):
            return name[1:-1]
        return super().where(name)


@final
class Fixed(Part):
    """Parts that stay for the life of the object: what a bound method is bound to, say."""

    __slots__ = ("values",)
    settable = False

    def __init__(self, label: str, values: dict[Any, Any]) -> None:
        super().__init__(label)
        self.values = values

    def now(self) -> dict[Any, Any]:
        return self.values

    def where(self, name: Any) -> str:
        return self.label or ("self" if name == "self" else "")

    def restore(self, before: dict[Any, Any]) -> None:
        return


@final
class Accessors(Part):
    """What a property calls; another call of its ``__init__`` sets it."""

    __slots__ = ("owner",)
    settable = False

    def __init__(self, label: str, owner: property) -> None:
        super().__init__(label)
        self.owner = owner

    def now(self) -> dict[Any, Any]:
        return {"get": self.owner.fget, "set": self.owner.fset, "delete": self.owner.fdel}

    def where(self, name: Any) -> str:
        return self.label

    def restore(self, before: dict[Any, Any]) -> None:
        return


class Computed(Part):
    """Contents that can be compared and not listed: of arrays, and of objects that can be
    pickled."""

    __slots__ = ("_back", "_read")
    settable = False

    def __init__(
        self, label: str, read: Callable[[], Any], back: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(label)
        self._read = read
        self._back = back

    def now(self) -> dict[Any, Any]:
        return {"": self._read()}

    def is_same(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        return bool(one[""] == other[""])

    def where(self, name: Any) -> str:
        return self.label

    def restore(self, before: dict[Any, Any]) -> None:
        if self._back is not None and self._read() != before[""]:
            self._back(before[""])


@final
class Registered(Computed):
    """The virtual subclasses of an abstract class. They change with a token of the process."""

    __slots__ = ()


@final
class Got(Part):
    """One object that is got by a call of C code: what a weak reference refers to."""

    __slots__ = ("_read",)
    settable = False

    def __init__(self, label: str, read: Callable[[], Any]) -> None:
        super().__init__(label)
        self._read = read

    def now(self) -> dict[Any, Any]:
        return {"": self._read()}

    def where(self, name: Any) -> str:
        return self.label

    def restore(self, before: dict[Any, Any]) -> None:
        return


@final
class InContext(Part):
    """What a context variable holds, or its default."""

    __slots__ = ("variable",)
    settable = False

    def __init__(self, label: str, variable: contextvars.ContextVar[Any]) -> None:
        super().__init__(label)
        self.variable = variable

    def now(self) -> dict[Any, Any]:
        try:
            return {"": self.variable.get()}
        except LookupError:
            return {"": MISSING}

    def where(self, name: Any) -> str:
        return self.label

    def restore(self, before: dict[Any, Any]) -> None:
        if before[""] is not MISSING and self.now()[""] is not before[""]:
            self.variable.set(before[""])


@final
class Listed(Part):
    """Objects in an array, or in what C code made."""

    __slots__ = ("_read",)
    settable = False
    entries = True

    def __init__(self, label: str, read: Callable[[], dict[Any, Any]]) -> None:
        super().__init__(label)
        self._read = read

    def now(self) -> dict[Any, Any]:
        return self._read()

    def restore(self, before: dict[Any, Any]) -> None:
        return


@dataclass(frozen=True, slots=True)
class Made:
    """An object taken apart. ``opaque``: nothing can be said of what it holds."""

    parts: tuple[Part, ...] = ()
    opaque: bool = False


def parts_of(value: Any, label: str) -> Made:
    """The parts of any object but a plain value. Tensors have attributes; their numbers are
    inputs."""
    match value:
        case Tensor():
            return Made((Attributes(label, cast(Any, value).__dict__),))
        case types.FunctionType():
            return Made((OfFunction(label, value), OwnAttributes(label, value)))
        case types.CellType():
            return Made((Variable(label, value),))
        case types.MethodType():
            return Made((Fixed(label, {"self": value.__self__, "func": value.__func__}),))
        case functools.partial():
            held = {"func": value.func, "args": value.args, "keywords": value.keywords}
            return Made((Fixed(label, held), Attributes(label, value.__dict__)))
        case functools._lru_cache_wrapper():
            wrapped = Fixed(label, {"func": value.__wrapped__})
            return Made((wrapped, Computed(label, lambda: value.cache_info()[1:])))
        case types.ModuleType():
            return Made((Attributes(label, cast(Any, value).__dict__),))
        case type():
            found: tuple[Part, ...] = (OfClass(label, value),)
            if isinstance(value, abc.ABCMeta) and is_heap(value):
                found += (Registered(label, functools.partial(_registered, value)),)
            return Made(found)
        case property():
            return Made((Accessors(label, value),))
        case staticmethod() | classmethod():
            return Made((Fixed(label, {"func": value.__func__}),))
        case types.MappingProxyType():
            return Made((Listed(label, lambda: dict(cast(Any, value))),))
        case KeysView() | ValuesView() | ItemsView() if not is_heap(type(value)):
            held = cast("Iterable[Any]", value)
            return Made((Listed(label, lambda: dict(enumerate(held))),))
        case weakref.ReferenceType():
            return Made((Got(label, cast(Any, value)),))
        case contextvars.ContextVar():
            return Made((InContext(label, value),))
        case types.GeneratorType():
            return Made((Computed(label, functools.partial(_advanced, value)),), opaque=True)
        case torch.Generator():
            return Made()  # its state is that of a generator: read and restored as such
        case torch.Tag() | torch.finfo() | torch.iinfo():
            return Made()
        case _ if isinstance(value, _SEALED):
            return Made()
        case _:
            return _of_object(value, label)


def _advanced(generator: Any) -> Any:
    """How far it is."""
    frame = generator.gi_frame
    return None if frame is None else frame.f_lasti


def _registered(kind: Any) -> Any:
    """The virtual subclasses of an abstract class."""
    return frozenset(id(each()) for each in get_dump(kind)[0])


def _of_object(value: Any, label: str) -> Made:
    """Contents, attributes and slots."""
    found: list[Part] = []
    match value:
        case dict():
            found.append(Entries(label, cast(Any, value)))
        case list() | tuple() | deque():
            found.append(Sequenced(label, value))
        case set() | frozenset():
            found.append(Members(label, value))
        case _ if isinstance(value, _MUTABLE_BYTES) or has_buffer(value):
            found.append(_of_array(value, label))
        case _ if isinstance(value, _NUMBERS):
            found.append(Fixed(label, {"value": _base(value)}))
        case _:
            pass
    if type(value) is OrderedDict:
        found.append(OwnAttributes(label, value))
    elif (attributes := attributes_of(value)) is not None:
        found.append(Attributes(label, attributes))
    members = slots_of(type(value))
    if members:
        found.append(Slots(label, value, members))
    base = _made_in_c(type(value))
    if base in _OPEN or issubclass(base, np.ndarray | BaseException) or has_buffer(value):
        return Made(tuple(found))
    if _reduced(value) is None:
        return Made(tuple(found), opaque=True)
    found.append(Computed(label, functools.partial(_reduced, value)))
    found.append(Listed(label, functools.partial(_referents, value)))
    return Made(tuple(found))


_OPEN = frozenset(
    {
        object, dict, list, tuple, deque, set, frozenset, OrderedDict, defaultdict, bytearray,
        memoryview, types.SimpleNamespace, threading.local, array.array, *_NUMBERS,
    }
)  # fmt: skip
"""Classes made in C of which the parts say all."""


@functools.lru_cache(maxsize=1 << 12)
def _made_in_c(kind: type) -> type:
    """The nearest class of its bases that no Python code made: it may hold what cannot be seen."""
    return next(each for each in kind.__mro__ if each in _OPEN or not _made_in_python(each))


def _made_in_python(kind: type) -> bool:
    """Whether its slots, ``__dict__`` and weak references are all that instances add to those of
    the base."""
    if not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE or kind.__base__ is None:
        return False
    own = vars(kind)
    places = sum(isinstance(each, types.MemberDescriptorType) for each in own.values())
    known = places * ("__slots__" in own) + ("__dict__" in own) + ("__weakref__" in own)
    return kind.__basicsize__ - kind.__base__.__basicsize__ <= _POINTER * known


def is_heap(kind: type) -> bool:
    """Made by Python code, and open."""
    return bool(kind.__flags__ & _HEAP and not kind.__flags__ & _IMMUTABLE)


_POINTER = struct.calcsize("P")
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of a type: made by Python code; sealed


def attributes_of(value: Any) -> dict[str, Any] | None:
    """``vars(value)``, past what its class may have put in the way; ``None`` if there is none."""
    own = threading.local if isinstance(value, threading.local) else object
    try:
        found = own.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


@functools.lru_cache(maxsize=1 << 12)
def slots_of(kind: type) -> dict[str, Any]:
    """By name, the slots of a class and its bases."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        for name, value in vars(each).items():
            if isinstance(value, types.MemberDescriptorType) and "__slots__" in vars(each):
                found[name] = value
    return found


def _of_array(value: Any, label: str) -> Part:
    """The numbers of an array; objects in one are entries."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return Listed(label, lambda: dict(enumerate(_plain_array(value).ravel().tolist())))

        def read() -> Any:
            numbers = _plain_array(value)
            return numbers.shape, numbers.dtype.str, numbers.tobytes()

        def back(kept: Any) -> None:
            shape, dtype, held = kept
            numbers = _plain_array(value)
            if numbers.shape == shape and numbers.dtype.str == dtype:
                np.copyto(numbers, np.frombuffer(held, numbers.dtype).reshape(shape))

        return Computed(label, read, back)
    if isinstance(value, bytearray):

        def put(kept: Any) -> None:
            value[:] = kept

        return Computed(label, lambda: bytes(value), put)
    if isinstance(value, array.array):
        return Computed(label, value.tobytes)

    def fill(kept: Any) -> None:
        memoryview(value).cast("B")[:] = kept

    return Computed(label, lambda: memoryview(value).tobytes(), fill)


def _plain_array(value: Any) -> "np.ndarray[Any, Any]":
    """The array without the ways of its class: a masked one fills, and one of them refuses."""
    return np.asarray(value)


def has_buffer(value: Any) -> bool:
    """Whether its memory can be read: of arrays of ``ctypes``, of mapped files."""
    try:
        memoryview(value).release()
    except (TypeError, BufferError):
        return False
    return not isinstance(value, _NUMBERS)


def _base(value: Any) -> Any:
    """The number or text that an object of a class of its own is."""
    kind: Any = next(each for each in _NUMBERS if isinstance(value, each))
    return kind.__repr__(value)


def _referents(value: Any) -> dict[Any, Any]:
    """What an object made in C holds."""
    found = (each for each in gc.get_referents(value) if not isinstance(each, type))
    return dict(enumerate(found))


_ITERATED = (list, tuple, dict, set, str, bytes, range)


def _reduced(value: Any) -> Any:
    """What it would be pickled as, in terms that compare; ``None`` if it cannot be.

    Only for classes made in C: no code of the user's runs.
    """
    if _made_in_python(type(value)):
        return None
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        found: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    return _frozen(found, 0)


def _frozen(value: Any, depth: int) -> Any:
    if is_plain(value):
        return plain_fact(value)
    if isinstance(value, list | tuple) and depth < 8:
        items = itertools.islice(cast(Iterable[Any], value), 1 << 12)
        return type(value), tuple(_frozen(each, depth + 1) for each in items)
    if type(value) is dict and depth < 8:
        pairs = cast(dict[Any, Any], value).items()
        return dict, tuple((_frozen(k, depth + 1), _frozen(v, depth + 1)) for k, v in pairs)
    if isinstance(value, type | types.BuiltinFunctionType):
        return value
    if not is_heap(type(value)) and depth < 8 and not callable(value):
        found = _reduced(value)
        return id(value) if found is None else found
    return id(value)
