"""Calls to the operating system: the clock, files, random bytes, other processes. The answers at a
later call are unknown, and effects would happen only once.

Python calls the system through C functions of a few modules; every such call by user code, or by
Python's library on its behalf, is detected.
"""

from types import BuiltinFunctionType, FrameType, ModuleType

from treadle.capture.explain_errors import Line, show_line
from treadle.capture.integrations.registry import all_of, table_of
from treadle.util.errors import CaptureError

_HARMLESS = table_of(lambda integration: integration.harmless_calls)
_CLOCKS = table_of(lambda integration: integration.clock_methods)
_BACKGROUND = frozenset(all_of(lambda integration: integration.background_files))


def os_call_name(function: object) -> str:
    """The function's name as users write it (``time.time``); empty if it does not call the
    operating system."""
    if type(function) is not BuiltinFunctionType:
        return ""
    owner: object = function.__self__
    if isinstance(owner, ModuleType):
        module = ModuleType.__getattribute__(owner, "__name__")
        asks = module in _HARMLESS and function.__name__ not in _HARMLESS[module]
        shown = {"posix": "os", "_io": "io"}.get(module, module.strip("_"))
        return f"{shown}.{function.__name__}" if asks else ""
    if isinstance(owner, type) and function.__name__ in _CLOCKS.get(owner.__module__, ()):
        return f"{owner.__name__}.{function.__name__}"
    return ""


def is_introspection_frame(frame: FrameType) -> bool:
    """Whether its code reads sources for a message, or an object goes, whenever that is."""
    return frame.f_code.co_filename in _BACKGROUND or frame.f_code.co_name == "__del__"


def asks(name: str, line: Line) -> CaptureError:
    """TR-123 for a question on a line of the user's."""
    return CaptureError(
        f"the step calls {name}: every later call would repeat the operating system's answer, or "
        "its effect, from the capture",
        code="TR-123",
        where=show_line(line),
        remedy=(
            "call it before the step, and pass the result as an argument; measure times around "
            "the call, or with step.profile()"
        ),
    )
