"""treadle compiles whole PyTorch training steps."""

import importlib
from typing import TYPE_CHECKING

from treadle.util.collector import without_collector
from treadle.util.package import VERSION

if TYPE_CHECKING:
    from treadle.exports import *  # noqa: F403

__version__ = VERSION


def __getattr__(name: str) -> object:
    """Import all names when the first of them is asked for: ``treadle --help`` needs none."""
    if name != "__all__" and name.startswith("__"):  # asked of every module by libraries
        raise _no_name(name)
    with without_collector():
        offered = importlib.import_module("treadle.exports")
    names = ("__all__", *offered.__all__)
    globals().update({offer: vars(offered)[offer] for offer in names})
    if name not in globals():
        raise _no_name(name)
    return globals()[name]


def __dir__() -> list[str]:
    offered = importlib.import_module("treadle.exports")
    return sorted({*globals(), *offered.__all__})


def _no_name(name: str) -> AttributeError:
    return AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
