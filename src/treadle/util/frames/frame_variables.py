"""The variables of a frame that runs."""

import functools
import sys
from collections.abc import Mapping
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType

_IS_UNSAFE = sys.version_info[:2] == (3, 13)


def variables(frame: FrameType) -> Mapping[str, object]:
    """``frame.f_locals``. On CPython 3.13 without those names that are a comprehension's own and
    that a function in it reads: until 3.13.2 looking at one ends the process (CPython issue
    128396)."""
    hidden = _hidden(frame.f_code) if _IS_UNSAFE else ()
    values = frame.f_locals
    if not hidden:
        return values
    code = frame.f_code
    names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}.difference(hidden)
    return {name: values[name] for name in names if name in values}


@functools.lru_cache(maxsize=1 << 12)
def _hidden(code: CodeType) -> tuple[str, ...]:
    """Cells among the local variables that are no parameters."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return tuple(name for name in code.co_varnames[count:] if name in code.co_cellvars)
