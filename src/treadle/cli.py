"""``treadle demo | doctor | plan | cache`` (also ``python -m treadle``)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from treadle.demo import run_demo
from treadle.options import from_environment
from treadle.planning import plan_command
from treadle.runtime.info import facts
from treadle.util.errors import TreadleError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 on an error that a user can act on."""
    parsed = _parser().parse_args(arguments)
    console = Console()
    try:
        return int(parsed.run(parsed, console))
    except TreadleError as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle", description="Compiles whole PyTorch training steps."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="train a small GPT eagerly, compiled, and in less memory"
    )
    demo.add_argument("--steps", type=_positive, default=None, help="training steps (300)")
    demo.add_argument("--quick", action="store_true", help="60 steps")
    demo.add_argument("--json", type=Path, default=None, metavar="FILE", help="write results here")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser("doctor", help="what this machine has and what treadle will use")
    doctor.set_defaults(run=_doctor)
    plan = commands.add_parser("plan", help="peak and budget of a step, without running it")
    plan.add_argument(
        "target",
        metavar="FILE:FUNCTION",
        help="a function without arguments that returns (step, model, optimizer, batch)",
    )
    plan.add_argument("--memory", default=None, help='budget, such as "12GiB"')
    plan.set_defaults(run=_plan)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _demo(parsed: argparse.Namespace, console: Console) -> int:
    steps = parsed.steps or (60 if parsed.quick else 300)
    return run_demo(steps=steps, json_file=parsed.json, console=console)


def _doctor(parsed: argparse.Namespace, console: Console) -> int:
    for name, value in facts(from_environment().cache_dir).items():
        console.print(f"{name:14} {value}", markup=False, highlight=False)
    return 0


def _plan(parsed: argparse.Namespace, console: Console) -> int:
    console.print(plan_command(parsed.target, parsed.memory), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
