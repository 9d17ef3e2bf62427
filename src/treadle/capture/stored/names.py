"""Names for objects of a process that mean the same in another process.

::

    torch.nn.Linear         ->  torch.nn.modules.linear.Linear
    a function of a module  ->  its name there, and a digest of its code
    an object that only this process has  ->  ``NotStored``
"""

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import cast

import torch

from treadle.capture.python_state.plain_values import is_plain, plain_fact
from treadle.compat.pytree import TreeSpec, parts_of_spec
from treadle.util.errors import with_article

_PYBIND = "pybind11_builtins"
"""The module that pybind11 says of the records which its functions are bound to."""
NOT_STORED = {"is_stored": False}
"""Metadata of a field of a record that begins anew in every process, by its default."""


class NotStored(Exception):
    """A capture has something that no other process could be asked for; the words say what."""


def kind_text(kind: type) -> str:
    """A class by the names that it has: which one it is, its own parts say."""
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_text(value: object) -> str:
    """A plain value; values that differ have texts that differ."""
    kind, fact = plain_fact(value)
    return f"{kind.__qualname__} {fact!r}"


def value_text(value: object) -> str:
    """Of nested tuples of plain values, classes, dtypes, devices and structures of containers."""
    match value:
        case tuple() | list():
            return f"({', '.join(map(value_text, cast('Sequence[object]', value)))})"
        case TreeSpec():
            kind, context, children = parts_of_spec(value)
            return f"tree {value_text((kind, context, children))}"
        case type():
            return f"class {kind_text(value)}"
        case torch.dtype() | torch.device() | torch.layout():
            return f"{value!r}"
        case _ if is_plain(value):
            return plain_text(value)
        case _:
            raise NotStored(
                f"{with_article(kind_text(type(value)))}, which decides what is captured"
            )


@functools.cache
def code_digest(code: CodeType) -> str:
    """What code is and where it stands, that within it included: an error shows its line."""
    parts = (
        code.co_filename, code.co_qualname, code.co_firstlineno, code.co_flags, code.co_argcount,
        code.co_posonlyargcount, code.co_kwonlyargcount, code.co_names, code.co_varnames,
        code.co_freevars, code.co_cellvars, code.co_code, code.co_linetable, code.co_exceptiontable,
        tuple(map(_constant_text, code.co_consts)),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _constant_text(value: object) -> str:
    match value:
        case CodeType():
            return code_digest(value)
        case tuple():
            return f"({', '.join(map(_constant_text, value))})"
        case frozenset():  # in an order that differs from process to process
            return f"{{{', '.join(sorted(map(_constant_text, value)))}}}"
        case _:
            return plain_text(value)


def codes_within(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    """Each, and the code within it."""
    for code in codes:
        yield code
        yield from codes_within(each for each in code.co_consts if isinstance(each, CodeType))


def function_text(function: FunctionType) -> str:
    """One without a closure: its names, its code and its defaults."""
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    if function.__closure__ or not all(map(is_plain, defaults)):
        raise NotStored(f"{function.__qualname__} has variables of its own")
    values = ", ".join(map(plain_text, defaults))
    name = f"{function.__module__}.{function.__qualname__}"
    return f"function {name} {code_digest(function.__code__)} ({values})"


def builtin_text(function: BuiltinFunctionType) -> str:
    """A function made in C, of a module, a class or a frozen set. ``NotStored`` for a method of
    another object."""
    owner = function.__self__
    if isinstance(owner, ModuleType):
        of = owner.__name__
    elif isinstance(owner, type):
        of = kind_text(owner)
    elif type(owner) is frozenset and all(map(is_plain, cast("frozenset[object]", owner))):
        of = f"{{{', '.join(sorted(map(plain_text, cast('frozenset[object]', owner))))}}}"
    elif type(owner).__module__.startswith("torch"):  # its functions are bound to its classes
        of = kind_text(type(owner))
    elif owner is None or type(owner).__module__ == _PYBIND:  # each is bound to a record of its own
        of = ""
    else:
        raise NotStored(f"the method {function.__qualname__} of an object")
    return f"builtin {of} {function.__module__} {function.__qualname__}"


def module_of(space: dict[str, object]) -> str:
    """The name under which a module with these variables is loaded; with a ``!`` where an object of
    a class that it defines has taken its place (``torch._VF``)."""
    own = space.get("__name__")
    for name in (own, *list(sys.modules)):
        if type(name) is str and name in sys.modules:
            for each in (name, f"{name}!"):
                if variables_of(each) is space:
                    return each
    raise NotStored(f"variables of a module that is not loaded ({own})")


def variables_of(module: str) -> dict[str, object] | None:
    """Those of a module that is loaded in this process as well."""
    found = sys.modules.get(module.removesuffix("!"))
    if not module.endswith("!"):
        return found.__dict__ if isinstance(found, ModuleType) else None
    for kind in () if type(found) is ModuleType else type(found).__mro__:
        for each in vars(kind).values():
            if isinstance(each, FunctionType):
                return each.__globals__
    return None
