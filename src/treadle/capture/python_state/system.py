"""Questions to the operating system: the clock, files, random bytes, other processes. What it would
answer at a later call nobody can know, and what it was told to do would be done once.

Python asks through functions made in C, of a few modules; each call of one that code of the user's
makes, or Python's library for it, is noticed.
"""

from types import BuiltinFunctionType, FrameType, ModuleType

from treadle.capture.explain_errors import Line, show_line
from treadle.util.errors import CaptureError

_HARMLESS = {
    "time": {"sleep", "mktime", "strptime", "tzset", "get_clock_info"},
    "posix": {
        "fspath", "fsencode", "fsdecode", "strerror", "getcwd", "getcwdb", "putenv", "unsetenv",
        "register_at_fork", "getpid", "getppid", "uname", "cpu_count", "sched_getaffinity",
        "getuid", "geteuid", "getgid", "getegid", "sysconf", "confstr", "_exit", "abort", "kill",
        "_path_normpath", "_path_splitroot", "_path_splitroot_ex", "sched_yield", "isatty",
        "get_terminal_size", "device_encoding", "process_cpu_count",
    },
    "io": {"text_encoding"},
    "_io": {"text_encoding"},
    "_posixsubprocess": set[str](),
    "_socket": {"htons", "htonl", "ntohs", "ntohl", "inet_aton", "inet_ntoa", "getdefaulttimeout"},
    "_uuid": set[str](),
    "resource": {"getpagesize"},
    "fcntl": set[str](),
    "select": set[str](),
    "_posixshmem": set[str](),
}  # fmt: skip
"""By module, the functions that do not ask or change anything, or whose answers are looked at
otherwise (the working directory)."""
_NOW = {"now", "utcnow", "today"}
_ASIDE = (
    "linecache.py",
    "traceback.py",
    "warnings.py",
    "tracemalloc.py",
    "inspect.py",
    "weakref.py",
)
"""Python's own reading of sources, and what it does when objects go."""


def os_call_name(function: object) -> str:
    """How the user writes it (``time.time``); empty for what asks the operating system nothing."""
    if type(function) is not BuiltinFunctionType:
        return ""
    owner: object = function.__self__
    if isinstance(owner, ModuleType):
        module = ModuleType.__getattribute__(owner, "__name__")
        asks = module in _HARMLESS and function.__name__ not in _HARMLESS[module]
        shown = {"posix": "os", "_io": "io"}.get(module, module.strip("_"))
        return f"{shown}.{function.__name__}" if asks else ""
    if isinstance(owner, type) and owner.__module__ == "datetime" and function.__name__ in _NOW:
        return f"{owner.__name__}.{function.__name__}"
    return ""


def is_introspection_frame(frame: FrameType) -> bool:
    """Whether its code reads sources for a message, or an object goes, whenever that is."""
    return frame.f_code.co_filename.endswith(_ASIDE) or frame.f_code.co_name == "__del__"


def asks(name: str, line: Line) -> CaptureError:
    """TR-123 for a question on a line of the user's."""
    return CaptureError(
        f"the step calls {name}: what the operating system answers, or does, would be that of the "
        "capture at every later call",
        code="TR-123",
        where=show_line(line),
        remedy="ask before the step, and pass the answer as an argument; measure times around the "
        "call, or by step.profile()",
    )


__all__ = ["asks", "is_introspection_frame", "os_call_name"]
