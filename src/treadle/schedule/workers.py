"""What runs a kernel: threads of a CPU or programs of a GPU. Each has its own module for
choices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.loop.kernel import Kernel, KernelSchedule
from treadle.loop.program import Buffer, BufferKind, Call
from treadle.schedule import programs, threads
from treadle.schedule.fuse import Descends, Sweeps
from treadle.schedule.scratch import Scratch


def _never(rows: int, cols: int, sums: int) -> bool:
    del rows, cols, sums
    return False


def _always(rows: int, cols: int) -> bool:
    del rows, cols
    return True


@dataclass(frozen=True, slots=True)
class Workers:
    """How kernels are cut up for one kind of worker.

    ``prepared``: the kernels that do the work of one. ``choose``: the schedule of each.
    ``alternatives``: others that are worth trying, the chosen one among them. ``scratch_of``: what
    a kernel needs beside its operands under a schedule. ``joins``: at multiples
    of how many bytes rows of a part of a larger buffer must begin for products written into it to
    take no longer, as measured (decision 0012); 0: anything takes longer. ``computes_again``:
    whether cheap values are computed by each kernel that has their operands at hand. ``sweeps``:
    whether one kernel may reduce so many rows and columns, with that many sums over the rows.
    ``descends``: whether one may go down so many rows of so many columns more than once.
    """

    prepared: Callable[[Kernel], tuple[Kernel, ...]]
    choose: Callable[[Kernel], KernelSchedule]
    alternatives: Callable[[Kernel], tuple[KernelSchedule, ...]]
    scratch_of: Callable[[Kernel, KernelSchedule], tuple[Scratch, ...]]
    joins: int = 0
    computes_again: bool = False
    sweeps: Sweeps = _never
    descends: Descends = _always

    def scheduled(self, kernel: Kernel) -> Kernel:
        """The kernel with its schedule and the names of its scratch."""
        return self.under(kernel, self.choose(kernel))

    def rounding_each(self) -> "Workers":
        """The same, where each operation rounds as it does alone: no sum is scaled."""

        def apart(how: KernelSchedule) -> KernelSchedule:
            return replace(how, running=(), unrolled=1)

        return replace(
            self,
            choose=lambda kernel: apart(self.choose(kernel)),
            alternatives=lambda kernel: tuple(
                dict.fromkeys(apart(how) for how in self.alternatives(kernel))
            ),
        )

    def under(self, kernel: Kernel, how: KernelSchedule) -> Kernel:
        """The kernel under a given schedule."""
        count = len(self.scratch_of(kernel, how))
        names = tuple(f"{kernel.name}_part{n}" for n in range(count))
        return replace(kernel, schedule=how, scratch=names)


THREADS = Workers(
    threads.prepared,
    threads.choose,
    threads.alternatives,
    threads.scratch_of,
    joins=1,
    descends=threads.descends,
)
PROGRAMS = Workers(
    programs.prepared,
    programs.choose,
    programs.alternatives,
    programs.scratch_of,
    joins=16,
    computes_again=True,
    sweeps=programs.sweeps,
)
WORKERS: Mapping[str, Workers] = {"threads": THREADS, "programs": PROGRAMS}
"""By the word that a target's record says."""


def workers_for(word: str, *, rounds_once: bool) -> Workers:
    """The workers of a target. ``rounds_once``: whether what operations make may round once."""
    found = WORKERS[word]
    return found if rounds_once else found.rounding_each()


def scratch_buffers(
    steps: Sequence[Kernel | Call], workers: Workers, *, device: str
) -> dict[str, Buffer]:
    """The buffers of all scratch, by name."""
    found: dict[str, Buffer] = {}
    for step in steps:
        if isinstance(step, Kernel) and step.scratch:
            wanted = workers.scratch_of(step, step.scheduled)
            for name, scratch in zip(step.scratch, wanted, strict=True):
                found[name] = _buffer(name, scratch, device)
    return found


def _buffer(name: str, scratch: Scratch, device: str) -> Buffer:
    made = Buffer(name, scratch.dtype, (scratch.count,), (1,), BufferKind.TEMPORARY)
    return replace(made, device=device) if device else made
