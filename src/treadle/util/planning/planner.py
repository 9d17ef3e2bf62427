"""How memory is planned, as users choose it."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from treadle.util.errors import TreadleError
from treadle.util.planning.bans import known_bans

SOLVERS = ("cut", "greedy", "dynamic", "integer")
"""Names of the methods that choose what to keep."""
ESTIMATORS = ("roofline", "measured", "constant")
"""Names of the ways to estimate how long an operation takes."""
Solver = Callable[[Any, int], Iterable[int]]
"""A user's method: of a ``treadle.SaveProblem`` and a number of bytes, what to keep."""
Estimator = Callable[[Any], float]
"""A user's estimate: of a ``treadle.PlannedOperation``, seconds."""


@final
@dataclass(frozen=True, slots=True)
class Planner:
    """How memory is planned.

    - ``solver``: what proposes the values to keep; of the proposals, the fastest plan whose exact
      peak is within the budget is chosen. ``"cut"``: minimum cuts with a price for recomputation,
      then a local search. ``"greedy"``, ``"dynamic"``: a knapsack of what the fastest plan keeps,
      by time per byte, or by dynamic programming. ``"integer"``: an integer program. Or a function
      of a ``treadle.SaveProblem`` and a number of bytes, which returns the numbers of the values to
      keep; a compile with a function of yours is not cached.
    - ``estimator``: how long operations are estimated to take. ``"roofline"``: by their bytes and
      floating-point operations, and the rates of the device. ``"measured"``: each library call of
      PyTorch's runs on this device once, on data that treadle makes, and its time is cached; the
      rates are measured, on CPUs too. ``"constant"``: a microsecond for each, for tests. Or a
      function of a ``treadle.PlannedOperation``, which returns seconds.
    - ``bans``: what is never recomputed, whatever it costs to keep: names such as
      ``"compute-intensive"``, of which some take a bound (``"long-chains=50"``);
      ``docs/howto/budget.md`` lists them. Default: prices decide.
    - ``offload``: also plan with activations in the memory of the host between their uses, where
      the copies fit beside the step's own work. GPUs only; a budget decides how many.
    """

    solver: str | Solver = "cut"
    estimator: str | Estimator = "roofline"
    bans: tuple[str, ...] = ()
    offload: bool = False

    def __post_init__(self) -> None:
        if not callable(self.solver) and self.solver not in SOLVERS:
            raise _unknown("solver", self.solver, SOLVERS)
        if not callable(self.estimator) and self.estimator not in ESTIMATORS:
            raise _unknown("estimator", self.estimator, ESTIMATORS)
        _require_flag(self.offload)
        object.__setattr__(self, "bans", known_bans(self.bans))

    @staticmethod
    def of(given: object) -> "Planner":
        """A ``Planner``, or a text: the name of a solver, or the fields as JSON."""
        if isinstance(given, Planner):
            return given
        if not isinstance(given, str):
            raise _not_one(given)
        if not given.lstrip().startswith("{"):
            return Planner(solver=given) if given else Planner()
        try:
            data: object = json.loads(given)
        except ValueError as error:
            raise _not_one(given) from error
        names = [field.name for field in fields(Planner)]
        if not isinstance(data, Mapping) or not set(data) <= set(names):
            raise _not_one(given)
        return Planner(**data)

    @property
    def is_named(self) -> bool:
        """Whether all of it is said by names, and nothing by a function of the user's."""
        return not any(callable(getattr(self, field.name)) for field in fields(self))

    @property
    def words(self) -> str:
        """What differs from the default, for people; empty for none."""
        given = {field: getattr(self, field.name) for field in fields(self)}
        return ", ".join(
            f"{field.name}={_in_words(value)}"
            for field, value in given.items()
            if value != field.default
        )

    @property
    def text(self) -> str:
        """A text that ``of`` reads, if everything is named."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values, sort_keys=True, default=_function_name)


def _require_flag(offload: object) -> None:
    if not isinstance(offload, bool):
        raise TreadleError(
            f"Planner(offload={offload!r}) is neither True nor False",
            code="TR-001",
            remedy="pass a bool",
        )


def _in_words(value: Any) -> str:
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else "+".join(value)


def _function_name(value: object) -> str:
    return f"function of {type(value).__qualname__}" if callable(value) else repr(value)


def _unknown(name: str, value: object, known: Iterable[str]) -> TreadleError:
    return TreadleError(
        f"Planner({name}={value!r}) is not one of {', '.join(known)}, nor a function",
        code="TR-001",
        remedy="docs/howto/budget.md describes each of them",
    )


def _not_one(given: object) -> TreadleError:
    names = ", ".join(field.name for field in fields(Planner))
    return TreadleError(
        f"planner={given!r} is not a treadle.Planner, the name of a solver, or JSON of its fields",
        code="TR-001",
        remedy=f"one of {', '.join(SOLVERS)}, or treadle.Planner(...) with {names}",
    )
