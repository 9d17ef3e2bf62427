"""What Python reads: random state, changed between calls. No compiled step is stale, and what a
step does not read compiles nothing.

python tests/contract/test_reads_generator.py --cases 20000 --seed 1
"""

import argparse
import collections
import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

import treadle
from contract.python_state import LAYERS
from contract.python_values import LEAVES, SCOPES
from contract.torch_state import TORCH
from contract.worlds import (
    OPTIONS,
    Change,
    Maker,
    Probe,
    Recompiles,
    World,
    limited,
    no_compiling,
    program_of,
    same,
)
from forks import Forks

NOT_YET: frozenset[str] = frozenset()
"""Kinds of state that are not generated."""


@dataclass
class Finding:
    """``how``: stale, raw, refused or spurious. ``text``: what to run to see it."""

    how: str
    label: str
    change: str
    detail: str
    text: str


@dataclass
class Tally:
    """What became of all cases."""

    cases: int = 0
    effective: int = 0  # in which the change made a difference in eager
    unread: int = 0  # changes of what the step does not read
    programs: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, how: str, probe: str, change: str, detail: str, text: str) -> None:
        self.findings.append(Finding(how, probe, change, detail, text))


class Beside:
    """A program in two worlds. ``unread``: state that is there, and that its step does not read."""

    def __init__(self, probes: list[Probe], unread: Sequence[Probe] = ()) -> None:
        self.text = "\n".join([*(each.text for each in unread), program_of(probes)])
        self.ours, self.theirs = World(self.text), World(self.text)
        space = self.ours.space
        self.compiled = treadle.compile(
            self.ours.step, model=space["model"], optimizer=space.get("opt", ()), options=OPTIONS
        )

    def both(self, change: Change, text: str) -> None:
        for world in (self.theirs, self.ours)[: 1 if change.shared else 2]:
            world.run(text)

    def eager(self) -> object:
        return self.theirs.step(*self.theirs.arguments())

    def call(self) -> object:
        with limited():
            return self.compiled(*self.ours.arguments())

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def differs(found: object, expected: object) -> str:
    """The first results that are not the same."""
    if not isinstance(found, list) or not isinstance(expected, list):
        return f"{found} instead of {expected}"
    pairs = enumerate(zip(found, expected, strict=False))
    return next(f"term {at}: {a} instead of {b}" for at, (a, b) in pairs if not same(a, b))


def valid(probes: list[Probe]) -> list[Probe]:
    """Those that eager takes."""
    found: list[Probe] = []
    for probe in probes:
        try:
            world = World(program_of([probe]))
        except Exception:
            continue
        try:
            world.step(*world.arguments())
            world.step(*world.arguments())
            found.append(probe)
        except Exception:
            pass
        finally:
            world.close()
    return found


def script(beside: Beside, change: Change | None = None) -> str:
    after = f"# then:\n{change.do}" if change else ""
    return f"{beside.text}\n{after}"


def begin(probes: list[Probe], tally: Tally) -> Beside | None:
    """The program after its first call, or nothing where that was refused or failed."""
    beside = Beside(probes)
    expected = beside.eager()
    label = "; ".join(each.label for each in probes)
    try:
        found = beside.call()
    except treadle.TreadleError as error:
        how = "refused" if error.code.startswith("TR-1") else "raw"
        if len(probes) == 1:
            tally.add(how, label, "first call", f"{error.code} {error.message}", script(beside))
    except Exception:
        if len(probes) == 1:
            last = traceback.format_exc().strip().splitlines()
            tally.add("raw", label, "first call", "\n".join(last[-3:]), script(beside))
    else:
        if same(found, expected) and is_at_rest(beside, label, tally):
            return beside
        if not same(found, expected):
            tally.add("stale", label, "first call", differs(found, expected), script(beside))
    beside.close()
    return None


def is_at_rest(beside: Beside, label: str, tally: Tally) -> bool:
    """Whether calls without a change compile nothing, once lazy values are there."""
    for _ in range(2):
        expected = beside.eager()
        try:
            found = beside.call()
        except Exception:
            last = traceback.format_exc().strip().splitlines()
            tally.add("raw", label, "second call", "\n".join(last[-3:]), script(beside))
            return False
        if not same(found, expected):
            tally.add("stale", label, "no change", differs(found, expected), script(beside))
            return False
    try:
        with no_compiling():
            beside.call()
    except Recompiles:
        words = "; ".join(beside.compiled.recompiles)
        tally.add("restless", label, "no change", words, script(beside))
        return False
    return True


def check_change(beside: Beside, probe: Probe, change: Change, tally: Tally) -> bool:
    """One case; whether the worlds may be used on."""
    before = beside.eager()
    try:
        beside.theirs.run(change.do)
        expected = beside.eager()
    except Exception:
        return False  # eager does not take it
    tally.cases += 1
    tally.effective += not same(before, expected)
    if not change.shared:
        beside.ours.run(change.do)
    how, detail = "", ""
    try:
        with no_compiling():
            found = beside.call()
        if not same(found, expected):
            how, detail = "stale", differs(found, expected)
    except Recompiles:
        pass
    except treadle.TreadleError as error:
        how = "refused" if error.code.startswith("TR-1") else "raw"
        detail = f"{error.code} {error.message}"
    except Exception:
        how, detail = "raw", "\n".join(traceback.format_exc().strip().splitlines()[-3:])
    if how:
        tally.add(how, probe.label, change.label, detail, script(beside, change))
    return not how


def check_again(beside: Beside, probe: Probe, change: Change, tally: Tally) -> bool:
    """After the change was taken back: no new variant; and at last a real call."""
    try:
        beside.both(change, change.undo)
        expected = beside.eager()
    except Exception:
        return False
    try:
        with no_compiling():
            found = beside.call()
    except Recompiles:
        if same(expected, beside.eager()):
            tally.add("spurious", probe.label, change.label, change.undo, "")
        return False
    except Exception:
        last = traceback.format_exc().strip().splitlines()
        tally.add("raw", probe.label, f"{change.label}, taken back", "\n".join(last[-3:]),
                  script(beside, change))  # fmt: skip
        return False
    if not same(found, expected):
        tally.add("stale", probe.label, f"{change.label}, taken back",
                  f"{differs(found, expected)}\n{change.undo}", script(beside, change))  # fmt: skip
    return True


GIVEN = ("argument", "attribute of a part of the model", "hook of a part of the model")
"""Scopes whose state is part of what a step is given, whether it reads it or not."""
SHARED = ("nn.Module", "Sequential")
"""Kinds that a model is made of."""


def is_apart(probe: Probe) -> bool:
    """Whether nothing but the probe itself tells of its state."""
    shared = any(each in probe.label for each in SHARED)
    return not shared and not probe.label.startswith(GIVEN)


def check_unread(maker: Maker, probes: list[Probe], tally: Tally, each: int = 4) -> None:
    """What a step does not read is changed, one at a time: nothing is compiled."""
    made = [maker.probe() for _ in range(6)]
    unread = valid(list(filter(is_apart, made)))
    beside = Beside(probes, unread)
    try:
        for _ in range(2):
            if not same(beside.call(), beside.eager()):
                return
    except Exception:
        return  # ``begin`` tells of it
    for probe in unread:
        for change in maker.random.sample(probe.changes, min(each, len(probe.changes))):
            try:
                beside.ours.run(change.do)
            except Exception:
                continue  # Python does not take it
            tally.unread += 1
            try:
                with no_compiling():
                    beside.call()
            except Recompiles:
                words = "; ".join(beside.compiled.recompiles[-2:])
                tally.add("restless", probe.label, change.label, words, script(beside, change))
                beside.close()
                return
    beside.close()


def check_really(beside: Beside, probe: Probe, change: Change, tally: Tally) -> None:
    """The change once more, with whatever is compiled then."""
    try:
        beside.both(change, change.do)
        expected = beside.eager()
    except Exception:
        return
    try:
        found = beside.call()
    except treadle.TreadleError as error:
        how = "refused" if error.code.startswith("TR-1") else "raw"
        tally.add(how, probe.label, change.label, f"{error.code} {error.message}",
                  script(beside, change))  # fmt: skip
    except Exception:
        last = traceback.format_exc().strip().splitlines()
        tally.add("raw", probe.label, change.label, "\n".join(last[-3:]), script(beside, change))
    else:
        if not same(found, expected):
            detail = f"compiled anew: {differs(found, expected)}"
            tally.add("stale", probe.label, change.label, detail, script(beside, change))


def check_program(maker: Maker, probes: list[Probe], tally: Tally, each: int = 5) -> None:
    """Every probe's changes, one at a time."""
    tally.programs += 1
    beside = begin(probes, tally)
    if beside is None:
        if len(probes) > 1:
            for probe in probes:
                check_program(maker, [probe], tally, each)
        return
    todo = [
        (p, c) for p in probes for c in maker.random.sample(p.changes, min(each, len(p.changes)))
    ]
    last = None
    for probe, change in todo:
        good = check_change(beside, probe, change, tally)
        last = (probe, change)
        if not good and change.shared:
            beside.theirs.run(change.undo)
        if not good or not check_again(beside, probe, change, tally):
            beside.close()
            beside = begin(probes, tally)
            if beside is None:
                return
    if last is not None:
        check_really(beside, *last, tally)
        if last[1].shared:
            beside.theirs.run(last[1].undo)
    beside.close()


def generated(cases: int, seed: int, seconds: float = 1e9, probes: int = 8) -> Tally:
    maker, tally = Maker(random.Random(seed), not_yet=NOT_YET), Tally()
    end = time.monotonic() + seconds
    while tally.cases + tally.unread < cases and time.monotonic() < end:
        made = [maker.probe() for _ in range(probes)] + [maker.of_module() for _ in range(2)]
        if found := valid(made):
            check_program(maker, found, tally)
            check_unread(maker, found[:4], tally)
        if maker.random.random() < 0.5 and (found := valid([maker.of_torch()])):
            check_program(maker, found, tally, each=3)
    return tally


def every_torch(looks: int = 99) -> Tally:
    """So many looks at each kind of PyTorch's and the process' state, with all changes."""
    maker, tally = Maker(random.Random(0)), Tally()
    for kind in [each for each in TORCH if each.name not in NOT_YET]:
        for look in kind.looks[:looks]:
            probes = valid([maker.of_torch(kind, look)])
            if not probes:
                print("not valid:", kind.name, look)
            else:
                check_program(maker, probes, tally, each=99)
    return tally


def every_kind(seed: int = 0) -> Tally:
    """Each scope, each layer and each leaf beside ordinary others, with all changes."""
    maker, tally = Maker(random.Random(seed), not_yet=NOT_YET), Tally()
    plain = [each for each in LEAVES if each.name in ("numbers in a list", "number", "text")]
    ordinary = [each for each in LAYERS if each.name in ("dict", "list", "object")]
    made = [
        maker.of(scope, [maker.random.choice(ordinary)], maker.random.choice(plain))
        for scope in SCOPES
        if scope.name not in NOT_YET
    ]
    made += [
        maker.of(SCOPES[0], [layer], maker.random.choice(plain[:2]))
        for layer in LAYERS
        if layer.name not in NOT_YET
    ]
    made += [maker.of(SCOPES[0], [], leaf) for leaf in LEAVES if leaf.name not in NOT_YET]
    for at in range(0, len(made), 8):
        check_program(maker, valid(made[at : at + 8]), tally, each=99)
    return tally


def summary(tally: Tally, shown: int = 3) -> str:
    counts = collections.Counter(each.how for each in tally.findings)
    lines = [f"{tally.cases} cases, {tally.effective} of them with a difference in eager; "
             f"{tally.unread} changes of what is not read; "
             f"{tally.programs} programs; {dict(counts)}"]  # fmt: skip
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in tally.findings:
        groups.setdefault((each.how, each.change), []).append(each)
    for (how, change), those in sorted(groups.items(), key=lambda item: -len(item[1])):
        if how in ("stale", "raw", "refused", "restless") or shown > 3:
            lines.append(f"{how} {len(those)}x  {change}")
            lines += [f"      {one.label}\n          {one.detail[:300]}" for one in those[:shown]]
    return "\n".join(lines)


def wrong(tally: Tally) -> list[Finding]:
    return [each for each in tally.findings if each.how in ("stale", "raw", "restless")]


def generates(forks: Forks, *options: str) -> None:
    """Run this file in a process of its own, whose state nobody else has changed."""
    done = forks.run(Path(__file__), *options, "--texts", "1", quiet=True, seconds=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("seed", range(2))
def test_no_step_is_stale(forks: Forks, seed: int):
    generates(forks, "--cases", "150", "--seed", str(seed))


UNREAD = """
UNREAD, READ = 1, 2.0
class Trainer:
    unread = 1
    def __init__(self):
        self.epoch, self.scale = 0, 1.0
    def probe(self, x, given):
        return READ * self.scale + x
    def other(self):
        return UNREAD * self.unread
trainer = Trainer()
ARGUMENTS.update(number=1, text="a", items=[1], array=np.zeros(2))
"""


def test_what_was_not_read_compiles_nothing():
    call = "trainer.probe(x, given)"
    beside = Beside([Probe("unread", UNREAD, call, ())])
    beside.call(), beside.call()
    changes = (
        "UNREAD = 2",
        "trainer.epoch = 5",
        "trainer.new = 5",
        "Trainer.unread = 7",
        "Trainer.other = lambda self: 3",
        "model.epoch = 3",
        "ARGUMENTS['number'] = 7",
        "ARGUMENTS['text'] = 'b'",
    )
    for change in changes:
        beside.ours.run(change)
        with no_compiling():
            beside.call()
    beside.close()


def main() -> None:
    """Exit status 1 if something is wrong, or hardly anything was looked at."""
    threading.excepthook = lambda _: None  # of a thread of a program: what it left out is compared
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shown", type=int, default=2)
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--kinds", action="store_true", help="all of Python's kinds once")
    parser.add_argument("--torch", action="store_true", help="all of PyTorch's kinds once")
    parser.add_argument("--looks", type=int, default=99, help="at each of PyTorch's kinds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start, cpu = time.perf_counter(), time.process_time()
    if given.torch:
        tally = every_torch(given.looks)
    elif given.kinds:
        tally = every_kind(given.seed)
    else:
        tally = generated(given.cases, given.seed, given.seconds)
    print(summary(tally, given.shown))
    for each in wrong(tally)[: given.texts]:
        print("=" * 30, each.how, each.label, "|", each.change, each.detail, each.text, sep="\n")
    print(f"{time.perf_counter() - start:.1f} s, {time.process_time() - cpu:.1f} s of the CPU")
    few = not (given.torch or given.kinds) and tally.effective <= 0.25 * tally.cases
    sys.exit(bool(wrong(tally)) or few)


if __name__ == "__main__":
    main()
