"""Which attributes of objects a run reads, and which it sets before it reads them.

For a class made by Python code, attribute access is replaced until the run is over; modules get
another class until then.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from sys import _getframe
from threading import get_ident  # of the module itself, reading is noted
from types import CodeType, FrameType, ModuleType
from typing import Any, cast, final

from torch import nn

from treadle.capture.integrations.integration import SharedObjects
from treadle.capture.integrations.registry import SHARED_OBJECTS
from treadle.capture.python_state.changes import Kept
from treadle.capture.python_state.code.bytecode import Instructions, value_of
from treadle.capture.python_state.code.frames import (
    LIBRARY_FILES,
    CodeOwner,
    code_owner,
    is_of_logs,
)
from treadle.capture.python_state.introspect import is_heap
from treadle.capture.python_state.ownership import (
    LOADED,
    SHARED_KINDS,
    is_machinery_class,
    owner_of,
)
from treadle.capture.python_state.parts import MISSING
from treadle.util.frames.frame_variables import variables

_IN_PART = (ModuleType, *SHARED_KINDS)
_CACHED = functools.cached_property.__get__.__code__  # takes a whole __dict__ for one name
WATCHED = ("__getattribute__", "__setattr__")
"""The methods of classes that are replaced while a run is watched."""


@final
class AttributeWatch:
    """Notes the attributes that are read of objects that a step reaches, and has the values there
    met."""

    def __init__(
        self,
        kept: Mapping[tuple[int, int], Kept],
        meet: Callable[[object, str], None],
        hears_name: Callable[[str], None],
        is_importing: Callable[[FrameType], bool],
    ) -> None:
        """``kept``: the parts that were met, by the id of an object and a position. ``meet`` is
        called with each object that was read and a label; ``hears_name`` with each name."""
        self._kept, self._meet, self._is_importing = kept, meet, is_importing
        self._hears_name = hears_name
        self.read: dict[int, set[str]] = {}
        self._early: dict[int, set[str]] = {}  # of objects that were read before they were met
        self._written: dict[int, set[str]] = {}  # set before they were read
        self._classes: dict[type, dict[str, object]] = {}
        namespace = self._methods(ModuleType)
        self._module_class: Any = type("module", (ModuleType,), namespace)
        self._modules: list[ModuleType] = []
        self.shared: dict[str, object] = {}  # objects that code got by a name, by label
        self.between: frozenset[CodeType] = frozenset()  # what stands for Python's own functions
        self._steps: dict[int, Instructions] = {}
        self.everything: set[int] = set()  # ids of objects of which all attributes were read
        self.whole_kinds: set[type] = set()  # their classes
        self.runs = False  # whether what is read is read by the step
        self.inside = 0  # the thread that is within an operation of the trace
        # Between these two calls our code alone runs; the first says whether to call the second.
        self.pause: Callable[[], bool] = lambda: False
        self.resume: Callable[[], None] = lambda: None

    def of_object(self, value: object) -> set[str]:
        """The names that were read of an object that is met now; names that are read later are
        added to it."""
        return self.read.setdefault(id(value), self._early.pop(id(value), set()))

    def written(self, value: object) -> set[str]:
        """The names that the run has set on an object before it read them. The earlier values do
        not matter to the run, but those that it leaves there do."""
        return self._written.get(id(value), set())

    def is_unread(self, value: object, name: str) -> bool:
        """Whether the run is known not to have read the earlier value under this name."""
        read = self.read.get(id(value))
        return read is not None and name not in read and id(value) not in self.everything

    def watch(self, value: object) -> bool:
        """Note reads of the object's attributes from now on; whether that is possible."""
        if type(value) is not ModuleType:
            return self.watch_class(type(value))
        value.__class__ = self._module_class
        self._modules.append(value)
        return True

    def _methods(self, kind: Any) -> dict[str, Callable[..., object]]:
        """The methods by which such objects get and set attributes, replaced by ones that note each
        access."""
        methods = self._recording(kind.__getattribute__), self._noting_writes(kind.__setattr__)
        return dict(zip(WATCHED, methods, strict=True))

    def _noting_writes(
        self, original: Callable[[object, str, object], None]
    ) -> Callable[[object, str, object], None]:
        def put(owner: object, name: str, value: object) -> None:
            original(owner, name, value)
            read = self.read.get(id(owner))
            if not self.runs or read is None or name in read or name.startswith("__"):
                return
            if self.inside != get_ident():
                self._written.setdefault(id(owner), set()).add(name)

        return put

    def hears(self, value: object) -> bool:
        """Whether reads of the object's attributes are noted."""
        return type(value) in self._classes or type(value) is self._module_class

    def _recording(
        self, original: Callable[[object, str], object]
    ) -> Callable[[object, str], object]:
        known = self.read

        def get(owner: object, name: str) -> object:
            try:
                value = original(owner, name)
            except AttributeError:
                self._note(owner, name)
                raise
            key = id(owner)
            names = known[key] if key in known else None  # noqa: SIM401 no call: a hook hears each
            if names is None:
                # What the machinery reads of its own, such as loggers, at every operation.
                if self.inside != get_ident():
                    self._note(owner, name)
            elif name not in names:  # most reads are not the first
                self._note(owner, name)
            return value

        return get

    def watch_class(self, kind: type) -> bool:
        """Note reads of such objects' attributes from now on; whether that is possible."""
        if kind in self._classes:
            return True
        if not is_heap(kind) or issubclass(kind, type | BaseException) or is_machinery_class(kind):
            return False
        own = (base for base in kind.__mro__[:-1] if base not in self._classes)
        if any("__getattribute__" in vars(base) for base in own):
            return False  # its own way past what is watched
        methods = self._methods(kind)
        before = {name: vars(kind).get(name, MISSING) for name in methods}
        try:
            for name, method in methods.items():
                type.__setattr__(kind, name, method)
        except (TypeError, AttributeError):
            return False
        self._classes[kind] = before
        return True

    def _note(self, owner: object, name: str) -> None:
        if not self.runs:
            return
        read = self.read.get(id(owner))
        if read is None and issubclass(type(owner), SHARED_KINDS):
            if self.inside == get_ident():
                return  # the machinery's own
            self._meet_shared(owner)
            read = self.read.get(id(owner))
        if read is None:
            if not name.startswith("__"):
                self._early.setdefault(id(owner), set()).add(name)
            return  # in any thread: that of a step may have been started by it
        if issubclass(type(owner), _IN_PART) and not self._counts(owner, name):
            # (``isinstance`` would read ``__class__``, and so come here again.)
            if issubclass(type(owner), SHARED_KINDS) and name in _facts_of(owner).behind:
                _facts_of(owner).behind[name](owner)
            return
        if name.startswith("__"):
            if name in ("__dict__", "__getstate__"):
                self._note_mapping(owner, name, read)
            return
        if name in read:
            return
        paused = self.pause()
        try:
            self.note(owner, name)
        finally:
            if paused:
                self.resume()

    def note(self, owner: object, name: str) -> None:
        """Called when an attribute of an object that was met is read."""
        read = self.read.get(id(owner))
        if read is None:
            self._early.setdefault(id(owner), set()).add(name)
            return
        if name in read or name in self._written.get(id(owner), ()):
            return
        self._hears_name(name)  # its class may have it
        for at in range(2):
            kept = self._kept.get((id(owner), at))
            if kept is None or kept.part.entries or not kept.part.settable:
                continue
            before = kept.before.get(name, MISSING)
            if kept.part.get(name) is before and not self._is_importing(_getframe(2)):
                read.add(name)  # and not what the run itself has put there
                if before is not MISSING:
                    self._meet(before, kept.part.where(name))

    def _meet_shared(self, owner: object) -> None:
        """Meet an object that users' or installed code got by its name."""
        frame: FrameType = _getframe(3)
        while is_of_logs(frame) and frame.f_back is not None:
            frame = frame.f_back
        if code_owner(frame.f_code.co_filename) >= CodeOwner.INSTALLED:
            label = _facts_of(owner).label(owner)
            self.shared[label] = owner
            self._meet(owner, label)

    def _counts(self, owner: Any, name: str) -> bool:
        """Whether a read counts: of modules of the standard library those by other code, not
        NumPy's reads of itself; of shared objects those of deciding attributes. What they do with
        it happens once."""
        if not issubclass(type(owner), ModuleType):
            return name in _facts_of(owner).deciding
        if owner_of(owner) is not CodeOwner.STDLIB:
            return True
        file = _getframe(3).f_code.co_filename
        return code_owner(file) >= CodeOwner.STDLIB and not file.startswith(LIBRARY_FILES)

    def _note_mapping(self, owner: object, name: str, read: Collection[str]) -> None:
        """Note a read of ``vars(owner)``; the own look-up of an ``nn.Module`` reads its parameters,
        buffers and modules. ``read``: the names that are known to be read from it."""
        frame: FrameType = _getframe(3)
        if isinstance(owner, nn.Module) and code_owner(frame.f_code.co_filename) is CodeOwner.TORCH:
            for table in ("_parameters", "_buffers", "_modules"):
                if table not in read:
                    self.note(owner, table)
            return
        while frame.f_code in self.between and frame.f_back is not None:
            frame = frame.f_back
        key = self.key_of(frame, ("vars",)) if name == "__dict__" else None
        if type(key) is str:
            self.note(owner, key)
        else:
            self.note_all(owner)

    def note_all(self, owner: object) -> None:
        """Note that all attributes of an object are read."""
        kept = self._kept.get((id(owner), 0))
        for name in cast("Iterable[str]", kept.before if kept is not None else ()):
            self.note(owner, name)
        self.everything.add(id(owner))
        self.whole_kinds.add(type(owner))

    def key_of(self, frame: FrameType, makers: Collection[str]) -> object:
        """The only key that code looks up in the mapping that it is getting now, as a ``__dict__``
        or by calling one of ``makers``; ``None`` if it may look up others."""
        code = frame.f_code
        if code is _CACHED:
            return frame.f_locals["self"].attrname
        steps = self._steps.get(id(code))
        if steps is None:
            steps = self._steps[id(code)] = Instructions(code)
        at = steps.at(frame.f_lasti)
        key = steps.key_of(at) if steps.makes(at, makers) else None
        return key and value_of(key, variables(frame), {})

    def stop(self) -> None:
        """Restore the attribute access of classes and modules."""
        for module in (*self._modules, *LOADED.values()):
            if type(module) is self._module_class:  # one that was imported is of sys' class
                module.__class__ = ModuleType
        for kind, before in self._classes.items():
            for name, own in before.items():
                if own is MISSING:
                    type.__delattr__(kind, name)
                else:
                    type.__setattr__(kind, name, own)


def _facts_of(owner: object) -> SharedObjects:
    """The facts about objects like a shared one."""
    return next(shared for shared in SHARED_OBJECTS if issubclass(type(owner), shared.kind))
