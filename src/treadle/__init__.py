"""treadle compiles whole PyTorch training steps."""

import importlib
from typing import TYPE_CHECKING

from treadle.util.collector import without_collector
from treadle.util.package import VERSION

if TYPE_CHECKING:
    from treadle.exports import *  # noqa: F403

__version__ = VERSION


def __getattr__(name: str) -> object:
    """Import names when the first of them is asked for: ``treadle --help`` needs none, and a step
    that starts from the cache needs those of ``api`` alone."""
    if name != "__all__" and name.startswith("__"):  # asked of every module by libraries
        raise _no_name(name)
    for module in ("treadle.api", "treadle.exports"):
        with without_collector():
            offered = importlib.import_module(module)
        names = {each: vars(offered)[each] for each in offered.__all__}
        globals().update(names)
        if name in names:
            return names[name]
    if name != "__all__":
        raise _no_name(name)
    globals()["__all__"] = offered.__all__
    return offered.__all__


def __dir__() -> list[str]:
    offered = importlib.import_module("treadle.exports")
    return sorted({*globals(), *offered.__all__})


def _no_name(name: str) -> AttributeError:
    return AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
