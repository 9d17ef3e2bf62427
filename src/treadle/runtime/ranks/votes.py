"""Whether all ranks of a group are about to run the same step, and where their steps first differ.

::

    every rank            vote/7/of/2 = digest      vote/7/for/<digest> += 1      vote/7/given += 1
    the last of them      vote/7/verdict = same, or differ
    where they differ     vote/7/text/<digest> = the lines, from the first rank of each digest

A vote costs each rank three requests to the store and one for each read of the verdict, for any
number of ranks. The keys of one vote are deleted by the next.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from treadle.util.errors import GroupFailure

if TYPE_CHECKING:
    from torch import distributed

SAME, DIFFER = "same", "differ"
_NO_LINE = "an input or a result of the step, without a source line"


@final
@dataclass(frozen=True, slots=True)
class VariantText:
    """The part of a compiled step that all ranks must have in common: a line per node or
    collective, and the user's line of each, which need not be equal. ``digest`` is that of the
    lines."""

    lines: tuple[str, ...]
    wheres: tuple[str, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.lines) == len(self.wheres)
        digest = hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:32]
        object.__setattr__(self, "digest", digest)

    def text(self) -> str:
        """The text that ``parse`` reads."""
        return json.dumps([self.lines, self.wheres])

    @staticmethod
    def parse(text: str) -> "VariantText":
        """The inverse of ``text``."""
        lines, wheres = json.loads(text)
        return VariantText(tuple(lines), tuple(wheres))

    def shown(self, at: int) -> str:
        """A line and where it comes from."""
        if at >= len(self.lines):
            return "nothing: its step ends before this line"
        where = self.wheres[at]
        return self.lines[at] + (f"   at {where}" if where else "")


@final
class Votes:
    """One vote of ``ranks``: that of their call number ``call``."""

    def __init__(self, store: "distributed.Store", call: int, ranks: Sequence[int]) -> None:
        self.call = call
        self._store = store
        self._ranks = ranks
        self._base = f"vote/{call}"
        self._first = False  # of those with its digest

    def give(self, rank: int, variant: VariantText, previous: "tuple[int, str] | None") -> None:
        """Vote. ``previous``: call and digest of the previous vote, which nobody reads any more
        once all have voted in this one."""
        size = len(self._ranks)
        self._store.set(f"{self._base}/of/{rank}", variant.digest)
        self._first = self._store.add(f"{self._base}/for/{variant.digest}", 1) == 1
        if self._store.add(f"{self._base}/given", 1) < size:
            return
        same = self._store.add(f"{self._base}/for/{variant.digest}", 0) == size
        if previous is not None:
            self._clear(*previous)
        self._store.set(f"{self._base}/verdict", SAME if same else DIFFER)

    def tell(self, variant: VariantText) -> None:
        """Publish the lines of this rank, for ranks that look for the difference."""
        if self._first:
            self._store.set(f"{self._base}/text/{variant.digest}", variant.text())

    def is_open(self) -> bool:
        """Whether a rank has voted."""
        return self._store.check([f"{self._base}/given"])

    def is_decided(self) -> bool:
        """Whether all have voted."""
        return self._store.check([f"{self._base}/verdict"])

    def is_same(self) -> bool:
        """Whether the verdict is that all are the same; valid once it is decided."""
        return self._store.get(f"{self._base}/verdict").decode() == SAME

    def missing(self) -> list[int]:
        """The ranks that have not voted."""
        return [rank for rank in self._ranks if not self._store.check([f"{self._base}/of/{rank}"])]

    def difference(self, variant: VariantText) -> GroupFailure:
        """TR-502, the same on each rank; ``variant``: this rank's. Waits for the others' lines."""
        self.tell(variant)
        digests = {
            rank: self._store.get(f"{self._base}/of/{rank}").decode() for rank in self._ranks
        }
        texts = {
            digest: VariantText.parse(self._store.get(f"{self._base}/text/{digest}").decode())
            for digest in sorted(set(digests.values()))
        }
        return difference(digests, texts)

    def _clear(self, call: int, digest: str) -> None:
        base = f"vote/{call}"
        shared = [f"{base}/for/{digest}", f"{base}/given", f"{base}/verdict"]
        for key in [*shared, *[f"{base}/of/{rank}" for rank in self._ranks]]:
            self._store.delete_key(key)


def difference(digests: Mapping[int, str], texts: Mapping[str, VariantText]) -> GroupFailure:
    """TR-502: the first difference between the step of most ranks (that of the lowest rank if no
    step has most) and that of each other rank. ``digests`` by rank, ``texts`` by digest."""
    count = Counter(digests.values())
    usual = max(count, key=lambda digest: (count[digest], -_ranks_of(digest, digests)[0]))
    common = _ranks_of(usual, digests)
    told: list[str] = []
    where = ""
    for digest in sorted(count.keys() - {usual}, key=lambda key: _ranks_of(key, digests)):
        ranks = _ranks_of(digest, digests)
        at = _first_difference(texts[usual].lines, texts[digest].lines)
        told.append(
            f"{_called(ranks)} would run another step than {_called(common)}; the first line that "
            f"differs is number {at + 1}:\n"
            f"    rank {common[0]}: {texts[usual].shown(at)}\n"
            f"    rank {ranks[0]}: {texts[digest].shown(at)}"
        )
        where = where or "".join(texts[digest].wheres[at : at + 1])
    return GroupFailure(
        "\n  ".join(told),
        code="TR-502",
        where=where or _NO_LINE,
        remedy=(
            "make all ranks call the same step with batches of the same sizes and dtypes: "
            "drop_last=True or padding for the last batch, treadle.dynamic for sizes that "
            "differ; do not branch on the rank inside the step"
        ),
    )


def _ranks_of(digest: str, digests: Mapping[int, str]) -> list[int]:
    return sorted(rank for rank, voted in digests.items() if voted == digest)


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def _called(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
