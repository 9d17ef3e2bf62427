"""The solver that a planner names, or the user's own, checked."""

from collections.abc import Callable, Collection
from typing import Any

from treadle.passes.memory.solvers.knapsack import by_dynamic_program, by_greedy
from treadle.passes.memory.solvers.problem import SaveProblem
from treadle.passes.memory.solvers.program import by_integer_program
from treadle.util.errors import PlanError
from treadle.util.planning.planner import Planner

Solver = Callable[[SaveProblem, int], Collection[int] | None]
"""What to keep within so many bytes; ``None`` where it has no answer."""

_NAMED: dict[str, Solver] = {
    "greedy": by_greedy,
    "dynamic": by_dynamic_program,
    "integer": by_integer_program,
}


def solver_of(method: Planner) -> Solver:
    """Another solver than the cut."""
    if isinstance(method.solver, str):
        return _NAMED[method.solver]
    return _checked(method.solver)


def _checked(function: Callable[[Any, int], Any]) -> Solver:
    """The user's function, whose answers are checked. Its capacity is a wish, since what a plan
    needs is measured afterwards."""

    def solve(problem: SaveProblem, capacity: int) -> frozenset[int]:
        try:
            kept = frozenset(function(problem, capacity))
        except Exception as error:
            raise _refused(f"raised {type(error).__name__}: {error}") from error
        numbers = range(len(problem.sizes))
        strange = [i for i in kept if type(i) is not int or i not in numbers]
        if strange:
            raise _refused(f"returned {strange[0]!r}, which is not a number of a value")
        if not problem.allows(kept):
            raise _refused(_why_not(problem, kept))
        return kept

    return solve


def _why_not(problem: SaveProblem, kept: frozenset[int]) -> str:
    sized = [i for i in sorted(kept) if problem.sizes[i] is None]
    if sized:
        return f"keeps {problem.names[sized[0]]}, which cannot be kept: its size is None"
    again = min(problem.once & problem.recomputed(kept))
    return f"computes {problem.names[again]} again, which happens once"


def _refused(words: str) -> PlanError:
    return PlanError(
        f"the solver of the planner {words}",
        code="TR-205",
        remedy="return numbers of values that the problem allows: problem.allows(kept)",
    )
