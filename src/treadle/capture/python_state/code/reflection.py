"""Reads by names that no code mentions, found by which function was called on which object.

    vars(cfg)["lr"], cfg.__dict__["lr"]     the attribute lr of cfg
    vars(cfg)                               all attributes of cfg
    globals()["lr"], f.__globals__["lr"]    the variable lr of that module
    getattr(cfg, name)                      the attribute of that name
    teacher.eval(), cfg.dir, cfg["vars"]    nothing but what they say

Most objects hear who reads them (``attribute_watch``). Classes, functions and tensors do not: of
those the names count that are given to Python's own functions, and where these cannot be known, all
names.
"""

import builtins
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, methodcaller
from sys import _getframe
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, final

from treadle.capture.python_state.attribute_watch import AttributeWatch
from treadle.capture.python_state.code.bytecode import ReflectiveRead, value_of
from treadle.capture.python_state.code.frames import (
    CodeOwner,
    ExecutionRecord,
    callers,
    code_owner,
    file_of,
)
from treadle.capture.python_state.ownership import BUILTINS
from treadle.util.frames.frame_variables import variables

_OPTIMIZED = 0x1  # a flag of code whose local variables are not in its globals
_REPLACED = ("getattr", "hasattr", "vars", "dir")
"""Functions that take the object; they are replaced while a run is watched."""
_ORIGINALS = {id(function): function for function in (getattr, hasattr, vars, dir)}
_VARIABLES = {id(function): function for function in (globals, locals)}
_STATIC = inspect.getattr_static.__code__  # reads past what hears it
_WAYS_ON = frozenset({"__dict__", "__globals__", "__getattribute__"})
_NAMING = (attrgetter, methodcaller)


class Meets(Protocol):
    """Keeps the contents of objects before they change."""

    def learn_names(self) -> None:
        """Called when new names count."""
        ...

    def meet_attributes(self, owner: object) -> None:
        """Called when all attributes of an object are read."""
        ...

    def meet_variables(self, space: dict[str, object], names: set[str]) -> None:
        """Called when globals are read."""
        ...


@final
class Reflection:
    """Notes such reads in ``executed`` and ``watch``."""

    def __init__(
        self,
        executed: ExecutionRecord,
        watch: AttributeWatch,
        meets: Meets,
        is_importing: Callable[[FrameType], bool],
    ) -> None:
        self._executed, self._watch, self._meets = executed, watch, meets
        self._is_importing = is_importing
        self.machinery: frozenset[CodeType] = frozenset()

    # -- what was read

    def _name(self, name: object) -> None:
        """Note that any object whose reads cannot be watched may have been read by ``name``."""
        if type(name) is str and name not in self._executed.names:
            self._executed.names.add(name)
            self._meets.learn_names()

    def _attribute(self, owner: object, name: object) -> None:
        """Note a read that bypasses the watch of its object."""
        self._name(name)
        self._watch.note(owner, name) if type(name) is str else self._all(owner)

    def _all(self, owner: object) -> None:
        if self._watch.hears(owner):
            self._watch.note_all(owner)
        else:
            self._executed.whole[id(owner)] = owner
            self._meets.meet_attributes(owner)

    def _any_name(self) -> None:
        if not self._executed.any_name:
            self._executed.any_name = True
            self._meets.learn_names()

    def _variables(self, space: dict[str, object], key: object = None) -> None:
        """Note a read of the global ``key``, or of all."""
        _, known, _ = self._executed.spaces.setdefault(id(space), (space, set(), _of_space(space)))
        names = {key} if type(key) is str else space.keys() - {"__builtins__"}
        if type(key) is not str:
            self._executed.whole_spaces.add(id(space))
        known |= names
        self._meets.meet_variables(space, names)

    # -- what tells of it

    def enters(self, frame: FrameType) -> None:
        """Handle functions of the standard library that read attributes past the watch."""
        if frame.f_code is _STATIC:
            arguments = variables(frame)
            self._attribute(arguments["obj"], arguments["attr"])

    def looks(self, frame: FrameType, sites: Sequence[ReflectiveRead], owner: CodeOwner) -> None:
        """Called when code begins that, for example, takes a whole ``__dict__``."""
        arguments, globals_ = variables(frame), frame.f_globals
        for site in sites:
            of = site.owner and value_of(site.owner, arguments, globals_)
            name = site.name and value_of(site.name, arguments, globals_)
            match site.kind:
                case "dict" if site.owner is not None:
                    if not self._watch.hears(of):
                        self._all(of)
                case "globals" if isinstance(of, FunctionType):
                    self._variables(of.__globals__, name)
                case "frames":
                    if owner is CodeOwner.USER or type(name) is str:
                        self._of_callers(frame, name)
                case "past":
                    self._past(site, frame.f_code, of, name)
                case "globals" if owner is CodeOwner.USER:
                    self._all_variables()
                case _ if owner is CodeOwner.USER:
                    self._any_name()
                case _:
                    pass

    def _of_callers(self, frame: FrameType, name: object) -> None:
        for caller in callers(frame):
            is_users = code_owner(file_of(caller)) is CodeOwner.USER
            if is_users and caller.f_code not in self.machinery:
                self._variables(caller.f_globals, name)

    def _past(self, site: ReflectiveRead, code: CodeType, of: object, name: object) -> None:
        if site.owner is not None:
            self._attribute(of, name)
        elif code.co_name == "__getattribute__":
            return  # of a class whose objects hear nothing
        elif type(name) is str:
            self._executed.past_names.add(name)
            self._name(name)
            self._meets.learn_names()
        else:
            self._executed.past = True
            self._any_name()
            self._meets.learn_names()

    def _all_variables(self) -> None:
        """Note reads of the variables of all modules of the user's."""
        for space, _, owner in list(self._executed.spaces.values()):
            if owner is CodeOwner.USER:
                self._variables(space)

    def calls(self, frame: FrameType, function: object) -> None:
        """Handle calls of builtin functions, whatever their name in the code."""
        if id(function) in _VARIABLES:
            if function is globals or not frame.f_code.co_flags & _OPTIMIZED:
                self._of_module(frame)
        elif id(function) in _ORIGINALS and code_owner(file_of(frame)) >= CodeOwner.INSTALLED:
            self._any_name()

    def _of_module(self, frame: FrameType) -> None:
        if code_owner(file_of(frame)) < CodeOwner.INSTALLED or frame.f_globals is BUILTINS:
            return
        if not self._is_importing(frame):
            key = self._watch.key_of(frame, ("globals", "locals", "vars"))
            self._variables(frame.f_globals, key)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Inside, the arguments of builtin functions are noted."""
        originals = {name: BUILTINS[name] for name in _REPLACED}
        BUILTINS.update(self._replacements())
        try:
            yield
        finally:
            BUILTINS.update(originals)

    def _replacements(self) -> dict[str, Callable[..., object]]:
        got, has, names_of = builtins.getattr, builtins.hasattr, builtins.dir
        space_of, ours, known = builtins.vars, self._is_ours, self._executed.names
        watch = self._watch

        def get(owner: object, name: str, *default: object) -> Any:
            if (name not in known or name in _WAYS_ON) and watch.inside != get_ident():
                self._asked(owner, name)
            return got(owner, name, *default)

        def is_there(owner: object, name: str, /) -> bool:
            if (name not in known or name in _WAYS_ON) and watch.inside != get_ident():
                self._asked(owner, name)
            return has(owner, name)

        def attributes(*owner: object) -> object:
            frame = _getframe(1)
            if not owner:
                self._local(frame)
                local = frame.f_locals
                return dict(local) if frame.f_code.co_flags & _OPTIMIZED else local
            if not ours(frame) and not self._watch.hears(owner[0]):
                key = self._watch.key_of(frame, ("vars",))
                self._name(key) if type(key) is str else self._all(owner[0])
            return space_of(*owner)

        def names(*owner: object) -> list[str]:
            frame = _getframe(1)
            if not owner:
                self._local(frame)
                return sorted(frame.f_locals)
            if not ours(frame):
                for base in (owner[0], *type(owner[0]).__mro__[:-1]):
                    self._all(base)
            return names_of(*owner)

        replacements = (get, is_there, attributes, names)
        self._watch.between = frozenset(function.__code__ for function in replacements)
        return dict(zip(_REPLACED, replacements, strict=True))

    def _is_ours(self, frame: FrameType) -> bool:
        return code_owner(file_of(frame)) is CodeOwner.OURS

    def _local(self, frame: FrameType) -> None:
        """``vars()`` and ``dir()``."""
        if not frame.f_code.co_flags & _OPTIMIZED:
            self._of_module(frame)

    def _asked(self, owner: object, name: str) -> None:
        frame = _getframe(2)
        if name not in self._executed.names and not self._is_ours(frame):
            self._name(name)
        if name not in _WAYS_ON:
            return
        asks = code_owner(file_of(frame))
        if asks is CodeOwner.OURS or self._is_importing(frame):
            return
        if name == "__dict__" and not self._watch.hears(owner):
            self._all(owner)
        elif asks < CodeOwner.INSTALLED:
            return  # Python's library only passes it on
        elif name == "__globals__" and type(owner) is FunctionType:
            self._variables(owner.__globals__)
        elif name == "__getattribute__":
            self._executed.past = True
            self._any_name()

    def meets(self, value: object) -> None:
        """Called when an object is met that reads attributes by names that it holds."""
        if type(value) in _NAMING:
            for part in value.__reduce__()[1]:
                for name in part.split(".") if type(part) is str else ():
                    self._name(name)


def _of_space(space: dict[str, object]) -> CodeOwner:
    file = space.get("__file__")
    return code_owner(file) if type(file) is str else CodeOwner.USER
