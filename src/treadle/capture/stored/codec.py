"""Records of a capture as JSON data and back: their values, and references to the user's objects.

::

    (1, 2.5)              ->  ["tuple", [1, ["float", "2.5"]]]
    a parameter           ->  ["parameter", 3]         the fourth of the models
    a place that was read ->  ["record", "...", "Location", {...}], of ["node", 17] of the snapshot
    anything else         ->  ``NotStored``

Only treadle's own dataclasses are recreated, from their declared fields: nothing that is read can
run code.
"""

import base64
import dataclasses
import enum
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast, final

import torch
from torch import Tensor

from treadle.algebra.extents import Size
from treadle.algebra.polynomial import from_data, to_data
from treadle.capture.python_state.code.frames import CodeOwner
from treadle.capture.python_state.ownership import is_machinery, owner_of
from treadle.capture.python_state.parts import MISSING
from treadle.capture.python_state.plain_values import (
    scalar_data,
    scalar_of,
    ufunc_name,
    ufunc_of,
)
from treadle.capture.python_state.reads.object_graph import Node
from treadle.capture.stored.names import NotStored, kind_text
from treadle.capture.stored.origin import StepObjects
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.pytree import TreeSpec, parts_of_spec, spec_of
from treadle.graph.text.exact import operation_of, operation_text
from treadle.util.errors import with_article

_OWN = "treadle."
_MOST_BYTES = 1 << 20
"""Of one tensor that a step closes over: a table of its own, and no weights."""
_DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_SEQUENCES = (tuple, list, set, frozenset)
_COMPUTES: frozenset[object] = frozenset(
    {
        "math",
        "_operator",
        *(("builtins", name) for name in ("abs", "divmod", "len", "max", "min", "pow", "print")),
        *(("builtins", name) for name in ("ascii", "format", "repr", "round", "sum")),
    }
)
"""Modules, and functions of others, that data may name: what only computes or prints."""


@final
@dataclass(slots=True)
class UserObjects:
    """The user's objects that a capture speaks of, in an order that every process has. ``nodes``:
    of the snapshot of what the run read; ``by_identity``: likewise, by the ids of the objects."""

    step: StepObjects
    nodes: Sequence[Node] = ()
    by_identity: Mapping[int, Node] = field(default_factory=dict[int, Node])

    def groups(self) -> dict[str, Sequence[object]]:
        """By the word that the data has for them."""
        models = self.step.models.values()
        return {
            "parameter": self.step.parameters,
            "module": [module for model in models for module in model.modules()],
            "optimizer": list(self.step.optimizers.values()),
            "node": self.nodes,
            "call": [self.step.call],
        }


@final
class Encoder:
    """Values to data. An object that stands in several places is written once."""

    def __init__(self, objects: UserObjects) -> None:
        self._places: dict[int, tuple[str, int]] = {}
        for word, group in objects.groups().items():
            self._places |= {id(value): (word, at) for at, value in enumerate(group)}
        numbers = {id(node): at for at, node in enumerate(objects.nodes)}
        self._objects = {key: numbers[id(node)] for key, node in objects.by_identity.items()}
        self._written: dict[int, int] = {}
        self._alive: list[object] = []  # while their ids are known

    def data(self, value: object) -> object:
        """``NotStored`` for what only this process has."""
        if value is None or type(value) in (bool, int, str):
            return value
        if value is MISSING:
            return ["missing"]
        if id(value) in self._places:
            return list(self._places[id(value)])
        match value:
            case Size():
                return ["formula", to_data(value.formula)]
            case float() | complex() if type(value) in (float, complex):
                return [type(value).__name__, repr(value)]
            case _ if (scalar := scalar_data(value)) is not None:
                return ["scalar", scalar[0], base64.b64encode(scalar[1]).decode()]
            case _ if name := ufunc_name(value):
                return ["elementwise", name]
            case bytes():
                return ["bytes", base64.b64encode(value).decode()]
            case torch.dtype():
                return ["dtype", str(value)]
            case torch.device():
                return ["device", str(value)]
            case torch.Size():
                return ["size", list(value)]
            case enum.Enum():
                return ["member", self.data(type(value)), value.name]
            case tuple() | list() | set() | frozenset() if type(value) in _SEQUENCES:
                return self._sequence(cast("Sequence[object]", value))
            case dict() if type(value) is dict:
                pairs = cast("dict[object, object]", value)
                return self._once(value, lambda: ["dict", self._pairs(pairs)])
            case functools.partial():
                return ["partial", *map(self.data, (value.func, value.args, value.keywords))]
            case MethodType():
                return ["method", self.data(value.__self__), value.__func__.__name__]
            case OpOverload():
                return ["operator", _operator_text(value)]
            case type():
                return self._class(value)
            case FunctionType() | BuiltinFunctionType():
                return _function(value)
            case TreeSpec():
                return self._tree(value)
            case Tensor():
                return self._once(value, lambda: _tensor_data(value))
            case _ if dataclasses.is_dataclass(value) and _is_own(type(value).__module__):
                return self._once(value, lambda: self._record(value))
            case _:
                raise NotStored(with_article(kind_text(type(value))))

    def _once(self, value: object, write: Callable[[], list[object]]) -> object:
        if id(value) in self._written:
            return ["again", self._written[id(value)]]
        self._written[id(value)] = len(self._written)
        self._alive.append(value)
        return write()

    def _sequence(self, value: Sequence[object]) -> object:
        word = type(value).__name__
        if isinstance(value, list):
            return self._once(value, lambda: [word, [self.data(item) for item in value]])
        items = [self.data(item) for item in value]
        return [word, sorted(items, key=repr) if isinstance(value, set | frozenset) else items]

    def _pairs(self, value: Mapping[object, object]) -> list[object]:
        return [[self.data(key), self.data(item)] for key, item in value.items()]

    def _class(self, value: type) -> list[object]:
        """By its name, if the versions of libraries say what it is; of others the one that the
        snapshot has."""
        if is_machinery(value) or owner_of(value) < CodeOwner.INSTALLED:
            return ["class", *_name(value)]
        if id(value) not in self._objects:
            raise NotStored(f"{value.__qualname__}, of which the step read nothing")
        return ["object", self._objects[id(value)]]

    def _record(self, value: object) -> list[object]:
        kind = type(value)
        held = {name: self.data(getattr(value, name)) for name in _stored_fields(kind)}
        return ["record", kind.__module__, kind.__qualname__, held]

    def _tree(self, spec: TreeSpec) -> list[object]:
        kind, context, children = parts_of_spec(spec)
        return ["tree", self.data(kind), self.data(context), [self._tree(c) for c in children]]


def _is_own(module: str) -> bool:
    return module.startswith(_OWN)


def _stored_fields(kind: type) -> list[str]:
    fields = dataclasses.fields(cast("type[Node]", kind))
    return [field.name for field in fields if "is_stored" not in field.metadata]


def _function(value: "FunctionType | BuiltinFunctionType") -> list[object]:
    module, name = _name(value)
    if not _may_call(module, name):
        raise NotStored(f"the function {name} of {module}")
    return ["function", module, name]


def _may_call(module: str, name: str) -> bool:
    """Whether data may name a function: it is treadle's, or one that only computes or prints."""
    return _is_own(module) or module in _COMPUTES or (module, name) in _COMPUTES


def _name(value: "type | FunctionType | BuiltinFunctionType") -> tuple[str, str]:
    """Module and name of what stands there under its name."""
    module, name = value.__module__ or "builtins", value.__qualname__
    if _attribute(module, name) is not value:
        raise NotStored(f"{name}, which is not what {module} has under that name")
    return module, name


def _attribute(module: str, name: str) -> object:
    """What a module has under a name; ``None`` for nothing. Of treadle's own one that is not loaded
    is imported, of others none."""
    try:
        found = importlib.import_module(module) if _is_own(module) else sys.modules[module]
        return operator.attrgetter(name)(found)
    except (ImportError, KeyError, AttributeError):
        return None


def _operator_text(value: OpOverload) -> str:
    text = operation_text(value)
    if operation_of(text) is not value:
        raise NotStored(f"the operator {text}")
    return text


def _tensor_data(value: Tensor) -> list[object]:
    is_plain_tensor = type(value) is Tensor and value.layout is torch.strided
    if not is_plain_tensor or value.requires_grad or value.nbytes > _MOST_BYTES or layout_of(value):
        raise NotStored(f"a tensor {list(value.shape)} that the step closes over")
    plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    where = str(value.dtype), list(value.shape), list(value.stride()), str(value.device)
    return ["tensor", *where, base64.b64encode(plain.numpy().tobytes()).decode()]


@final
class Decoder:
    """Data to values, with this process' objects. ``NotStored`` where it has none."""

    def __init__(self, objects: UserObjects) -> None:
        self._groups = objects.groups()
        self._nodes = objects.nodes
        self._read: list[object] = []  # what others may refer to, in the order of the data

    def value(self, data: object) -> object:
        """What ``Encoder.data`` wrote."""
        if not isinstance(data, list):
            return data
        word, *rest = cast("list[object]", data)
        if word in self._groups:
            return self._groups[cast("str", word)][cast("int", rest[0])]
        return _READERS[cast("str", word)](self, rest)

    def values(self, data: object) -> list[object]:
        """Of a list of such data."""
        return [self.value(item) for item in cast("list[object]", data)]

    def again(self, at: object) -> object:
        """What was read before."""
        return self._read[cast("int", at)]

    def kept(self, value: object) -> object:
        """A value that others may refer to."""
        self._read.append(value)
        return value

    def filled_list(self, data: object) -> list[object]:
        """A list, which is there before what is in it."""
        items: list[object] = []
        self.kept(items)
        items += self.values(data)
        return items

    def filled_dict(self, data: object) -> dict[object, object]:
        """Likewise, a dict."""
        items: dict[object, object] = {}
        self.kept(items)
        for key, item in cast("list[list[object]]", data):
            items[self.value(key)] = self.value(item)
        return items

    def record(self, rest: Sequence[object]) -> object:
        """A data class of treadle's, past its own ways of being made."""
        kind = self.kind(rest[0], rest[1])
        if not _is_own(kind.__module__) or not dataclasses.is_dataclass(kind):
            raise NotStored(f"{rest[1]} is not a record")
        record: object = object.__new__(kind)
        self.kept(record)
        held = cast("dict[str, object]", rest[2])
        if held.keys() != set(_stored_fields(kind)):
            raise NotStored(f"{rest[1]} has other fields")
        for declared in dataclasses.fields(cast("type[Node]", kind)):
            name = declared.name
            value = self.value(held[name]) if name in held else _default(declared)
            object.__setattr__(record, name, value)
        return record

    def tree(self, rest: Sequence[object]) -> TreeSpec:
        """The structure of containers."""
        kind, context, children = rest
        parts = [self.tree(cast("list[object]", c)[1:]) for c in cast("list[object]", children)]
        return spec_of(self.value(kind), self.value(context), parts)

    def kind(self, module: object, name: object) -> type:
        """A class by its name."""
        value = _attribute(cast("str", module), cast("str", name))
        if not isinstance(value, type):
            raise NotStored(f"there is no class {module}.{name}")
        return value

    def function(self, module: object, name: object) -> object:
        """A function by its name."""
        value = _attribute(cast("str", module), cast("str", name))
        if value is None or not _may_call(cast("str", module), cast("str", name)):
            raise NotStored(f"there is no function {module}.{name}")
        return value

    def of_snapshot(self, at: object) -> object:
        """An object of the snapshot."""
        return self._nodes[cast("int", at)].value

    def method(self, rest: Sequence[object]) -> object:
        """A method of a record."""
        owner, name = self.value(rest[0]), cast("str", rest[1])
        if not _is_own(type(owner).__module__):
            raise NotStored(f"the method {name} of {with_article(kind_text(type(owner)))}")
        return getattr(owner, name)

    def partial(self, rest: Sequence[object]) -> object:
        """A function with arguments."""
        function, args, named = map(self.value, rest)
        call = cast("Callable[..., object]", function)
        return functools.partial(
            call, *cast("tuple[object, ...]", args), **cast("dict[str, object]", named)
        )

    def operator(self, text: object) -> object:
        """An operator by its name."""
        found = operation_of(cast("str", text))
        if found is None:
            raise NotStored(f"there is no operator {text}")
        return found

    def tensor(self, rest: Sequence[object]) -> Tensor:
        """A tensor of the step's own."""
        dtype, shape, stride, device, text = rest
        raw = bytearray(base64.b64decode(cast("str", text)))
        kind, sizes = _DTYPES[cast("str", dtype)], cast("list[int]", shape)
        flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        value = torch.empty_strided(sizes, cast("list[int]", stride), dtype=kind)
        value.copy_(flat.reshape(sizes))
        return value.to(cast("str", device))


def _default(declared: "dataclasses.Field[object]") -> object:
    if declared.default_factory is not dataclasses.MISSING:
        return declared.default_factory()
    return declared.default


_READERS: Mapping[str, Callable[[Decoder, Sequence[object]], object]] = {
    "missing": lambda decoder, rest: MISSING,
    "again": lambda decoder, rest: decoder.again(rest[0]),
    "float": lambda decoder, rest: float(cast("str", rest[0])),
    "complex": lambda decoder, rest: complex(cast("str", rest[0])),
    "scalar": lambda decoder, rest: scalar_of(
        cast("str", rest[0]), base64.b64decode(cast("str", rest[1]))
    ),
    "elementwise": lambda decoder, rest: _elementwise(cast("str", rest[0])),
    "bytes": lambda decoder, rest: base64.b64decode(cast("str", rest[0])),
    "dtype": lambda decoder, rest: _DTYPES[cast("str", rest[0])],
    "device": lambda decoder, rest: torch.device(cast("str", rest[0])),
    "formula": lambda decoder, rest: Size(from_data(cast("list[object]", rest[0]))),
    "size": lambda decoder, rest: torch.Size(cast("list[int]", rest[0])),
    "member": lambda decoder, rest: cast("type[enum.Enum]", decoder.value(rest[0]))[
        cast("str", rest[1])
    ],
    "tuple": lambda decoder, rest: tuple(decoder.values(rest[0])),
    "set": lambda decoder, rest: set(decoder.values(rest[0])),
    "frozenset": lambda decoder, rest: frozenset(decoder.values(rest[0])),
    "list": lambda decoder, rest: decoder.filled_list(rest[0]),
    "dict": lambda decoder, rest: decoder.filled_dict(rest[0]),
    "partial": lambda decoder, rest: decoder.partial(rest),
    "method": lambda decoder, rest: decoder.method(rest),
    "operator": lambda decoder, rest: decoder.operator(rest[0]),
    "class": lambda decoder, rest: decoder.kind(*rest),
    "function": lambda decoder, rest: decoder.function(*rest),
    "object": lambda decoder, rest: decoder.of_snapshot(rest[0]),
    "tree": lambda decoder, rest: decoder.tree(rest),
    "tensor": lambda decoder, rest: decoder.kept(decoder.tensor(rest)),
    "record": lambda decoder, rest: decoder.record(rest),
}


def _elementwise(name: str) -> object:
    found = ufunc_of(name)
    if found is None:
        raise NotStored(f"{name}, which is not a function of elements in this NumPy")
    return found
