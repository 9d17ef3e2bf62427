"""A language, as the compiler sees it: something that prints scheduled kernels."""

from collections.abc import Callable, Mapping
from typing import Protocol

from treadle.algebra.extents import sample_of
from treadle.loop.kernel import KernelLaunch
from treadle.loop.nest import arguments_of, bytes_moved
from treadle.loop.origins import profile_name
from treadle.loop.program import Buffer
from treadle.runtime.store.artifact import Launch, Source


class Printer(Protocol):
    """Prints the kernels of one plan, launch by launch, each function once."""

    def launch(self, launch: KernelLaunch) -> Launch:
        """How the host starts these kernels."""
        ...

    def sources(self) -> tuple[Source, ...]:
        """All that was printed."""
        ...


MakePrinter = Callable[[Mapping[str, Buffer], bool], Printer]
"""Of a plan's buffers, and whether a product and a sum may round once."""


def launch_of(
    launch: KernelLaunch,
    function: str,
    sizes: tuple[tuple[int, ...], ...],
    buffers: Mapping[str, Buffer],
) -> Launch:
    """The host step: for each kernel its arguments and sizes, and where it came from."""
    kernels = launch.kernels
    origins = [origin for kernel in kernels for origin in kernel.origins]
    return Launch(
        function=function,
        buffers=tuple(arguments_of(kernel) for kernel in kernels),
        sizes=sizes,
        kernels=tuple(kernel.name for kernel in kernels),
        bytes_moved=sample_of(sum(bytes_moved(kernel, buffers) for kernel in kernels)),
        origin=next((origin.where or origin.module for origin in origins), ""),
        shown=profile_name(function, [kernel.origins for kernel in kernels]),
    )
