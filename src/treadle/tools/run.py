"""Runs a parsed command line, and turns exceptions into an exit status."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from treadle.compiler.planning import plan
from treadle.options import from_environment, options_with
from treadle.runtime.store.cache import Cache
from treadle.tools.commands import compiled, observed, write_report
from treadle.tools.entry_point import EntryPoint, is_users_error, raised_by_user
from treadle.tools.exit_status import STANDARD_OUTPUT, Exit
from treadle.util.errors import BUGS, TreadleError, counted
from treadle.util.files import check_output, write_output
from treadle.util.package import VERSION
from treadle.util.sizes import format_bytes

_WRONG_WORDS = ("TR-001", "TR-004", "TR-007", "TR-008", "TR-201", "TR-203", "TR-204")
_USERS_CODE = ("TR-132", "TR-138", "TR-206")


def run(parsed: argparse.Namespace) -> int:
    """Run one command and return its exit status, an ``Exit``."""
    wanted: Path | None = vars(parsed).get("json")
    try:
        if wanted not in (None, STANDARD_OUTPUT):
            check_output(wanted)
        return int(_COMMANDS[parsed.command](parsed, Console(quiet=wanted == STANDARD_OUTPUT)))
    except TreadleError as error:
        _complain(str(error))
        return _status(error)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # what reads the output has gone: `treadle explain ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  Python flushes it at its end
        return Exit.NO_READER
    except Exception as error:
        if is_users_error(error):
            _complain(str(raised_by_user("the step", error)))
            return Exit.USERS_CODE
        _complain(f"{traceback.format_exc()}\nthis is a bug in treadle: please report it")
        return Exit.BUG


def _status(error: TreadleError) -> Exit:
    if error.code in _WRONG_WORDS:
        return Exit.USAGE
    if error.code in _USERS_CODE:
        return Exit.USERS_CODE
    return Exit.BUG if error.code in BUGS else Exit.REFUSED


def _complain(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _write_json(parsed: argparse.Namespace, figures: object) -> None:
    """Where ``--json`` says, if it is given."""
    if parsed.json is None:
        return
    text = json.dumps(figures, indent=2)
    if parsed.json == STANDARD_OUTPUT:
        print(text)
    else:
        write_output(parsed.json, text + "\n")


def _demo(parsed: argparse.Namespace, console: Console) -> int:
    from treadle.tools.demo import run_demo

    steps = parsed.steps or (60 if parsed.quick else 100)
    _write_json(parsed, asdict(run_demo(steps=steps, console=console)))
    return 0


def _plan(parsed: argparse.Namespace, console: Console) -> int:
    """1 when the step does not fit."""
    job = EntryPoint(parsed.target).make(fake=parsed.fake)
    result = plan(
        job.step,
        *job.batch,
        model=job.model,
        optimizer=job.optimizer,
        memory=parsed.memory,
        device=parsed.device,
        points=parsed.points,
        exact=parsed.exact,
        options=options_with(
            None,
            micro_batch=parsed.micro_batch,
            optimizer_state=parsed.optimizer_state,
            planner=parsed.planner,
        ),
    )
    _say(console, result.table())
    _write_json(parsed, asdict(result))
    return 0 if result.fits else 1


def _verify(parsed: argparse.Namespace, console: Console) -> int:
    """1 when a value differs."""
    job, step = compiled(EntryPoint(parsed.target), parsed.memory)
    for number in range(parsed.steps):
        found = step.verify([job.batch], rtol=parsed.rtol, atol=parsed.atol)
        if found is not None:
            _say(console, f"step {number}: {found}")
            _write_json(parsed, {"steps": number, "difference": asdict(found)})
            return 1
        step(*job.batch)
    steps = counted(parsed.steps, "step")
    _say(console, f"{steps}: every result, parameter, buffer and state agrees with eager")
    _write_json(parsed, {"steps": parsed.steps, "difference": None})
    return 0


def _explain(parsed: argparse.Namespace, console: Console) -> int:
    target = EntryPoint(parsed.target)
    if parsed.stages:
        job, step = compiled(target, parsed.memory)
        step.prepare(*job.batch)
        _say(console, step.stages())
    else:
        step = observed(target, parsed.memory)
        _say(console, step.explain())
    _write_json(parsed, asdict(step.summary()))
    return 0


def _report(parsed: argparse.Namespace, console: Console) -> int:
    _say(console, str(write_report(parsed.target, parsed.output, parsed.memory)))
    return 0


def _bench(parsed: argparse.Namespace, console: Console) -> int:
    from treadle.tools.bench import run_bench

    result = run_bench(
        parsed.target,
        console=console,
        memory=parsed.memory,
        steps=parsed.steps,
        against=[part.strip() for part in parsed.against.split(",")],
    )
    _write_json(parsed, asdict(result))
    return 0


def _reduce(parsed: argparse.Namespace, console: Console) -> int:
    """1 when the graph does not fail."""
    from treadle.tools.reduce import ReduceRequest, run_reduce

    job = ReduceRequest(
        parsed.file, parsed.output, parsed.rtol, parsed.memory, tuple(parsed.imports)
    )
    return run_reduce(job, console, Console(stderr=True))


def _doctor(parsed: argparse.Namespace, console: Console) -> int:
    from treadle.runtime.info import facts

    found = {"treadle": VERSION, **facts(from_environment().cache_dir)}
    for name, value in found.items():
        _say(console, f"{name:14} {value}")
    _write_json(parsed, found)
    return 0


def _cache(parsed: argparse.Namespace, console: Console) -> int:
    cache = Cache(from_environment().cache_dir)
    figures: dict[str, object] = {"directory": str(cache.directory)}
    if parsed.action == "clear":
        count, size = cache.clear()
        _say(console, f"removed {count} entries, {format_bytes(size)}, of {cache.directory}")
        _write_json(parsed, {**figures, "removed_entries": count, "removed_bytes": size})
        return 0
    count, size, limit = cache.count(), cache.size(), cache.limit_bytes
    sizes = f"{format_bytes(size)} of at most {format_bytes(limit)}"
    _say(console, f"{cache.directory}: {count} entries, {sizes}")
    _write_json(parsed, {**figures, "entries": count, "bytes": size, "limit_bytes": limit})
    return 0


_COMMANDS: Mapping[str, Callable[[argparse.Namespace, Console], int]] = {
    "demo": _demo,
    "plan": _plan,
    "verify": _verify,
    "explain": _explain,
    "report": _report,
    "bench": _bench,
    "reduce": _reduce,
    "doctor": _doctor,
    "cache": _cache,
}
