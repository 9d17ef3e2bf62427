"""What users add: passes of their own, and operations as other operations."""

from collections.abc import Callable
from typing import Any

from treadle.graph.core.operators import OpOverload
from treadle.graph.rewrite.passes import GraphPass
from treadle.util.errors import LoweringError

Meaning = Callable[..., object]

STAGES = ("extend", "clean", "plan memory")
"""The stages at whose end users' passes may run."""

_passes: list[tuple[str, GraphPass]] = []
_meanings: dict[OpOverload, Meaning] = {}


def register_pass(each: GraphPass, *, stage: str = "extend") -> None:
    """Run ``each`` on every step that is compiled or planned from now on, at the end of ``stage``:

    - ``extend``: on what was captured, once no-ops, repetitions and dead code are gone; before
      the cache is asked;
    - ``clean``: after the cleaning of treadle's own, before memory is planned;
    - ``plan memory``: on every plan before it is judged, and so on the graph that is lowered.

    Passes of a stage run in the order of their registration. The graph is verified after each. A
    second run must find nothing to do, and equal graphs must become equal graphs. What is compiled
    while a pass is registered at one of the later stages is neither taken from the cache nor kept
    there, as nothing could tell whether the code of the pass is what it was.
    ``LoweringError`` TR-307 for what is no pass or no stage, or is registered there.
    """
    value: Any = each  # users' code is not always typed
    if stage not in STAGES:
        raise LoweringError(
            f"there is no stage {stage!r} for passes",
            code="TR-307",
            remedy=f"one of {', '.join(STAGES)}",
        )
    if not isinstance(value, GraphPass) or (stage, each) in _passes:
        raise LoweringError(
            f"{each!r} is not a GraphPass, or is registered already",
            code="TR-307",
            remedy="register an instance of a subclass of treadle.GraphPass, once",
        )
    _passes.append((stage, each))


def register_lowering(op: OpOverload, meaning: Meaning) -> None:
    """Let ``op`` be fused: ``meaning(*args, **kwargs)``, with the operation's own arguments,
    computes the same from PyTorch's operations on tensors, without writing to any of them.

    ``LoweringError`` TR-307 for what is no operation (``torch.ops.library.name.overload``), or has
    a meaning already; at compile time, if the meaning's type is not the operation's.
    """
    value: Any = op
    if not isinstance(value, OpOverload) or not callable(meaning) or op in _meanings:
        raise LoweringError(
            f"{op!r} is not an operation with an overload, or has a lowering already",
            code="TR-307",
            remedy="register torch.ops.<library>.<name>.<overload> with a function, once",
        )
    _meanings[op] = meaning


def registered(stage: str) -> tuple[GraphPass, ...]:
    """Users' passes that run at a stage; none if nothing is registered."""
    return tuple(graph_pass for where, graph_pass in _passes if where == stage)


def registered_meaning(op: object) -> Meaning | None:
    """What an operation was registered to be, if it was."""
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
