"""A check whether another process still exists, without a thread in it and without messages from
it.

Each process that can be checked listens on a port and never answers. The operating system accepts
connections to it as long as the process exists, even during a long kernel, and refuses them from
the moment it has ended, for whatever reason.
"""

import enum
import functools
import os
import socket
from dataclasses import dataclass
from typing import final

_PATIENCE = 2.0  # seconds for an answer of the system at the other end
_BACKLOG = 128


class Liveness(enum.StrEnum):
    """The result of a check."""

    THERE = "there"
    ENDED = "ended"
    UNKNOWN = "unknown"  # its host does not answer, or cannot be reached from here


@final
@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """Where a process is: its number on ``host``, and a port at an address of that host."""

    host: str
    process: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def text(self) -> str:
        """The text that ``parse`` reads."""
        return f"{self.host} {self.process} {self.address} {self.port}"

    @staticmethod
    def parse(text: str) -> "ProcessAddress":
        """The inverse of ``text``."""
        host, process, address, port = text.split()
        return ProcessAddress(host, int(process), address, int(port))

    def look(self) -> Liveness:
        """Whether the process exists now."""
        if self.address.startswith("127.") and self.host != socket.gethostname():
            return Liveness.UNKNOWN  # its loopback is not ours
        try:
            socket.create_connection((self.address, self.port), _PATIENCE).close()
        except ConnectionRefusedError:
            return Liveness.ENDED
        except OSError:
            return Liveness.UNKNOWN
        return Liveness.THERE


@functools.cache
def listening(near: str) -> ProcessAddress:
    """The address of this process, which exists from now on. ``near``: a host that all ranks
    reach; the address is of the interface through which this process reaches that host."""
    address = _interface(near)
    listener = socket.create_server((address, 0), backlog=_BACKLOG)
    os.register_at_fork(after_in_child=listener.close)  # a child is not this process
    _LISTENERS.append(listener)
    return ProcessAddress(socket.gethostname(), os.getpid(), address, listener.getsockname()[1])


_LISTENERS: list[socket.socket] = []  # open for as long as the process is


def _interface(near: str) -> str:
    if not near:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((near, 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return asking.getsockname()[0]
