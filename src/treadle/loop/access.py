"""What kernels read and write, and which of them must wait for others."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.algebra.extents import largest
from treadle.loop.kernel import Kernel
from treadle.loop.nest import loaded, stored
from treadle.loop.program import Buffer

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AccessSet:
    """What kernels read and write: by name, and by bytes of the arena."""

    reads: frozenset[str]
    writes: frozenset[str]
    read_bytes: tuple[Span, ...]
    write_bytes: tuple[Span, ...]

    @staticmethod
    def of(
        kernel: Kernel, buffers: Mapping[str, Buffer], offsets: Mapping[str, int]
    ) -> "AccessSet":
        """Of one kernel, whose buffers lie at ``offsets`` in the arena."""
        reads, writes = frozenset(loaded(kernel.body)), frozenset(stored(kernel.body))
        writes |= frozenset(kernel.scratch)

        def places(names: frozenset[str]) -> tuple[Span, ...]:
            return tuple(
                (offsets[name], offsets[name] + largest(buffers[name].nbytes))
                for name in sorted(names & offsets.keys())
            )

        return AccessSet(reads, writes, places(reads), places(writes))

    @property
    def overwrites(self) -> bool:
        """Whether the kernel writes what it reads, by name or by place."""
        return bool(self.reads & self.writes) or _overlap(self.read_bytes, self.write_bytes)

    def before(self, later: "AccessSet") -> bool:
        """Whether ``later`` must wait for these kernels."""
        return bool(
            self.writes & (later.reads | later.writes)
            or self.reads & later.writes
            or _overlap(self.write_bytes, later.read_bytes + later.write_bytes)
            or _overlap(self.read_bytes, later.write_bytes)
        )

    def joined(self, other: "AccessSet") -> "AccessSet":
        """What the kernels of both touch."""
        return AccessSet(
            self.reads | other.reads,
            self.writes | other.writes,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
        )


def _overlap(left: tuple[Span, ...], right: tuple[Span, ...]) -> bool:
    return any(a < d and c < b for a, b in left for c, d in right)
