"""Python functions that call the operating system, and functions of the same modules that do not.

The answers at a later call are unknown, so a step may not call the system. The working directory
and the recursion limit are compared at every call instead.
"""

import os
import sys

from treadle.capture.integrations.integration import Integration, ProcessState

_NOTHING = frozenset[str]()
_TEXT_ENCODING = frozenset({"text_encoding"})
_WORKING_DIRECTORY = ProcessState("the working directory", os.getcwd)

OPERATING_SYSTEM = Integration(
    name="os",
    harmless_calls={
        "time": frozenset({"sleep", "mktime", "strptime", "tzset", "get_clock_info"}),
        "posix": frozenset(
            {
                "fspath", "fsencode", "fsdecode", "strerror", "getcwd", "getcwdb", "putenv",
                "unsetenv", "register_at_fork", "getpid", "getppid", "uname", "cpu_count",
                "sched_getaffinity", "getuid", "geteuid", "getgid", "getegid", "sysconf",
                "confstr", "_exit", "abort", "kill", "_path_normpath", "_path_splitroot",
                "_path_splitroot_ex", "sched_yield", "isatty", "get_terminal_size",
                "device_encoding", "process_cpu_count",
            }
        ),
        "io": _TEXT_ENCODING,
        "_io": _TEXT_ENCODING,
        "_posixsubprocess": _NOTHING,
        "_socket": frozenset(
            {
                "htons", "htonl", "ntohs", "ntohl", "inet_aton", "inet_ntoa",
                "getdefaulttimeout",
            }
        ),
        "_uuid": _NOTHING,
        "resource": frozenset({"getpagesize"}),
        "fcntl": _NOTHING,
        "select": _NOTHING,
        "_posixshmem": _NOTHING,
    },
    clock_methods={"datetime": frozenset({"now", "utcnow", "today"})},
    process_state={
        "getcwd": _WORKING_DIRECTORY,
        "getcwdb": _WORKING_DIRECTORY,
        "getrecursionlimit": ProcessState("the recursion limit", sys.getrecursionlimit),
    },
)  # fmt: skip
