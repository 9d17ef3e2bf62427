"""Which kernels share a launch: equal functions on other buffers, none of which has to wait.

::

    before:  update p0;  update p1;  y <- f(p1);  update p2
    after:   update p0, p1, p2;  y <- f(p1)
"""

import math
from collections.abc import Hashable, Sequence

from treadle.algebra.extents import largest
from treadle.loop.access import AccessSet
from treadle.loop.kernel import Kernel, KernelKind, KernelLaunch, KernelPlan
from treadle.loop.nest import arguments_of, reductions_of
from treadle.loop.program import Call
from treadle.schedule.equality import kernel_key
from treadle.util.allocator import Allocator

_ENTRY = 8
"""Bytes: of an address, a size, or two numbers of 32 bits."""


def launches_of(plan: KernelPlan) -> tuple[KernelLaunch | Call, ...]:
    """The steps of ``plan`` in the order in which the host starts them."""
    numbers: dict[Hashable, int] = {}
    found: list[KernelLaunch | Call] = []
    for run in _runs(plan.steps):
        if isinstance(run, Call):
            found.append(run)
            continue
        keys = [kernel_key(kernel, plan.buffers) for kernel in run]
        functions = [numbers.setdefault(key, len(numbers)) for key in keys]
        for group in _groups(run, functions, plan):
            kernels = tuple(run[position] for position in group)
            found.append(KernelLaunch(kernels, functions[group[0]]))
    return tuple(found)


def table_bytes(plan: KernelPlan, allocator: Allocator) -> int:
    """Bytes that the launches of several kernels hold, from the first call on: the addresses of
    their buffers, twice (``runtime/kernels/triton_launch``), their sizes, and for each program the
    kernel that it is of and its number there. Of dynamic shapes, for the largest sizes."""
    if not allocator.tables:
        return 0
    total = 0
    for launch in launches_of(plan):
        if isinstance(launch, Call) or len(launch.kernels) == 1:
            continue
        programs = sum(map(_programs, launch.kernels))
        addresses = sum(len(arguments_of(kernel)) for kernel in launch.kernels)
        sizes = 2 * len(launch.kernels)
        tables = (programs, addresses, addresses, sizes)
        total += sum(allocator.taken(_ENTRY * entries) for entries in tables)
    return total


def _programs(kernel: Kernel) -> int:
    """They share the axes that the kernel does not reduce."""
    how, axes = kernel.scheduled, [(kernel.rows, 0), (kernel.cols, 1)]
    if reductions_of(kernel):
        axes = axes[1:] if kernel.kind is KernelKind.COLUMNS else axes[:1]
    blocks = how.rows, how.cols
    counts = (-(-largest(axis.extent) // (blocks[at] or largest(axis.extent))) for axis, at in axes)
    return math.prod(counts)


def _runs(steps: Sequence[Kernel | Call]) -> list[list[Kernel] | Call]:
    """Stretches of kernels, and the calls between them."""
    runs: list[list[Kernel] | Call] = []
    for step in steps:
        if isinstance(step, Call):
            runs.append(step)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _groups(run: Sequence[Kernel], functions: Sequence[int], plan: KernelPlan) -> list[list[int]]:
    """Positions of ``run`` in launches. A kernel moves forward to an earlier launch of the same
    function when nothing on the way touches its data; one with scratch runs alone."""
    groups: list[list[int]] = []
    touched: list[AccessSet] = []
    for position, kernel in enumerate(run):
        mine = AccessSet.of(kernel, plan.buffers, plan.offsets)
        place = None
        for candidate in reversed(range(len(groups))):
            if touched[candidate].before(mine):
                break
            first = groups[candidate][0]
            if functions[first] == functions[position] and not kernel.scratch:
                place = candidate
                break
        if place is None:
            groups.append([position])
            touched.append(mine)
        else:
            groups[place].append(position)
            touched[place] = touched[place].joined(mine)
    return groups
