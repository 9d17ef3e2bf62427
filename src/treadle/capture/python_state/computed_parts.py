"""Contents that a call returns, as parts of an object: of arrays, weak references, and others."""

import contextvars
from collections.abc import Callable
from typing import Any, final

from treadle.capture.python_state.parts import MISSING, Part, Reading


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
    """The value of a context variable, or its default."""

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
    """Objects in an array, or in an object made by C code. ``back`` restores one."""

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
