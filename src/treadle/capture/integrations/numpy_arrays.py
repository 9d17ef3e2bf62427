"""NumPy: its arrays as parts of objects, its generator of random numbers. Its code counts as
Python's own library."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from treadle.capture.integrations.integration import GeneratorState, Integration, SharedGenerator
from treadle.capture.python_state.computed_parts import Computed, Items
from treadle.capture.python_state.parts import Part
from treadle.util.package import folder_of

Array = NDArray[np.generic]


def _part_of(value: Array, label: str) -> Part:
    """The numbers of an array; objects in one are entries."""
    if value.dtype.hasobject:
        return _of_objects(value, label)

    def read() -> tuple[tuple[int, ...], str, bytes]:
        numbers = _plain(value)
        return numbers.shape, numbers.dtype.str, numbers.tobytes()

    def back(kept: tuple[tuple[int, ...], str, bytes]) -> None:
        shape, dtype, held = kept
        numbers = _plain(value)
        if numbers.shape == shape and numbers.dtype.str == dtype:
            np.copyto(numbers, np.frombuffer(held, numbers.dtype).reshape(shape))

    return Computed(label, read, back)


def _of_objects(value: Array, label: str) -> Part:
    def put(at: int, held: object) -> None:
        objects = cast("NDArray[np.object_]", _plain(value))
        objects[np.unravel_index(at, objects.shape)] = held

    return Items(label, lambda: dict(enumerate(_plain(value).ravel().tolist())), put)


def _plain(value: Array) -> Array:
    """The array without its subclass: a masked array would fill its gaps."""
    return np.asarray(value)


def _legacy_state(generator: np.random.RandomState) -> GeneratorState:
    return GeneratorState(generator.get_state, generator.set_state)


def _bits_of(generator: np.random.Generator) -> GeneratorState:
    bits = generator.bit_generator

    def put(state: Mapping[str, object]) -> None:
        bits.state = state

    return GeneratorState(lambda: bits.state, put)


NUMPY = Integration(
    name="numpy",
    library_files=(folder_of(np),),
    sealed=(np.ufunc, np.dtype),
    arrays={ndarray: _part_of},
    shared_generator=SharedGenerator(
        "numpy.random",
        np.random,
        np.random.mtrand._rand,
        GeneratorState(np.random.get_state, np.random.set_state),
    ),
    generators={np.random.RandomState: _legacy_state, np.random.Generator: _bits_of},
)
