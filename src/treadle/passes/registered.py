"""Users' extensions: their own passes, and lowerings of operations."""

from collections.abc import Callable
from typing import Any

from treadle.compat.operators.schemas import OpOverload, overloads_of
from treadle.graph.rewrite.passes import GraphPass
from treadle.util.errors import LoweringError, kind_of

Meaning = Callable[..., object]

STAGES = ("extend", "clean", "plan memory")
"""The stages at whose end users' passes may run."""

_passes: list[tuple[str, GraphPass]] = []
_meanings: dict[OpOverload, Meaning] = {}


def register_pass(each: GraphPass, *, stage: str = "extend") -> None:
    """Run ``each`` on every step that is compiled or planned from now on, at the end of ``stage``:

    - ``extend``: on the captured graph without no-ops, common subexpressions and dead code, before
      the cache lookup;
    - ``clean``: after treadle's own cleanup, before memory is planned;
    - ``plan memory``: on every candidate plan before it is evaluated, and so on the graph that is
      lowered.

    Passes of a stage run in the order of registration. The graph is verified after each. A second
    run of a pass must change nothing, and equal graphs must give equal graphs. While a pass is
    registered at one of the later stages, the cache is neither read nor written, because a change
    in the pass's code could not be detected. ``LoweringError`` TR-307 for an object that is not a
    pass, for an unknown stage, or if the pass is registered already.
    """
    value: Any = each  # users' code is not always typed
    if stage not in STAGES:
        raise LoweringError(
            f"there is no stage {stage!r} for passes",
            code="TR-307",
            remedy=f"one of {', '.join(STAGES)}",
        )
    if not isinstance(value, GraphPass):
        raise LoweringError(
            f"{kind_of(value)} is not a pass",
            code="TR-307",
            remedy="register an instance of a subclass of treadle.GraphPass",
        )
    if (stage, each) in _passes:
        raise LoweringError(
            f"{each!r} is registered already at the stage {stage!r}",
            code="TR-307",
            remedy="register it once: it runs on every step from then on",
        )
    _passes.append((stage, each))


def register_lowering(op: OpOverload, meaning: Meaning) -> None:
    """Register a lowering of ``op``, so that it can be fused: ``meaning(*args, **kwargs)`` takes
    the operation's arguments and computes the same with PyTorch's tensor operations, without
    writing to any tensor.

    ``LoweringError`` TR-307 if ``op`` is not an operation (``torch.ops.library.name.overload``) or
    has a lowering already, or if ``meaning`` is not a function; at compile time, if the result
    types differ.
    """
    value: Any = op
    overloads = overloads_of(value)
    if overloads:
        raise LoweringError(
            f"{value} has overloads, and each has a lowering of its own",
            code="TR-307",
            remedy="name one of them: " + ", ".join(f"{value}.{name}" for name in overloads),
        )
    if not isinstance(value, OpOverload):
        raise LoweringError(
            f"{kind_of(value)} is not an operation of PyTorch's",
            code="TR-307",
            remedy="register a lowering of torch.ops.<library>.<name>.<overload>",
        )
    if not callable(meaning):
        raise LoweringError(
            f"{kind_of(meaning)} is not a function, so it is no lowering of {value}",
            code="TR-307",
            remedy="pass a function that computes the same with PyTorch's tensor operations",
        )
    if op in _meanings:
        raise LoweringError(
            f"{value} has a lowering already",
            code="TR-307",
            remedy="register one lowering of an operation, once",
        )
    _meanings[op] = meaning


def registered(stage: str) -> tuple[GraphPass, ...]:
    """Users' passes that run at a stage; none if nothing is registered."""
    return tuple(graph_pass for where, graph_pass in _passes if where == stage)


def registered_meaning(op: object) -> Meaning | None:
    """The lowering that was registered for an operation; ``None`` if there is none."""
    return _meanings.get(op) if isinstance(op, OpOverload) else None


def has_meanings() -> bool:
    """Whether any operation has one."""
    return bool(_meanings)


def is_anything_registered() -> bool:
    """Whether users have added passes or meanings of operations."""
    return bool(_passes or _meanings)


def registered_late() -> tuple[GraphPass, ...]:
    """Users' passes that run after the cache has been asked: what they make is not kept there."""
    return tuple(graph_pass for where, graph_pass in _passes if where != "extend")
