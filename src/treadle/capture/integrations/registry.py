"""All integrations, and the questions that the rest of capture asks about them as a whole.

To add a library: a file here with its ``Integration``, and its place in ``INTEGRATIONS``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

from treadle.capture.integrations.averaging import AVERAGING
from treadle.capture.integrations.data_parallel import DATA_PARALLEL
from treadle.capture.integrations.fully_sharded import FULLY_SHARDED
from treadle.capture.integrations.grad_scaler import GRAD_SCALER
from treadle.capture.integrations.integration import (
    Integration,
    Patch,
    SharedGenerator,
    SharedObjects,
    TracedRun,
)
from treadle.capture.integrations.logs import LOGGING, WARNINGS
from treadle.capture.integrations.numpy_arrays import NUMPY
from treadle.capture.integrations.operating_system import OPERATING_SYSTEM
from treadle.capture.integrations.standard_library import STANDARD_LIBRARY
from treadle.capture.integrations.torch_tracing import SYMPY, TORCH_TRACING

K = TypeVar("K")
V = TypeVar("V")


def by_name(integrations: Iterable[Integration]) -> Mapping[str, Integration]:
    """The integrations by name; ``ValueError`` for two of one name."""
    return _merged((integration.name, integration) for integration in integrations)


def _merged(items: Iterable[tuple[K, V]]) -> Mapping[K, V]:
    merged: dict[K, V] = {}
    for key, value in items:
        if key in merged:
            raise ValueError(f"{key} is registered twice")
        merged[key] = value
    return MappingProxyType(merged)


INTEGRATIONS = by_name(
    (
        TORCH_TRACING, SYMPY, NUMPY, OPERATING_SYSTEM, LOGGING, WARNINGS, *STANDARD_LIBRARY,
        AVERAGING, DATA_PARALLEL, FULLY_SHARDED, GRAD_SCALER,
    )
)  # fmt: skip


def all_of(field: Callable[[Integration], Iterable[V]]) -> tuple[V, ...]:
    """The values of a field in all integrations."""
    return tuple(value for integration in INTEGRATIONS.values() for value in field(integration))


def table_of(field: Callable[[Integration], Mapping[K, V]]) -> Mapping[K, V]:
    """The tables of all libraries as one; ``ValueError`` for two entries under one key."""
    return _merged(
        item for integration in INTEGRATIONS.values() for item in field(integration).items()
    )


SHARED_OBJECTS: tuple[SharedObjects, ...] = tuple(
    integration.shared for integration in INTEGRATIONS.values() if integration.shared is not None
)
SHARED_GENERATORS: tuple[SharedGenerator, ...] = tuple(
    integration.shared_generator
    for integration in INTEGRATIONS.values()
    if integration.shared_generator is not None
)
"""The random number generators that all code shares: Python's and NumPy's."""


def library_patches(run: TracedRun) -> Iterator[Patch]:
    """The replacements of library functions while ``run`` is traced."""
    for integration in INTEGRATIONS.values():
        yield from integration.patches(run)
