"""Whether budgets are used and obeyed: small models of many kinds by budgets of many sizes.

::

    python benchmarks/budgets.py [--models mlp,gpt2] [--budgets 10] [--plans-only]

For each model the budgets go from a little less than its smallest plan to its fastest, evenly, and
every peak of its printed frontier is one of them. A row is one budget: what the plan promises, what
a call is measured to take, the estimated time; and what is wrong with it, of:

    refused      no plan, though the budget is no less than the smallest peak that was printed
    not refused  a plan, though it is less
    over         the promise is above the budget
    broken       a call takes more than was promised
    idle         less than 0.9 of the budget is used, by a plan that computes more than the fastest,
                 though a faster one of the frontier fits
    coarse       the same, and no faster plan fits: there is none between two
    slower       a larger budget has a slower plan, or a smaller peak
    disagree     ``treadle.plan`` and the compile do not say the same of the budget
    lost         a peak of the printed frontier, as the budget, gives a larger or slower plan

The last lines count them. All but ``coarse`` are mistakes of the planner: with one, the exit status
is 1. ``--plans-only`` compiles and measures nothing: promises are those of the plans.
"""

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from budget_models import MODELS, Training

import treadle
from treadle.capture.step import capture
from treadle.compiler.memory import plans_of, prepared
from treadle.compiler.target import build_for, target_of
from treadle.graph.text.canonical import canonical
from treadle.passes.memory.choose import Plans
from treadle.runtime.store.cache import Cache
from treadle.util.errors import PlanError
from treadle.util.sizes import format_bytes

USED = 0.9
COARSE = "coarse"


@dataclass
class Row:
    """One budget of one model; ``promised`` is 0 where it was refused."""

    budget: int
    promised: int = 0
    measured: int | None = None
    milliseconds: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    def text(self) -> str:
        promised = format_bytes(self.promised) if self.promised else "refused"
        measured = "" if self.measured is None else format_bytes(self.measured)
        return (
            f"  {format_bytes(self.budget):>10} {promised:>10} {measured:>10} "
            f"{self.promised / self.budget:5.0%} {self.milliseconds:9.3f} ms  "
            f"{', '.join(self.wrong)}"
        )


def made(name: str) -> Training:
    torch.manual_seed(0)
    return MODELS[name]()


def planned(training: Training, cache: Path) -> Plans:
    """The plans of a model's step, as ``treadle.plan`` and a compile find them."""
    options = treadle.Options(memory=1.0, cache_dir=cache)
    objects = {"models": {"": training.model}, "optimizers": {"": training.optimizer}}
    place = torch.device("cpu")
    found = capture(training.step, **objects, args=training.batch, kwargs={}, place=place)
    store = Cache(cache)
    build = build_for("cpu", options, store)
    target, _ = target_of("cpu", options, build, cache=store, kept=found.kept_bytes)
    return next(plans_of(prepared(canonical(found.step).step, target), target))


def budgets_of(plans: Plans, count: int) -> list[int]:
    """Evenly from 0.97 of the smallest peak to the largest, and the peaks of the frontier."""
    first, least = plans.exact(0), plans.exact(plans.smallest())
    low = int(0.97 * least)
    even = [low + (first - low) * k // (count - 1) for k in range(count)]
    return sorted({*even, *(plans.exact(i) for i in plans.spread(6))})


def compiled(name: str, budget: int, cache: Path) -> tuple[int, int]:
    """The promise of a compile within the budget, and what a call is measured to take."""
    training = made(name)
    options = treadle.Options(cache_dir=cache)
    step = treadle.compile(
        training.step,
        model=training.model,
        optimizer=training.optimizer,
        memory=budget,
        options=options,
    )
    step(*training.batch)
    measured = step.measure(*training.batch)
    return step.compiled.artifact.peak_bytes, measured.peak_bytes


def row(name: str, plans: Plans, budget: int, cache: Path, *, plans_only: bool) -> Row:
    least = plans.exact(plans.smallest())
    found = Row(budget)
    chosen = plans.within(budget)
    if chosen is not None:
        found.promised = plans.exact(chosen)
        found.milliseconds = 1e3 * plans.points[chosen].seconds
    if not plans_only:
        try:
            promised, found.measured = compiled(name, budget, cache)
        except PlanError:
            promised = 0
        if promised != found.promised:
            found.wrong.append("disagree")
        found.promised = promised
    if not found.promised:
        found.wrong += ["refused"] if budget >= least else []
        return found
    if budget < least:
        found.wrong.append("not refused")
    if found.promised > budget:
        found.wrong.append("over")
    if found.measured is not None and found.measured > found.promised:
        found.wrong.append("broken")
    found.wrong += _idle(plans, chosen, found)
    return found


def _idle(plans: Plans, chosen: int | None, found: Row) -> Iterator[str]:
    if chosen == 0 or found.promised >= USED * found.budget:
        return
    faster = any(plans.exact(i) <= found.budget for i in range(chosen or 0))
    yield "idle" if faster else COARSE


def table(name: str, count: int, *, plans_only: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        plans = planned(made(name), cache)
        frontier = {plans.exact(i): plans.points[i].seconds for i in plans.spread(6)}
        rows = [
            row(name, plans, budget, cache, plans_only=plans_only)
            for budget in budgets_of(plans, count)
        ]
    for each in rows:
        at = frontier.get(each.budget)
        if at is not None and (not each.promised or each.milliseconds > 1e3 * at):
            each.wrong.append("lost")
    kept = [each for each in rows if each.promised]
    for small, large in itertools.pairwise(kept):
        if large.milliseconds > small.milliseconds or large.promised < small.promised:
            large.wrong.append("slower")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--plans-only", action="store_true")
    given = parser.parse_args(arguments)
    wrong, total = Counter[str](), 0
    for name in given.models.split(","):
        print(f"{name}\n  {'budget':>10} {'promised':>10} {'measured':>10} {'used':>5}", flush=True)
        for each in table(name, given.budgets, plans_only=given.plans_only):
            print(each.text(), flush=True)
            wrong.update(each.wrong)
            total += 1
    print(f"{total} budgets;", ", ".join(f"{n} {what}" for what, n in wrong.items()) or "all kept")
    return int(any(what != COARSE for what in wrong))


if __name__ == "__main__":
    sys.exit(main())
