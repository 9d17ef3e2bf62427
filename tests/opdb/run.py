"""``python tests/opdb/run.py --shard 3/8``: PyTorch's operator database through our backend.

Prints what did not pass and the closing counts; exits with 1 on a wrong number or an error.
``--kernels``: ``library`` (PyTorch's own, quick), ``generated`` (a C++ compiler runs for most
cases), ``mixed`` (a quarter of the cases, by name, with generated kernels).
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("TREADLE_NO_PROGRESS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from opdb_cases import Case, every_case, shard
from opdb_check import Outcome, Verdict, checked

BAD = (Outcome.WRONG, Outcome.ERROR)


def generates(case: Case, kernels: str) -> bool:
    """Whether the case runs with generated kernels."""
    return kernels == "generated" or (kernels == "mixed" and case.digest % 4 == 0)


def run(cases: list[Case], kernels: str, samples: int, verbose: bool = False) -> list[Verdict]:
    """Every case, each one that did not pass shown."""
    verdicts: list[Verdict] = []
    for case in cases:
        start = time.perf_counter()
        os.environ["TREADLE_NO_CODEGEN"] = "0" if generates(case, kernels) else "1"
        verdict = checked(case, samples)
        verdicts.append(verdict)
        shown = verdict.outcome in BAD or verdict.outcome is Outcome.NOT_OURS
        if verbose or shown:
            took = f"{time.perf_counter() - start:6.2f} s" if verbose else ""
            print(f"{verdict.outcome:<9} {verdict.case:<48} {took} {verdict.why}", flush=True)
    return verdicts


def failed(output: str) -> set[str]:
    """The names of the cases that an earlier output shows as bad."""
    words = [line.split() for line in output.splitlines() if line.startswith(BAD)]
    return {" ".join(each[1:3]) for each in words}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="1/1", help="3/8: the third of eight")
    parser.add_argument("--kernels", choices=["library", "generated", "mixed"], default="mixed")
    parser.add_argument("--samples", type=int, default=2, help="inputs per case")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--again", default="", help="the cases of this output that did not pass")
    parser.add_argument("--verbose", action="store_true", help="every case, with its time")
    given = parser.parse_args()
    number, of = map(int, given.shard.split("/"))
    cases = [case for case in shard(every_case(), number, of) if given.only in case.name]
    if given.again:
        named = failed(Path(given.again).read_text())
        cases = [case for case in cases if case.name in named]
    torch.set_num_threads(1)
    start = time.perf_counter()
    verdicts = run(cases, given.kernels, given.samples, given.verbose)
    counts = Counter(each.outcome for each in verdicts)
    closing = ", ".join(f"{counts[each]} {each}" for each in Outcome)
    print(f"shard {given.shard}, {given.kernels} kernels: {len(cases)} cases in "
          f"{time.perf_counter() - start:.0f} s: {closing}")  # fmt: skip
    return int(any(counts[each] for each in BAD))


if __name__ == "__main__":
    sys.exit(main())
