"""``python tests/scripts/run.py [--only vae,dcgan] [--times]``: every script, and what is wrong.

``--times``: the median call after the first ones, compiled over eager, of each step.
"""

import argparse
import statistics
import time
import traceback

import harness


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
            for name, mine in found.compiled.seconds.items():
                print(f"       {name}: {_ratio(found.eager.seconds[name], mine)}")
    print(f"{failed} failed")
    return 1 if failed else 0


def _ratio(eager: list[float], mine: list[float]) -> str:
    """Calls of the last two thirds, where the step is known."""
    late = [statistics.median(each[len(each) // 3 :] or [float("nan")]) for each in (eager, mine)]
    return f"{late[1] / late[0]:.2f} x {1e3 * late[0]:.2f} ms"


if __name__ == "__main__":
    raise SystemExit(main())
