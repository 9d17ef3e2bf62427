"""The namespaces in which a Python object keeps its values: how each is read, set and put back.

Containers of entries are parts as well (``container_parts``), and so is what calls give
(``computed_parts``). ``introspect`` says which of them an object has.
"""

import gc
import operator
import types
from typing import Any, cast, final

from treadle.capture.python_state.plain_values import is_same_value
from treadle.guards.memory_fingerprint import has_space

MISSING: Any = object()
"""Stands for a value that does not exist."""

Reading = dict[object, object]
"""The contents of a part: by name or key, in order."""

OF_DECLARATION = frozenset(
    {
        "__abstractmethods__", "__annotations__", "__annotate__", "__builtins__", "__cached__",
        "__dataclass_fields__", "__dataclass_params__", "__loader__", "__match_args__",
        "__orig_bases__", "__slotnames__", "__parameters__", "__spec__", "__static_attributes__",
    }
)  # fmt: skip
"""Attributes that Python sets on a class or a module when it is made, and reads only by name."""


class Part:
    """One namespace or container of an object. Subclasses say how to list and how to set."""

    __slots__ = ("label",)
    entries = False  # whether its values are entries of a container, and not attributes
    settable = True  # whether a single value can be put in its place

    def __init__(self, label: str) -> None:
        self.label = label

    def now(self) -> Reading:
        """Its present contents, in order."""
        raise NotImplementedError

    def get(self, name: object) -> object:
        """One value, or ``MISSING``."""
        return self.now().get(name, MISSING)

    def put(self, name: object, value: object) -> None:
        """Put ``value`` there; ``MISSING`` removes it."""
        raise NotImplementedError

    def is_same(self, one: Reading, other: Reading) -> bool:
        """Whether two readings found the very same objects under the same names, in one order."""
        if len(one) != len(other) or not all(map(operator.is_, one.values(), other.values())):
            return False
        pairs = zip(one, other, strict=True)
        return all(a is b or is_same_value(a, b) for a, b in pairs)

    def restore(self, before: Reading) -> None:
        """Restore the contents of a reading, in its order."""
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
        """A part of the same kind without its object, to format messages with."""
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
    ordered dicts. It is not created here: otherwise thousands of empty dicts would be scattered in
    memory, and every call would compare them."""

    __slots__ = ("owner",)

    def __init__(self, label: str, owner: object) -> None:
        Part.__init__(self, label)
        self.owner = owner

    @property
    def values(self) -> dict[Any, Any]:  # type: ignore[override]
        """The values there now."""
        return self.owner.__dict__ if has_space(self.owner) else {}

    def put(self, name: object, value: object) -> None:
        if value is MISSING:
            self.values.pop(name, None)
        else:
            cast("Reading", self.owner.__dict__)[name] = value  # it takes any key

    def dictionary(self) -> Reading | None:
        return None


@final
class Variable(Part):
    """The value in a cell of a closure."""

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
    """The functions of a property; another call of its ``__init__`` sets them."""

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
