"""The garbage collector, paused while many small objects are created."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OLDEST = 2
"""The generation that what survives a collection of the younger ones belongs to."""


@contextmanager
def without_collector() -> Iterator[None]:
    """No collections inside; whatever held before holds again after, also after an error.

    A compile makes a few million small objects and few cycles. Going through them again and
    again took a third of its time, and going through them after each of its stages a tenth. At the
    end they are gone through once: what is left has lived long, and the collector would go through
    it again for each of its younger generations.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(_OLDEST - 1)
            gc.enable()
