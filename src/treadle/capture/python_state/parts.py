"""The namespaces and containers in which a Python object keeps its values: how each is read, set
and put back. ``introspect`` says which of them an object has.
"""

import contextvars
import gc
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, cast, final

from treadle.capture.python_state.plain_values import is_plain, is_same_value, plain_fact
from treadle.guards.memory_fingerprint import has_space

MISSING: Any = object()
"""In the place of a value that is not there."""

Reading = dict[object, object]
"""What a part held: by name or key, in order."""

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

    def now(self) -> Reading:
        """What it holds, in order."""
        raise NotImplementedError

    def get(self, name: object) -> object:
        """One value, or ``MISSING``."""
        return self.now().get(name, MISSING)

    def put(self, name: object, value: object) -> None:
        """From now on ``value`` is there; ``MISSING`` for nothing."""
        raise NotImplementedError

    def is_same(self, one: Reading, other: Reading) -> bool:
        """Whether two readings found the very same objects under the same names, in one order."""
        if len(one) != len(other) or not all(map(operator.is_, one.values(), other.values())):
            return False
        pairs = zip(one, other, strict=True)
        return all(a is b or is_same_value(a, b) for a, b in pairs)

    def restore(self, before: Reading) -> None:
        """Hold again what a reading says, in its order."""
        now = self.now()
        for name in now.keys() - before.keys():
            self.put(name, MISSING)
        for name, value in before.items():
            if now.get(name, MISSING) is not value:
                self.put(name, value)

    def dictionary(self) -> Reading | None:
        """The dict behind it, for its version; ``None`` if there is none."""
        return None

    def detached(self) -> "Part":
        """A part of the same kind, without the object that it is of: for words alone."""
        part = object.__new__(type(self))
        part.label = self.label
        return part

    def where(self, name: object) -> str:
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
        self.values = cast("Reading", values)  # a ``__dict__`` takes any key

    def now(self) -> Reading:
        return dict(self.values)

    def get(self, name: object) -> object:
        return self.values.get(name, MISSING)

    def put(self, name: object, value: object) -> None:
        if value is MISSING:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def dictionary(self) -> Reading | None:
        return self.values


@final
class OwnAttributes(Attributes):
    """Likewise, where Python makes the ``__dict__`` when somebody asks for it: of functions and
    ordered dicts. Nobody asks here; thousands of empty dicts would lie scattered in memory, and
    every call would look at them."""

    __slots__ = ("owner",)

    def __init__(self, label: str, owner: object) -> None:
        Part.__init__(self, label)
        self.owner = owner

    @property
    def values(self) -> dict[Any, Any]:  # type: ignore[override]
        """What is there now."""
        return self.owner.__dict__ if has_space(self.owner) else {}

    def put(self, name: object, value: object) -> None:
        if value is MISSING:
            self.values.pop(name, None)
        else:
            cast("Reading", self.owner.__dict__)[name] = value  # it takes any key

    def dictionary(self) -> Reading | None:
        return None


@final
class Entries(Part):
    """Those of a dict, also of one with a class of its own."""

    __slots__ = ("_kind", "values")
    entries = True

    def __init__(self, label: str, values: dict[Any, Any]) -> None:
        super().__init__(label)
        self.values: Reading = values
        self._kind: type[Reading] = OrderedDict if isinstance(values, OrderedDict) else dict
        """Whose methods are used: an ``OrderedDict`` holds an order beside that of the dict."""

    def now(self) -> Reading:
        kind = self._kind
        return dict(zip(kind.keys(self.values), kind.values(self.values), strict=True))

    def get(self, name: object) -> object:
        return dict.get(self.values, name, MISSING)

    def put(self, name: object, value: object) -> None:
        if value is not MISSING:
            self._kind.__setitem__(self.values, name, value)
        elif dict.__contains__(self.values, name):
            self._kind.__delitem__(self.values, name)

    def restore(self, before: Reading) -> None:
        now = self.now()
        if list(now) != list(before):
            self._kind.clear(self.values)
            for name, value in before.items():
                self._kind.__setitem__(self.values, name, value)
            return
        super().restore(before)

    def dictionary(self) -> Reading | None:
        """None where entries may change places, which the dict's version does not count."""
        moves = self._kind is OrderedDict and len(self.values) > 1
        return None if moves else self.values


_Sequence = list[object] | tuple[object, ...] | deque[object]


@final
class Sequenced(Part):
    """Entries of a list or deque; those of a tuple, which stay."""

    __slots__ = ("values",)
    entries = True

    def __init__(self, label: str, values: _Sequence) -> None:
        super().__init__(label)
        self.values = values

    @property
    def settable(self) -> bool:  # type: ignore[override]
        """Not the entries of a tuple."""
        return not isinstance(self.values, tuple)

    def now(self) -> Reading:
        values = self.values
        if isinstance(values, list):
            return dict(enumerate(list.__iter__(values)))
        if isinstance(values, tuple):
            return dict(enumerate(tuple.__iter__(values)))
        return dict(enumerate(deque.__iter__(values)))

    def put(self, name: Any, value: object) -> None:
        values: Any = self.values
        values[name] = value

    def restore(self, before: Reading) -> None:
        values = self.values
        if isinstance(values, tuple) or list(map(id, before.values())) == list(
            map(id, self.now().values())
        ):
            return
        values.clear()
        values.extend(before.values())


@final
class Members(Part):
    """Those of a set, by what they are."""

    __slots__ = ("values",)
    entries = True
    settable = False

    def __init__(self, label: str, values: set[object] | frozenset[object]) -> None:
        super().__init__(label)
        self.values = values

    def now(self) -> Reading:
        """In an order that every process has, as far as members have names."""
        values = self.values
        members = set.__iter__(values) if isinstance(values, set) else frozenset.__iter__(values)
        return {member(value): value for value in sorted(members, key=_name_of_member)}

    def is_same(self, one: Reading, other: Reading) -> bool:
        return one.keys() == other.keys()

    def restore(self, before: Reading) -> None:
        if isinstance(self.values, set) and self.now().keys() != before.keys():
            self.values.clear()
            self.values.update(before.values())


def _name_of_member(value: object) -> tuple[str, str]:
    """By which members of a set are ordered: hashes differ from process to process."""
    if is_plain(value):
        return type(value).__name__, repr(value)
    if isinstance(value, type | types.FunctionType):
        return value.__module__, value.__qualname__
    return "", ""


def member(value: object) -> object:
    """Under which name a snapshot has a member of a set."""
    return plain_fact(value) if is_plain(value) else (None, id(value))


@final
class Variable(Part):
    """What a cell of a closure holds."""

    __slots__ = ("cell",)

    def __init__(self, label: str, cell: types.CellType) -> None:
        super().__init__(label)
        self.cell = cell

    def now(self) -> Reading:
        try:
            return {"": self.cell.cell_contents}
        except ValueError:  # a variable that is not assigned yet
            return {}

    def put(self, name: object, value: object) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value

    def where(self, name: object) -> str:
        return self.label


@final
class Slots(Part):
    """Values in ``__slots__``, of classes made by Python code and of some made in C."""

    __slots__ = ("members", "owner")

    def __init__(
        self, label: str, owner: object, members: dict[str, types.MemberDescriptorType]
    ) -> None:
        super().__init__(label)
        self.owner = owner
        self.members = cast("dict[object, types.MemberDescriptorType]", members)

    def now(self) -> Reading:
        reading: Reading = {}
        for name, member in self.members.items():
            try:
                reading[name] = member.__get__(self.owner)
            except (AttributeError, TypeError):  # empty; or the object has got another class
                continue
        return reading

    def put(self, name: object, value: object) -> None:
        if value is MISSING:
            self.members[name].__delete__(self.owner)
        else:
            self.members[name].__set__(self.owner, value)


@final
class ClassAttributes(Part):
    """Attributes of a class itself."""

    __slots__ = ("_values", "kind")

    def __init__(self, label: str, kind: type) -> None:
        super().__init__(label)
        self.kind = kind
        (self._values,) = gc.get_referents(type.__dict__["__dict__"].__get__(kind))

    def now(self) -> Reading:
        return dict(self._values)

    def get(self, name: object) -> object:
        return self._values.get(name, MISSING)

    def put(self, name: Any, value: object) -> None:
        if value is MISSING:
            type.__delattr__(self.kind, name)
        else:
            type.__setattr__(self.kind, name, value)

    def dictionary(self) -> Reading | None:
        return self._values


@final
class OfFunction(Part):
    """Code, defaults and the variables of its closure."""

    __slots__ = ("function",)
    _NAMES = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, label: str, function: types.FunctionType) -> None:
        super().__init__(label)
        self.function = function

    def now(self) -> Reading:
        f = self.function
        reading: Reading = {
            "__code__": f.__code__,
            "__defaults__": f.__defaults__,
            "__kwdefaults__": f.__kwdefaults__,
        }
        free = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        return reading | {f"<{name}>": cell for name, cell in free}

    def put(self, name: object, value: object) -> None:
        if name in self._NAMES:
            setattr(self.function, name, None if value is MISSING else value)

    def where(self, name: object) -> str:
        if isinstance(name, str) and name.startswith("<"):
            return name[1:-1]
        return super().where(name)


@final
class FixedAttributes(Part):
    """Parts that stay for the life of the object: what a bound method is bound to, say."""

    __slots__ = ("values",)
    settable = False

    def __init__(self, label: str, values: Reading) -> None:
        super().__init__(label)
        self.values = values

    def now(self) -> Reading:
        return self.values

    def where(self, name: object) -> str:
        return self.label or ("self" if name == "self" else "")

    def restore(self, before: Reading) -> None:
        return


@final
class Accessors(Part):
    """What a property calls; another call of its ``__init__`` sets it."""

    __slots__ = ("owner",)
    settable = False

    def __init__(self, label: str, owner: property) -> None:
        super().__init__(label)
        self.owner = owner

    def now(self) -> Reading:
        return {"get": self.owner.fget, "set": self.owner.fset, "delete": self.owner.fdel}

    def where(self, name: object) -> str:
        return self.label

    def restore(self, before: Reading) -> None:
        return


class Computed(Part):
    """Contents that can be compared and not listed: of arrays, and of objects that can be
    pickled."""

    __slots__ = ("_back", "read")
    settable = False

    def __init__(
        self, label: str, read: Callable[[], object], back: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(label)
        self.read = read
        self._back = back

    def now(self) -> Reading:
        return {"": self.read()}

    def is_same(self, one: Reading, other: Reading) -> bool:
        return bool(one[""] == other[""])

    def where(self, name: object) -> str:
        return self.label

    def restore(self, before: Reading) -> None:
        if self._back is not None and self.read() != before[""]:
            self._back(before[""])


@final
class Registered(Computed):
    """The virtual subclasses of an abstract class. They change with a token of the process."""

    __slots__ = ()


@final
class Referent(Part):
    """One object that is got by a call of C code: what a weak reference refers to."""

    __slots__ = ("_read",)
    settable = False

    def __init__(self, label: str, read: Callable[[], object]) -> None:
        super().__init__(label)
        self._read = read

    def now(self) -> Reading:
        return {"": self._read()}

    def where(self, name: object) -> str:
        return self.label

    def restore(self, before: Reading) -> None:
        return


@final
class ContextVariable(Part):
    """What a context variable holds, or its default."""

    __slots__ = ("variable",)
    settable = False

    def __init__(self, label: str, variable: contextvars.ContextVar[object]) -> None:
        super().__init__(label)
        self.variable = variable

    def now(self) -> Reading:
        try:
            return {"": self.variable.get()}
        except LookupError:
            return {"": MISSING}

    def where(self, name: object) -> str:
        return self.label

    def restore(self, before: Reading) -> None:
        if before[""] is not MISSING and self.now()[""] is not before[""]:
            self.variable.set(before[""])


@final
class Items(Part):
    """Objects in an array, or in what C code made. ``back`` puts one where it was."""

    __slots__ = ("_back", "_read")
    settable = False
    entries = True

    def __init__(
        self,
        label: str,
        read: Callable[[], Reading],
        back: Callable[[Any, object], None] | None = None,
    ) -> None:
        super().__init__(label)
        self._read = read
        self._back = back

    def now(self) -> Reading:
        return self._read()

    def restore(self, before: Reading) -> None:
        now = self.now()
        if self._back is None or len(now) != len(before):
            return
        for at, value in before.items():
            if now.get(at, MISSING) is not value:
                self._back(at, value)
