"""``treadle demo | plan | bench | verify | explain | report | reduce | doctor | cache``
(also ``python -m treadle``)."""

import argparse
import enum
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from treadle.compiler.planning import plan
from treadle.options import from_environment
from treadle.runtime.store.cache import Cache
from treadle.targets.registry import model_for
from treadle.tools.commands import compiled, observed, write_report
from treadle.tools.entry_point import EntryPoint, is_users_error, raised_by_user
from treadle.util.errors import TreadleError
from treadle.util.package import VERSION
from treadle.util.sizes import format_bytes, parse_bytes

TARGET = "a function without arguments that returns (step, model, optimizer, batch)"
EPILOG = """exit status: 0 done; 1 the answer is no (does not fit, differs from eager); 2 wrong
words on the command line, a file or function that is not there; 3 treadle refuses the step or
cannot do it (see docs/errors.md); 4 your own code raised an error; 70 a bug in treadle; 130
interrupted"""


class Exit(enum.IntEnum):
    """What a command's exit status means; ``docs/howto/command-line.md`` lists them."""

    DONE = 0
    NO = 1
    USAGE = 2
    REFUSED = 3
    USERS_CODE = 4
    BUG = 70
    INTERRUPTED = 130
    NO_READER = 141


_WRONG_WORDS = ("TR-001", "TR-004", "TR-007", "TR-008", "TR-201", "TR-203", "TR-204")
_USERS_CODE = ("TR-132", "TR-138", "TR-206")
_BUGS = ("TR-199", "TR-900", "TR-901")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, an ``Exit``; wrong words leave with
    ``SystemExit`` 2."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed, Console()))
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
    return Exit.BUG if error.code in _BUGS else Exit.REFUSED


def _complain(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle",
        description="Compiles whole PyTorch training steps.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treadle {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="train a small GPT eagerly, compiled, and in less memory"
    )
    demo.add_argument("--steps", type=_positive, default=None, help="training steps (300)")
    demo.add_argument("--quick", action="store_true", help="60 steps")
    demo.add_argument("--json", type=Path, default=None, metavar="FILE", help="write results here")
    demo.set_defaults(run=_demo)
    planner = _with_target(commands, "plan", "does a step fit, and in how much; nothing is run")
    planner.add_argument(
        "--device",
        type=_device,
        default=None,
        help="cpu, h200, h100, a100 or rtx4090; need not be here",
    )
    planner.add_argument("--fake", action="store_true", help="build the model without memory")
    planner.set_defaults(run=_plan)
    verify = _with_target(commands, "verify", "compare a compiled step with eager, value by value")
    verify.add_argument("--steps", type=_positive, default=3, help="steps to train and compare")
    verify.set_defaults(run=_verify)
    explain = _with_target(commands, "explain", "what becomes of a step, its kernels timed")
    explain.add_argument(
        "--stages", action="store_true", help="only compile it, and show the stages of that"
    )
    explain.set_defaults(run=_explain)
    report = _with_target(commands, "report", "write what becomes of a step as one HTML file")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE")
    report.set_defaults(run=_report)
    bench = _with_target(commands, "bench", "time and peak of a step, eager and compiled, in turns")
    bench.add_argument("--steps", type=_positive, default=20, help="timed steps of each (20)")
    bench.add_argument("--json", type=Path, default=None, metavar="FILE", help="write figures here")
    bench.add_argument("--against", default="eager", help="eager, or eager,torch.compile")
    bench.set_defaults(run=_bench)
    _add_reduce(commands)
    doctor = commands.add_parser("doctor", help="what this machine has and what treadle will use")
    doctor.set_defaults(run=_doctor)
    cache = commands.add_parser("cache", help="where compiled code is kept, and how much")
    cache.add_argument("action", nargs="?", choices=("size", "clear"), default="size")
    cache.set_defaults(run=_cache)
    return parser


def _add_reduce(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    words = "the smallest graph that still fails, of one that does"
    parser = commands.add_parser(
        "reduce",
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog="example: TREADLE_DUMP=dump python train.py; "
        "treadle reduce dump/train_step-1a2b3c4d/captured.txt",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a graph, as a dump has it")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="write it here")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=1e-4, help="relative, of numbers (1e-4)"
    )
    parser.add_argument(
        "--import",
        type=Path,
        action="append",
        default=[],
        dest="imports",
        metavar="FILE",
        help="a Python file to run first: it registers your operators, passes and lowerings",
    )
    _add_memory(parser)
    parser.set_defaults(run=_reduce)


def _with_target(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, words: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog=f"example: treadle {name} train.py:make --memory 12GiB",
    )
    parser.add_argument("target", metavar="FILE:FUNCTION", help=TARGET)
    _add_memory(parser)
    return parser


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        type=_memory,
        default=None,
        metavar="SIZE",
        help='budget for the peak of the whole step: "12GiB", bytes, or a ratio from "0.0" (the '
        'smallest plan) to "1.0" (the fastest); without it the fastest plan',
    )


def _memory(text: str) -> str | int | float:
    """``"0.5"`` is a ratio, ``"4096"`` bytes, ``"12GiB"`` a size."""
    if re.fullmatch(r"\d*\.\d*", text) and text != ".":
        if float(text) > 1:
            raise argparse.ArgumentTypeError(f"{text} is no ratio between 0.0 and 1.0")
        return float(text)
    try:
        size = parse_bytes(int(text) if text.isdecimal() else text)
    except TreadleError as error:
        raise _no_argument(error) from None
    return size if text.isdecimal() else text


def _device(text: str) -> str:
    try:
        model_for(text)
    except TreadleError as error:
        raise _no_argument(error) from None
    return text


def _no_argument(error: TreadleError) -> argparse.ArgumentTypeError:
    """For argparse, which says it behind the name of the option, on one line."""
    return argparse.ArgumentTypeError(f"[{error.code}] {error.message}; {error.remedy}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return tolerance


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _demo(parsed: argparse.Namespace, console: Console) -> int:
    from treadle.tools.demo import run_demo

    steps = parsed.steps or (60 if parsed.quick else 300)
    return run_demo(steps=steps, json_file=parsed.json, console=console)


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
    )
    _say(console, result.table())
    return 0 if result.fits else 1


def _verify(parsed: argparse.Namespace, console: Console) -> int:
    """1 when a value differs."""
    job, step = compiled(EntryPoint(parsed.target), parsed.memory)
    for number in range(parsed.steps):
        report = step.verify([job.batch])
        if report is not None:
            gap = f"by {report.absolute:.3g}, {report.relative:.3g} of its largest value"
            _say(console, f"step {number}: {report.name} differs from eager, {gap}")
            return 1
        step(*job.batch)
    _say(console, f"{parsed.steps} steps: every result, parameter, buffer and state equals eager's")
    return 0


def _explain(parsed: argparse.Namespace, console: Console) -> int:
    target = EntryPoint(parsed.target)
    if parsed.stages:
        job, step = compiled(target, parsed.memory)
        step.prepare(*job.batch)
        _say(console, step.stages())
    else:
        _say(console, observed(target, parsed.memory).explain())
    return 0


def _report(parsed: argparse.Namespace, console: Console) -> int:
    _say(console, str(write_report(parsed.target, parsed.out, parsed.memory)))
    return 0


def _bench(parsed: argparse.Namespace, console: Console) -> int:
    from treadle.tools.bench import run_bench

    return run_bench(
        parsed.target,
        console=console,
        memory=parsed.memory,
        steps=parsed.steps,
        json_file=parsed.json,
        against=[part.strip() for part in parsed.against.split(",")],
    )


def _reduce(parsed: argparse.Namespace, console: Console) -> int:
    """1 when the graph does not fail."""
    from treadle.tools.reduce import ReduceRequest, run_reduce

    job = ReduceRequest(
        parsed.file, parsed.output, parsed.tolerance, parsed.memory, tuple(parsed.imports)
    )
    return run_reduce(job, console, Console(stderr=True))


def _doctor(parsed: argparse.Namespace, console: Console) -> int:
    from treadle.runtime.info import facts

    for name, value in facts(from_environment().cache_dir).items():
        _say(console, f"{name:14} {value}")
    return 0


def _cache(parsed: argparse.Namespace, console: Console) -> int:
    cache = Cache(from_environment().cache_dir)
    if parsed.action == "clear":
        count, size = cache.clear()
        _say(console, f"removed {count} entries, {format_bytes(size)}, of {cache.directory}")
    else:
        size, limit = format_bytes(cache.size()), format_bytes(cache.limit_bytes)
        _say(console, f"{cache.directory}: {cache.count()} entries, {size} of at most {limit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
