"""Starts without a trace: random programs, captured in one process, and called for the first time
in another one in which a kind of state is another. None is stale, and what nothing changed of is
used or says why not. With many sizes, the other process calls with one that the first never saw.

python tests/contract/test_start_generator.py --cases 20000 --seed 1
"""

import argparse
import collections
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import treadle
from contract.test_reads_generator import Finding, differs, valid
from contract.worlds import OPTIONS, Change, Maker, Probe, World, limited, program_of, same


@dataclass
class Starts:
    """What became of all cases. ``is_saved``: steps were saved and loaded. ``is_sized``: they were
    compiled for many sizes. ``reasons``: why captures were not there for others."""

    is_saved: bool = False
    is_sized: bool = False
    programs: int = 0
    used: int = 0  # programs that another process started without a trace
    cases: int = 0
    effective: int = 0  # in which the change made a difference in eager
    served: int = 0  # changes that made none, and after which nothing was traced either
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[Finding] = field(default_factory=list)


class Process:
    """A program in a process of its own, as far as the program can tell: all of it is new.
    ``saved``: a file to load the step from."""

    def __init__(self, text: str, options: treadle.Options, saved: Path | None = None) -> None:
        self.text = text
        self.world = World(text, "started")
        space = self.world.space
        model, optimizer = space["model"], space.get("opt", ())
        make = treadle.compile if saved is None else partial(treadle.load, saved)
        self.compiled = make(self.world.step, model=model, optimizer=optimizer, options=options)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()

    def call(self, size: int = 2) -> object:
        with limited():
            return self.compiled(*self.world.arguments(size))

    @property
    def is_untraced(self) -> bool:
        return self.compiled.compiled.untraced


def eager(text: str, change: Change | None = None) -> object:
    """What a process without treadle gives."""
    world = World(text, "started")
    try:
        if change is not None:
            world.run(change.do)
        return world.step(*world.arguments())
    finally:
        if change is not None and change.shared:
            world.run(change.undo)
        world.close()


def check(maker: Maker, probes: list[Probe], tally: Starts, each: int = 5) -> None:
    text = program_of(probes)
    with tempfile.TemporaryDirectory() as folder:
        later = Later(text, Path(folder), tally)
        if not first(later, probes, tally):
            return
        for probe in probes:
            for change in maker.random.sample(probe.changes, min(each, len(probe.changes))):
                changed(later, probe, change, tally)


@dataclass(frozen=True)
class Later:
    """How later processes get at what the first one captured: in its cache, or in a file, with a
    cache of their own."""

    text: str
    folder: Path
    tally: Starts

    @property
    def file(self) -> Path:
        return self.folder / "step"

    def first(self) -> Process:
        return Process(self.text, replace(OPTIONS, cache_dir=self.folder / "first"))

    def process(self) -> Process:
        if not self.tally.is_saved:
            return self.first()
        return Process(self.text, replace(OPTIONS, cache_dir=self.folder / "later"), self.file)


def first(later: Later, probes: list[Probe], tally: Starts) -> bool:
    """Captured in one process, and called in another; whether it started there without a trace."""
    text = later.text
    expected = eager(text)
    tally.programs += 1
    with later.first() as process:
        try:
            for size in (4, 3) if tally.is_sized else (2,):
                process.call(size)
        except Exception:
            return False  # the generator of reads tells of it
        reason = process.compiled.compiled.start.reason
        process.compiled.save(later.file)
    with later.process() as process:
        found = process.call()
        if not same(found, expected):
            label, detail = "; ".join(p.label for p in probes), differs(found, expected)
            tally.findings.append(Finding("stale", label, "another process", detail, text))
        if process.is_untraced:
            tally.used += 1
            return True
        if tally.is_sized:  # compiled at a second call, which finds what the first one filled
            reason = reason or process.compiled.compiled.start.differs
    tally.reasons[reason or "another text"] += 1
    if not reason:
        label = "; ".join(p.label for p in probes)
        tally.findings.append(Finding("restless", label, "another process", "", text))
    return False


def changed(later: Later, probe: Probe, change: Change, tally: Starts) -> None:
    """One case: a process in which the state is another before the first call."""
    text = later.text
    try:
        expected = eager(text, change)
    except Exception:
        return  # eager does not take it
    before = eager(text)
    tally.cases += 1
    tally.effective += not same(before, expected)
    with later.process() as process:
        try:
            process.world.run(change.do)
            found = process.call()
            tally.served += process.is_untraced
            if not same(found, expected):
                how = "stale" if process.is_untraced else "stale, traced"
                detail = differs(found, expected)
                text = f"{text}\n# then:\n{change.do}"
                tally.findings.append(Finding(how, probe.label, change.label, detail, text))
        except treadle.TreadleError as error:
            if not error.code.startswith("TR-1"):
                tally.findings.append(Finding("raw", probe.label, change.label, str(error), text))
        except Exception:
            last = traceback.format_exc().strip().splitlines()[-3:]
            tally.findings.append(Finding("raw", probe.label, change.label, "\n".join(last), text))
        finally:
            if change.shared:
                process.world.run(change.undo)


def generated(
    cases: int,
    seed: int,
    seconds: float = 1e9,
    probes: int = 3,
    *,
    is_saved: bool = False,
    is_sized: bool = False,
) -> Starts:
    maker, tally = Maker(random.Random(seed)), Starts(is_saved, is_sized)
    end = time.monotonic() + seconds
    while tally.cases < cases and time.monotonic() < end:
        made = [maker.probe() for _ in range(probes)] + [maker.of_module()]
        if found := valid(made):
            for probe in found:  # each alone: one that cannot be stored would hide the others
                check(maker, [probe], tally)
            check(maker, found, tally, each=2)
    return tally


@pytest.mark.parametrize(
    ("is_saved", "is_sized"),
    [(False, False), (False, True), (True, True)],
    ids=["cache", "cache, many sizes", "file, many sizes"],
)
def test_no_start_is_stale_and_what_did_not_change_is_used(is_saved: bool, is_sized: bool) -> None:
    tally = generated(cases=25, seed=23, seconds=60, is_saved=is_saved, is_sized=is_sized)
    assert not tally.findings, tally.findings[0]
    assert tally.used > tally.programs / 2, tally.reasons


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=12)
    parser.add_argument("--saved", action="store_true", help="steps that are saved and loaded")
    parser.add_argument("--sized", action="store_true", help="steps for many sizes")
    given = parser.parse_args()
    tally = generated(given.cases, given.seed, is_saved=given.saved, is_sized=given.sized)
    print(
        f"{tally.programs} programs, {tally.used} started without a trace; {tally.cases} changes, "
        f"{tally.effective} effective, {tally.served} served without a trace"
    )
    for reason, count in tally.reasons.most_common(12):
        print(f"{count:6}  {reason[:150]}")
    print(collections.Counter(each.how for each in tally.findings))
    for each in tally.findings[: given.show]:
        print(f"\n--- {each.how}: {each.label} | {each.change}\n{each.detail}\n{each.text}")


if __name__ == "__main__":
    main()
