"""Facts about a library that capture cannot discover.

Objects, code and changes of any library are followed alike. An ``Integration`` has the facts that
cannot be discovered: which code is not part of the step, which state is only a cache, which calls
do not depend on external state, and which of the library's functions must be replaced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, final

from treadle.capture.distributed.gradient_sync import GradientSync
from treadle.capture.python_state.parts import Part

Patch = tuple[object, str, Callable[..., object]]
"""The owner and the name of a function, and its replacement while a step is traced."""


class ScalesLosses(Protocol):
    """A gradient scaler's methods, as one run has them."""

    def methods(self) -> Iterator[Patch]:
        """The replacements of the scaler's own methods."""
        ...


class TracedRun(Protocol):
    """The run whose trace the patches of a library are part of."""

    @property
    def sync(self) -> GradientSync:
        """When gradients are averaged over ranks."""
        ...

    @property
    def scaling(self) -> ScalesLosses:
        """The work of scalers in the run."""
        ...


@final
@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of the process that no object shows: ``read`` gives a value that can be compared."""

    label: str
    read: Callable[[], object]


@final
@dataclass(frozen=True, slots=True)
class SharedObjects:
    """Objects of class ``kind`` that any code gets by a name, and that are shared and never copied.

    ``name`` and ``named``: the name of one, and the one of a name, if there is any.
    ``deciding``: the attributes on which a call of theirs depends; all others serve the library
    itself. ``behind``: by the name of an attribute that only repeats others, what reads those.
    """

    kind: type
    registry: object
    label: Callable[[object], str]
    name: Callable[[Any], str]
    named: Callable[[str], object | None]
    deciding: frozenset[str]
    behind: Mapping[str, Callable[[Any], None]]


@final
@dataclass(frozen=True, slots=True)
class GeneratorState:
    """How the state of a generator of random numbers is read and put back."""

    get: Callable[[], object]
    put: Callable[[Any], None]


@final
@dataclass(frozen=True, slots=True)
class SharedGenerator:
    """The generator of random numbers that the functions of ``module`` are methods of."""

    label: str
    module: ModuleType
    generator: object
    state: GeneratorState
    choice: object = None  # its function that takes one entry of a sequence, as an index is drawn


@final
@dataclass(frozen=True, slots=True)
class OutputMethod:
    """A method by which a library outputs a message. Every call of the step outputs it again.

    ``arguments`` takes a call apart into values, which may be those of the call to come, and named
    fields; ``replay(object, fields, *values)`` tells it.
    """

    owner: type
    name: str
    arguments: Callable[[Any], tuple[tuple[object, ...], dict[str, object]]]
    replay: Callable[..., None]


def _no_patches(_: TracedRun) -> Iterable[Patch]:
    return ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Integration:
    """One library. Files are given by how their paths begin, modules and variables by name."""

    name: str

    # Whose its code is.
    tracing_files: tuple[str, ...] = ()
    """Code that sees traced tensors and no object of the user's."""
    tracing_packages: tuple[str, ...] = ()
    """Packages whose objects are not inspected, as prefixes of dotted names that end in a dot."""
    library_files: tuple[str, ...] = ()
    """Installed code that counts as Python's own library."""
    reporting_files: frozenset[str] = frozenset()
    """Whole paths of code that only outputs messages: it runs beside the step."""
    background_files: frozenset[str] = frozenset()
    """Whole paths of code that runs whenever objects are freed, or reads source files for a
    message."""

    # What it keeps.
    caches: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """By module, the variables and attributes that hold caches and counts."""
    process_state: Mapping[str, ProcessState] = field(default_factory=dict[str, ProcessState])
    """By the name of a function, the state of the process that code which mentions it may have
    read."""
    shared: SharedObjects | None = None
    events: tuple[type, ...] = ()
    """Classes of objects that may be added to a container once, when the step is captured."""

    unchangeable: tuple[type, ...] = ()
    """Classes of immutable objects, which may be replaced by others made from equal arguments."""

    # What it asks of the operating system.
    harmless_calls: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """By C module that calls the system, the functions that only query and change nothing."""
    clock_methods: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """By module, the methods of its classes that read the time."""

    # What its objects are made of.
    sealed: tuple[type, ...] = ()
    """Classes whose objects hold nothing that Python code could set."""
    unseen: tuple[type, ...] = ()
    """Classes whose objects are not inspected, except shared ones."""
    namespaces: tuple[type, ...] = ()
    """Classes whose objects hold whatever others put there."""
    arrays: Mapping[type, Callable[[Any, str], Part]] = field(
        default_factory=dict[type, Callable[[Any, str], Part]]
    )
    """By class of array, the part with its numbers, under a label."""
    shared_generator: SharedGenerator | None = None
    generators: Mapping[type, Callable[[Any], GeneratorState | None]] = field(
        default_factory=dict[type, Callable[[Any], GeneratorState | None]]
    )
    """By class of generators of random numbers, their state, if they have one."""

    # What stands in the place of its functions.
    outputs: tuple[OutputMethod, ...] = ()
    patches: Callable[[TracedRun], Iterable[Patch]] = _no_patches
