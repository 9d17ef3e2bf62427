"""What Python changes: random effects inside of a step, and after each call everything that can be
seen is what eager leaves, or the step was refused and left everything as it was.

    python tests/contract/test_effects_generator.py --programs 2000 --seed 1
"""

import argparse
import collections
import contextlib
import io
import itertools
import random
import re
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import treadle
from contract.python_effects import BEGIN, EFFECTS, STEP, VALUES, Effect, Picture, difference
from contract.python_state import LAYERS
from contract.python_values import LEAVES, SCOPES
from contract.worlds import OPTIONS, World, limited

ONCE = frozenset({"logging", "print", "print into a buffer", "lru_cache"})
"""Effects that happen when a step is captured, and not again, as docs/howto/python.md says."""

NOT_YET = ONCE | {
    "file",  # refused, and stays written
    "manual_seed at the end",  # refused, and the next numbers are others
    "generator object",  # refused, and stays advanced
    "given returned",
    "iterator",  # refused, and stays advanced
    "iterator over a list",
}
"""Effects that are not generated: the others are known to be wrong, and are to go."""


@dataclass
class Found:
    """``how``: stale (not eager's state), raw, changed (refused, and left a change), refused."""

    how: str
    label: str
    detail: str
    text: str


@dataclass
class Tally:
    cases: int = 0
    programs: int = 0
    invalid: int = 0
    found: list[Found] = field(default_factory=list)


def text_of(effects: list[Effect], numbers: list[int]) -> str:
    """A program with these effects."""
    at: dict[str, list[str]] = collections.defaultdict(lambda: ["pass"])
    for effect, n in zip(effects, numbers, strict=True):
        at[effect.at].append(effect.text.format(n=n))
    before = "\n".join(e.before.format(n=n) for e, n in zip(effects, numbers, strict=True))
    pairs = list(zip(effects, numbers, strict=True))
    return BEGIN + before + STEP.format(
        **{place: "\n    ".join(at[place]) for place in ("start", "forward", "backward", "end")},
        gives=", ".join(e.gives.format(n=n) for e, n in pairs if e.gives),
        view=", ".join(e.view.format(n=n) for e, n in pairs),
    )  # fmt: skip


class Looked:
    """A world that is called and looked at."""

    def __init__(self, text: str, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.world = World(text)
        space = self.world.space
        self.step = self.world.step
        if compiled:
            self.step = treadle.compile(
                self.step, model=space["model"], optimizer=space["opt"], options=OPTIONS
            )
        self.random = torch.get_rng_state()

    def call(self, number: int) -> Any:
        """The result and what can be seen afterwards."""
        torch.set_rng_state(self.random)
        space = self.world.space
        x = torch.tensor([0.5, -0.25], dtype=torch.float64) * (number + 1)
        given = space["ARGUMENTS"]
        arguments = (x,) if given is None else (x, given)
        with limited(), contextlib.redirect_stdout(io.StringIO()) as out:
            result = self.step(*arguments)
        return self.seen(result, [*arguments, out.getvalue()])

    def seen(self, result: Any = None, arguments: Any = None) -> Any:
        space = self.world.space
        try:
            picture = Picture()
            try:
                more = space["view"]()
            except Exception as error:  # not made yet
                more = repr(error)
            return picture.of([space["model"], space["opt"], result, arguments, more])
        finally:
            self.random = torch.get_rng_state()
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)


def check(effects: list[Effect], numbers: list[int], tally: Tally, calls: int = 3) -> None:
    text, label = text_of(effects, numbers), " + ".join(e.name for e in effects)
    try:
        theirs = Looked(text, compiled=False)
        expected = [theirs.call(number) for number in range(calls)]
    except Exception:
        tally.invalid += 1
        return
    tally.programs += 1
    ours = Looked(text, compiled=True)
    start = ours.seen()
    for number in range(calls):
        tally.cases += len(effects)
        how, detail = "", ""
        try:
            found = ours.call(number)
            detail = difference(found, expected[number])
            how = "stale" if detail else ""
        except treadle.TreadleError as error:
            how = "refused" if error.code.startswith("TR-1") else "raw"
            detail = f"{error.code} {error.message}"
        except Exception:
            how, detail = "raw", "\n".join(traceback.format_exc().strip().splitlines()[-3:])
        if (
            how in ("raw", "refused")
            and number == 0
            and (changed := difference(ours.seen(), start))
        ):
            tally.found.append(Found("changed", label, f"{detail}; and left {changed}", text))
        if how:
            if len(effects) > 1 and how == "refused":
                for effect, n in zip(effects, numbers, strict=True):
                    check([effect], [n], tally, calls)
                return
            known = all(e.refusable for e in effects)
            if not (how == "refused" and known):
                tally.found.append(Found(how, label, f"call {number}: {detail}", text))
            break
    ours.world.close()
    theirs.world.close()


class Maker:
    """Random effects on the state of ``python_state.py``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.scopes = [s for s in SCOPES if "    return {e}" in s.text and "given" not in s.text]

    def effect(self) -> tuple[Effect, int]:
        n = next(self.numbers)
        if self.random.random() < 0.3:
            return self.random.choice([e for e in EFFECTS if e.name not in NOT_YET]), n
        scope = self.random.choice(self.scopes)
        layers = [self.random.choice(LAYERS) for _ in range(self.random.choice((1, 1, 2, 3)))]
        leaf = self.random.choice(LEAVES)
        numbers = [next(self.numbers) for _ in [*layers, leaf]]
        value = self.random.choice(leaf.values).format(n=numbers[-1])
        before = [leaf.before.format(n=numbers[-1])]
        for layer, number in reversed(list(zip(layers, numbers, strict=False))):
            before.append(layer.before.format(n=number, c=value))
            value = layer.build.format(n=number, c=value)
        o, name = scope.inner.format(n=n), scope.name
        for layer, number in zip(layers[:-1], numbers, strict=False):
            o = layer.reads[0].format(o=o, n=number)
            name += f" / {layer.name}"
        layer, number = layers[-1], numbers[len(layers) - 1]
        if layer.puts and self.random.random() < 0.7:
            put, what = self.random.choice(layer.puts), self.random.choice(VALUES)
            do = put.replace("{n}", str(number)).replace("{o}", o).replace("{v}", what)
            do = do.replace("{{", "{").replace("}}", "}")
        elif leaf.edits:
            do, _ = self.random.choice(leaf.edits)
            put, what = do, leaf.name
            do = do.format(o=layer.reads[0].format(o=o, n=number), n=numbers[-1])
        else:
            put, what = "nothing", leaf.name
            do = "pass"
        name += f" / {layer.name}: {put} with {what}"
        text = scope.text.format(n=n, c=value, e="@E@")
        text = re.sub(r"( +)return @E@", lambda m: f"{m[1]}{do}\n{m[1]}return 0.0", text)
        call, root = scope.call.format(n=n), scope.root.format(n=n)
        escaped = [each.replace("{", "{{").replace("}", "}}") for each in ("\n".join(before), text)]
        view = root.replace("{", "{{").replace("}", "}}")
        return Effect(
            name, call, "\n".join(escaped), at=self.random.choice(("start", "end")), view=view
        ), n


def generated(programs: int, seed: int, seconds: float = 1e9) -> Tally:
    maker, tally, end = Maker(seed), Tally(), time.monotonic() + seconds
    while tally.programs < programs and time.monotonic() < end:
        pairs = [maker.effect() for _ in range(maker.random.choice((1, 1, 2, 3)))]
        check([e for e, _ in pairs], [n for _, n in pairs], tally)
    return tally


def every_effect(together: int = 1) -> Tally:
    """``together``: that happen in one step, where they can and none may be refused."""
    tally = Tally()
    effects = [each for each in EFFECTS if each.name not in NOT_YET]
    alone = [[each] for each in effects if each.refusable]
    others = [each for each in effects if not each.refusable]
    groups = [others[at : at + together] for at in range(0, len(others), together)]
    while groups or alone:
        group = groups.pop(0) if groups else alone.pop(0)
        before = tally.invalid
        check(group, list(range(1, len(group) + 1)), tally)
        if tally.invalid > before and len(group) > 1:
            tally.invalid = before
            alone += [[each] for each in group]
        elif tally.invalid > before:
            print("not valid:", group[0].name)
    return tally


def summary(tally: Tally, shown: int = 5) -> str:
    counts = collections.Counter(each.how for each in tally.found)
    lines = [
        f"{tally.programs} programs, {tally.cases} cases, {tally.invalid} not valid; {dict(counts)}"
    ]
    for how in ("stale", "changed", "raw", "refused"):
        those = [each for each in tally.found if each.how == how]
        lines += [f"{how}  {one.label}\n          {one.detail[:260]}" for one in those[:shown]]
    return "\n".join(lines)


def wrong(tally: Tally) -> list[Found]:
    return [each for each in tally.found if each.how != "refused"]


def test_each_effect_happens_as_in_eager_or_is_refused():
    tally = every_effect(together=5)
    assert not wrong(tally), summary(tally)


def test_random_effects_happen_as_in_eager_or_are_refused():
    tally = generated(20, seed=0)
    assert not wrong(tally), summary(tally) + "\n" + wrong(tally)[0].text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shown", type=int, default=40)
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="each written effect once")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start, cpu = time.perf_counter(), time.process_time()
    tally = every_effect() if given.every else generated(given.programs, given.seed, given.seconds)
    print(summary(tally, given.shown))
    for each in [f for f in tally.found if f.how != "refused"][: given.texts]:
        print("=" * 30, each.how, each.label, each.detail, each.text, sep="\n")
    print(f"{time.perf_counter() - start:.1f} s, {time.process_time() - cpu:.1f} s of the CPU")


if __name__ == "__main__":
    main()
