"""Warnings that name the user's line from which a call came."""

import contextlib
import sys
import warnings
from collections.abc import Callable

from treadle.util.package import FOLDER

_OWN = (FOLDER, contextlib.__file__)
"""Where frames of ours lie: those of a function inside a context manager go through the latter."""


def warn_user(message: str) -> None:
    """A ``RuntimeWarning`` at the nearest caller outside the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_again_at(file: str, line: int, call: Callable[[], object]) -> None:
    """What ``call`` warns of, as warnings of the user's line."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call()
    for each in heard:
        warnings.warn_explicit(each.message, each.category, file, line)
