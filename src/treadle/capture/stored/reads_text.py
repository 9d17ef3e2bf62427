"""What a captured run read, as one text: equal in two processes that the run cannot tell apart.

::

    17 transformers.models.gpt2.modeling_gpt2.GPT2Block
      Attributes training: bool True; ln_1: object 18
      ...

Objects are numbered in the order of the snapshot, so the text shows which object is where, and
which places have the same one. Parts of torch and of Python's library are determined by their
versions: the text has only the names of their contents.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import _lru_cache_wrapper as _LruCached
from inspect import getattr_static
from itertools import zip_longest
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, ModuleType, UnionType
from typing import cast, final

import torch
from torch import Tensor

from treadle.capture.python_state.classes import class_module
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.computed_parts import Computed
from treadle.capture.python_state.container_parts import Members
from treadle.capture.python_state.introspect import Identity, is_heap
from treadle.capture.python_state.ownership import is_machinery, owner_of
from treadle.capture.python_state.parts import MISSING, Reading
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.python_state.reads.object_graph import (
    Contents,
    Entry,
    Fact,
    Node,
    OfKind,
    ReadValue,
    Same,
    Space,
    Watched,
)
from treadle.capture.python_state.reads.reads_walk import IDENTITIES
from treadle.capture.python_state.remembered import RememberedResults
from treadle.capture.python_state.virtual_subclasses import VirtualSubclasses
from treadle.capture.stored.names import (
    NotStored,
    builtin_text,
    code_digest,
    function_text,
    kind_text,
    plain_text,
)
from treadle.compat.late_modules import LATE_MODULES
from treadle.util.errors import with_article

_C_FUNCTION = "_ctypes.CFuncPtr"
Before = Callable[[Node, int], Reading | None]
"""What a part of an object held before the run, where that is known."""


@final
@dataclass(slots=True)
class ReadsText:
    """The text of a snapshot with these nodes. ``bound``: the parameters, in order. ``codes``: the
    code that the text speaks of."""

    nodes: list[Node]
    bound: list[Tensor]
    before: Before = lambda _, __: None
    codes: dict[int, CodeType] = field(default_factory=dict[int, CodeType])
    _numbers: dict[int, int] = field(default_factory=dict[int, int])
    _of_objects: dict[int, int] = field(default_factory=dict[int, int])
    _of_bound: dict[int, int] = field(default_factory=dict[int, int])

    def lines(self, objects: Mapping[int, Node]) -> list[str]:
        """``objects``: the nodes by the ids of what they stand for. ``NotStored`` for what has no
        text."""
        self._numbers = {id(node): at for at, node in enumerate(self.nodes)}
        self._of_objects = {key: self._numbers[id(node)] for key, node in objects.items()}
        self._of_bound = {id(tensor): at for at, tensor in enumerate(self.bound)}
        return [line for at, node in enumerate(self.nodes) for line in self._of_node(at, node)]

    def _of_node(self, at: int, node: Node) -> list[str]:
        library = self._is_of_library(node)
        lines = [f"{at} {kind_text(node.kind)} {self._identity(node, library)}".rstrip()]
        for number, watched in enumerate(node.watched):
            label = type(watched.part).__name__
            pairs = self._pairs(node, number, watched, library)
            if isinstance(watched.part, Members) or not watched.part.entries:
                pairs.sort()
            lines.append(f"  {label} {'; '.join(pairs)}")
        return lines

    def _identity(self, node: Node, library: bool) -> str:
        """Which object it is, where that counts beside its parts, or there are none to compare."""
        value = node.value
        if isinstance(value, Enum):
            return f"{kind_text(type(value))}.{value.name}"
        if isinstance(value, (type, ModuleType, *IDENTITIES)):
            return self._very_same(value, library, node.label)
        has_parts = node.watched or type(value) is object or is_heap(type(value))
        return "" if has_parts else self._very_same(value, library, node.label)

    def _pairs(self, node: Node, number: int, watched: Watched, library: bool) -> list[str]:
        held: dict[object, Entry] = watched.held
        if isinstance(watched.part, Computed):
            before = self.before(node, number)
            read = before[""] if before is not None else None
            entry = held.get("")
            value = entry.held if isinstance(entry, Contents) else None
            remembers = isinstance(value, RememberedResults)
            return [self._contents(read if remembers and read is not None else value, node)]
        return [
            f"{self._key(name, watched)}: {self._entry(entry, node, watched, name, library)}"
            for name, entry in held.items()
        ]

    def _key(self, name: object, watched: Watched) -> str:
        if isinstance(watched.part, Members):
            return "" if isinstance(name, tuple) and name[0] is None else repr(name)
        if type(name) is str:
            return name
        return plain_text(name) if is_plain(name) else self._object(name)

    def _object(self, value: object) -> str:
        number = self._of_objects.get(id(value))
        if number is None:
            raise NotStored(f"a key of {kind_text(type(value))}")
        return f"object {number}"

    def _entry(
        self, entry: Entry, node: Node, watched: Watched, name: object, library: bool
    ) -> str:
        match entry:
            case Node():
                return f"object {self._numbers[id(entry)]}"
            case ReadValue((kind, value)):
                return f"{kind.__qualname__} {value!r}"
            case Fact(fact):
                if not isinstance(fact[3], torch.device):
                    raise NotStored(f"{watched.part.where(name)} is a tensor of several ranks")
                return f"tensor {fact}"
            case OfKind(kind):
                return f"any {kind_text(kind)}"
            case Contents(held):
                return self._contents(held, node)
            case Same(held):
                return self._very_same(held, library, watched.part.where(name))

    def _very_same(self, held: object, library: bool, where: str) -> str:
        text = self._same(held, library)
        if not text:
            raise NotStored(f"{where} is that {kind_text(type(held))}")
        return text

    def _same(self, held: object, library: bool) -> str | None:
        """A very object; ``None`` if another process has none to compare it with."""
        match held:
            case CodeType():
                self.codes[id(held)] = held
                return f"code {code_digest(held)}"
            case BuiltinFunctionType():
                return builtin_text(held)
            case FunctionType() if is_machinery(held) or (library and _is_of_library(held)):
                # What a wrapper of the machinery's calls is entered, and then has to be known.
                return f"function {held.__module__}.{held.__qualname__}"
            case FunctionType():
                self.codes[id(held.__code__)] = held.__code__
                return function_text(held)
            case _LruCached():
                inside = self._same(held.__wrapped__, library)
                return inside and f"cached {inside}"
            case ModuleType():
                return f"module {held.__name__}"
            case type():
                return f"class {kind_text(held)}{_fields_text(held)}"
            case Tensor():
                at = self._of_bound.get(id(held))
                return None if at is None else f"parameter {at}"
            case _ if held is MISSING:
                return "missing"
            case staticmethod() | classmethod():
                inside = self._same(held.__func__, library)
                return inside and f"{kind_text(type(held))} {inside}"
            case property():
                functions = [f for f in (held.fget, held.fset, held.fdel) if f is not None]
                texts = [self._same(f, library) for f in functions]
                return f"property {texts}" if all(texts) else None
            case UnionType() | GenericAlias():
                return f"{type(held).__qualname__} {held!r}"
            case tuple() | frozenset() if library:
                return self._constant(held)
            case _ if library or (is_machinery(held) and not is_heap(type(held))):
                # Without a name it is PyTorch's or Python's own: a loader, a capsule, a memory.
                return f"{kind_text(type(held))} {_name_of(held)}"
            case _:
                return _name_of(held) and f"{kind_text(type(held))} {_name_of(held)}"

    def _constant(self, value: object) -> str | None:
        """One of a library's, with all that is in it. What its dicts and lists hold does not count:
        they are memories, or switches that the key has."""
        if is_plain(value):
            return plain_text(value)
        if not isinstance(value, tuple | frozenset):
            return self._same(value, True)
        inside = [str(self._constant(item)) for item in cast("Iterable[object]", value)]
        inside = sorted(inside) if isinstance(value, frozenset) else inside
        return f"{type(value).__qualname__}({', '.join(inside)})"

    def _contents(self, value: object, node: Node) -> str:
        if any(kind_text(each) == _C_FUNCTION for each in node.kind.__mro__):
            return "a function of a library"  # its contents are where it is loaded
        return self._value(value)

    def _value(self, value: object) -> str:
        match value:
            case VirtualSubclasses():
                return f"registered {sorted(map(kind_text, filter(_is_theirs, value.classes())))}"
            case RememberedResults():
                return f"remembered {self._pairs_of(value.entries())}"
            case Identity():
                raise NotStored("contents that name an object by where it is")
            case tuple() | list():
                return f"({', '.join(map(self._value, value))})"
            case frozenset() | set():
                return f"{{{', '.join(sorted(map(self._value, value)))}}}"
            case dict():
                return f"{{{self._pairs_of(value.items())}}}"
            case type():
                return f"class {kind_text(value)}"
            case BuiltinFunctionType():
                return builtin_text(value)
            case _ if is_plain(value):
                return plain_text(value)
            case _:
                raise NotStored(f"contents with {with_article(kind_text(type(value)))}")

    def _pairs_of(self, pairs: Iterable[tuple[object, object]]) -> str:
        return ", ".join(f"{self._value(key)}: {self._value(value)}" for key, value in pairs)

    def _is_of_library(self, node: Node) -> bool:
        """Whether it is a class or a module of torch's or of Python's library."""
        value = node.value
        if isinstance(value, Space):
            value = sys.modules.get(str(vars(value).get("__name__")))
        return isinstance(value, type | ModuleType) and owner_of(value) < CodeOwner.INSTALLED


def first_difference(before: Sequence[str], now: Sequence[str]) -> str:
    """In words where two texts of a snapshot part: the object, the name, what was there and what is
    there now."""
    owner = ""
    for was, is_ in zip_longest(before, now, fillvalue="nothing"):
        if was != is_:
            pair = zip_longest(was.split("; "), is_.split("; "), fillvalue="nothing")
            old, new = next((old, new) for old, new in pair if old != new)
            return f"{owner}{_short(old)} became {_short(new)}"
        if not was.startswith(" "):
            owner = f"of {was.partition(' ')[2]}: "
    return "nothing differs"


_LONGEST = 160  # characters: what an error shows of a value


def _short(text: str) -> str:
    """What fits into a line."""
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _fields_text(kind: type) -> str:
    """The fields of a named tuple, whose methods are made of them."""
    fields = getattr_static(kind, "_fields", None) if issubclass(kind, tuple) else None
    return f" {fields}" if type(fields) is tuple and all(map(is_plain, fields)) else ""


def _is_of_library(function: FunctionType) -> bool:
    return code_owner(function.__code__.co_filename) < CodeOwner.INSTALLED


def _name_of(value: object) -> str:
    """The name that an object made in C, or a descriptor, has by itself."""
    name = getattr(value, "__qualname__", "") or getattr(value, "__name__", "")
    return name if type(name) is str else ""


def _is_theirs(kind: type) -> bool:
    """Whether a class is there because a user's code, or a library of theirs, is loaded."""
    return owner_of(kind) >= CodeOwner.INSTALLED and class_module(kind) not in LATE_MODULES
