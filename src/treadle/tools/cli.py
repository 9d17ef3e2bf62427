"""``treadle demo | plan | bench | verify | explain | report | reduce | why | doctor | cache``
(also ``python -m treadle``)."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from treadle.options import STATES
from treadle.tools.exit_status import STANDARD_OUTPUT, Exit
from treadle.tools.why import meaning_of
from treadle.util.errors import TreadleError
from treadle.util.package import VERSION
from treadle.util.sizes import FRONTIER_POINTS, parse_bytes

if TYPE_CHECKING:
    from treadle.util.planning.planner import Planner

WITHOUT_MEMORY = "no budget"
TARGET = "a function without arguments that returns (step, model, optimizer, batch)"
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
EPILOG = """example: treadle demo --quick

exit status: 0 done; 1 the answer is no (does not fit, differs from eager);
2 wrong usage, or a missing file or function; 3 treadle refuses the step or
cannot run it (see treadle why CODE); 4 your own code raised an error; 70 a bug
in treadle; 130 interrupted"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, an ``Exit``; wrong words leave with
    ``SystemExit`` 2."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command == "why":
        return _tell_why(parser, parsed.code)
    from treadle.tools.run import run  # late: `--help`, `why` and wrong words need no PyTorch

    return run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle",
        description="Compiles whole PyTorch training steps.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treadle {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_demo, _add_plan, _add_verify, _add_explain, _add_report, _add_bench, _add_reduce,
        _add_why, _add_doctor, _add_cache,
    ):  # fmt: skip
        add(commands)
    return parser


def _add_demo(commands: Commands) -> None:
    words = "train a small GPT in eager, compiled, and in less memory"
    parser = _command(commands, "demo", words, example="treadle demo --steps 20")
    _add_steps(parser, None, "training steps of each variant (100)")
    parser.add_argument("--quick", action="store_true", help="60 steps")
    _add_json(parser)


def _add_plan(commands: Commands) -> None:
    parser = _with_target(
        commands,
        "plan",
        "predict whether a step fits in memory, and its frontier; runs nothing",
        without_memory="the memory of the GPU; none on a CPU",
    )
    parser.add_argument(
        "--device",
        type=_device,
        default=None,
        metavar="NAME",
        help="cpu, h200, h100, a100 or rtx4090; need not be present (that of the model)",
    )
    parser.add_argument(
        "--points",
        type=_frontier_points,
        default=FRONTIER_POINTS,
        metavar="N",
        help=f"number of budgets on the frontier ({FRONTIER_POINTS})",
    )
    parser.add_argument(
        "--micro-batch",
        type=_micro_batch,
        default=None,
        metavar="ROWS",
        help='plan for micro-batches of at most so many rows, or "auto": as many as fit',
    )
    parser.add_argument(
        "--optimizer-state",
        choices=STATES,
        default=None,
        help="how averages of gradients are kept (default: as the optimizer does)",
    )
    parser.add_argument(
        "--planner",
        type=_planner,
        default=None,
        metavar="PLANNER",
        help="the name of a solver, or the fields of treadle.Planner as JSON (cut)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="also solve for the smallest peak of plans as fast as each; for small steps",
    )
    parser.add_argument(
        "--fake", action="store_true", help="create the model without allocating memory"
    )
    _add_json(parser)


def _add_verify(commands: Commands) -> None:
    parser = _with_target(commands, "verify", "compare a compiled step with eager, value by value")
    _add_steps(parser, 3, "steps to train and compare (3)")
    _add_rtol(parser)
    parser.add_argument(
        "--atol", type=_tolerance, default=1e-5, help="tolerance added to that (1e-5)"
    )
    _add_json(parser)


def _add_explain(commands: Commands) -> None:
    parser = _with_target(
        commands, "explain", "show what a step compiles to, with its kernels timed"
    )
    _add_json(parser)
    parser.add_argument(
        "--stages", action="store_true", help="only compile it, and show the stages of the compile"
    )


def _add_report(commands: Commands) -> None:
    parser = _with_target(
        commands, "report", "write a report of the compiled step as one HTML file"
    )
    _add_output(parser, Path("report.html"), "write the page to this file (report.html)")


def _add_bench(commands: Commands) -> None:
    parser = _with_target(
        commands, "bench", "measure time and peak of a step, eager and compiled, in turns"
    )
    _add_steps(parser, 20, "timed steps of each variant (20)")
    parser.add_argument(
        "--against", default="eager", metavar="NAMES", help="eager, or eager,torch.compile (eager)"
    )
    _add_json(parser)


def _add_why(commands: Commands) -> None:
    parser = _command(
        commands, "why", "explain an error code, with its remedy", example="treadle why TR-102"
    )
    parser.add_argument("code", metavar="CODE", help="such as TR-102")


def _add_doctor(commands: Commands) -> None:
    words = "show what this machine has and what treadle will use"
    _add_json(_command(commands, "doctor", words, example="treadle doctor --json"))


def _add_cache(commands: Commands) -> None:
    words = "show where compiled code is stored, and its size"
    parser = _command(commands, "cache", words, example="treadle cache clear")
    parser.add_argument(
        "action",
        nargs="?",
        choices=("size", "clear"),
        default="size",
        help="size: show it, the default; clear: remove all entries",
    )
    _add_json(parser)


def _tell_why(parser: argparse.ArgumentParser, code: str) -> int:
    """Print the entry of a code."""
    meaning = meaning_of(code)
    if not meaning:
        parser.error(f"there is no code {code!r}; codes look like TR-102")
    print(meaning)
    return Exit.DONE


def _add_reduce(commands: Commands) -> None:
    parser = _command(
        commands,
        "reduce",
        "reduce a failing graph to the smallest graph that still fails",
        example="TREADLE_DUMP=dump python train.py; "
        "treadle reduce dump/train_step-1a2b3c4d/captured.txt",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a graph written by TREADLE_DUMP")
    _add_output(parser, None, "write the graph to this file")
    _add_rtol(parser)
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=argparse.SUPPRESS,
        dest="rtol",
        metavar="RTOL",
        help="the earlier name of --rtol",
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


def _command(commands: Commands, name: str, words: str, *, example: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(command=name)
    return parser


def _with_target(
    commands: Commands, name: str, words: str, without_memory: str = WITHOUT_MEMORY
) -> argparse.ArgumentParser:
    """A command that compiles the step of a file."""
    parser = _command(commands, name, words, example=f"treadle {name} train.py:make --memory 12GiB")
    parser.add_argument("target", metavar="FILE:FUNCTION", help=TARGET)
    _add_memory(parser, without_memory)
    return parser


def _add_memory(parser: argparse.ArgumentParser, without: str = WITHOUT_MEMORY) -> None:
    parser.add_argument(
        "--memory",
        type=_memory,
        default=None,
        metavar="SIZE",
        help=(
            'budget for the peak of the whole step: "12GiB", bytes, or a ratio from "0.0" (the '
            f'smallest plan) to "1.0" (the fastest); without it, {without}'
        ),
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STANDARD_OUTPUT,
        default=None,
        metavar="FILE",
        help="write the figures to this file as JSON; without FILE, print them instead of the text",
    )


def _add_steps(parser: argparse.ArgumentParser, default: int | None, words: str) -> None:
    parser.add_argument("--steps", type=_positive, default=default, metavar="N", help=words)


def _add_output(parser: argparse.ArgumentParser, default: Path | None, words: str) -> None:
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help=words)


def _memory(text: str) -> str | int | float:
    """``"0.5"`` is a ratio, ``"4096"`` bytes, ``"12GiB"`` a size."""
    if re.fullmatch(r"\d*\.\d*", text) and text != ".":
        if float(text) > 1:
            raise argparse.ArgumentTypeError(f"{text} is not a ratio between 0.0 and 1.0")
        return float(text)
    try:
        size = parse_bytes(int(text) if text.isdecimal() else text)
    except TreadleError as error:
        raise _no_argument(error) from None
    return size if text.isdecimal() else text


def _device(text: str) -> str:
    from treadle.targets.registry import model_for  # late: imports PyTorch

    try:
        model_for(text)
    except TreadleError as error:
        raise _no_argument(error) from None
    return text


def _no_argument(error: TreadleError) -> argparse.ArgumentTypeError:
    """For argparse, which says it behind the name of the option, on one line."""
    return argparse.ArgumentTypeError(f"[{error.code}] {error.message}; {error.remedy}")


def _positive(text: str) -> int:
    return _whole(text, 1)


def _micro_batch(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _planner(text: str) -> "Planner":
    from treadle.util.planning.planner import Planner

    try:
        return Planner.of(text)
    except TreadleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _frontier_points(text: str) -> int:
    """A frontier has two ends."""
    return _whole(text, 2)


def _add_rtol(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rtol", type=_tolerance, default=1e-4, help="tolerance relative to eager's value (1e-4)"
    )


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return tolerance


if __name__ == "__main__":
    sys.exit(main())
