"""The digest of Triton's own files, which is part of its cache keys: 0.4 s of reading, once per
process, in parallel with a start."""

import functools
import importlib
import threading


@functools.cache
def begun() -> threading.Thread:
    """Who works the digest out. Call it as soon as a kernel is sure to be loaded."""
    thread = threading.Thread(target=_work_out, name="treadle-triton-key", daemon=True)
    thread.start()
    return thread


def wait() -> None:
    """Until the digest is there, if it was begun: Triton would begin again."""
    if begun.cache_info().currsize:
        begun().join()


def _work_out() -> None:
    cache = importlib.import_module("triton.runtime.cache")
    digest = getattr(cache, "triton_key", None)  # Triton remembers it, where it has it
    if digest is not None:
        digest()
