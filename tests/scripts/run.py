"""``python tests/scripts/run.py [--only vae,dcgan] [--times]``: every script, and what is wrong.

``--times``: how long the last call of each step takes when it is made again, over eager's.
"""

import argparse
import time
import traceback
from collections.abc import Callable

import harness
import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of names, by commas")
    parser.add_argument("--times", action="store_true")
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    failed = 0
    for each in harness.scripts():
        if not any(part in each.name for part in parts):
            continue
        start = time.perf_counter()
        found = None
        try:
            found = harness.outcome(each)
            wrong = list(found.wrong)
        except Exception as error:
            line = traceback.format_exception_only(error)[-1].strip()
            wrong = [f"raised {line}"]
        failed += bool(wrong)
        print(f"{'FAIL' if wrong else 'ok  '} {each.name:28} {time.perf_counter() - start:6.1f} s")
        for line in wrong[:6]:
            print(f"       {line[:300]}")
        if chosen.times and found is not None:
            for name, mine in found.compiled.calls.items():
                print(f"       {name}: {_ratio(found.eager.calls[name], mine)}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


def _ratio(eager: Callable[[], object], mine: Callable[[], object]) -> str:
    """The last call again, in turns, the best of many. On one thread the time that it is given."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * 2
    for turn in range(24):
        for at, each in enumerate((eager, mine)):
            start = clock()
            each()
            each()
            best[at] = min(best[at], (clock() - start) / 2) if turn > 3 else best[at]
    return f"{best[1] / best[0]:.2f} x {1e3 * best[0]:.2f} ms"


if __name__ == "__main__":
    raise SystemExit(main())
