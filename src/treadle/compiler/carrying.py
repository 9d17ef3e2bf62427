"""Which updates of a step run in its next call: ``Options.carry`` as moves."""

from fnmatch import fnmatchcase

from torch import fx

from treadle.capture.captured import Captured
from treadle.graph.analysis.dataflow import is_list_call
from treadle.graph.analysis.dynamic import dims_of_graph
from treadle.graph.analysis.update_blocks import update_blocks
from treadle.graph.core.node_info import info
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Carry, Options
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.comm.carry.carried_nodes import CarriedSteps, carried
from treadle.passes.comm.carry.moves import Move, update_moves
from treadle.passes.comm.carry.split_updates import SplitUpdates
from treadle.passes.comm.sharding.scatter_reductions import ScatterReductions
from treadle.util.errors import TreadleError

_PLAIN = (ScatterReductions(), RemoveNoOps(), RemoveDeadCode())
"""What tracing leaves, copies of views above all, would be read by what is moved."""


def carried_steps(captured: Captured, options: Options) -> CarriedSteps | None:
    """The step as three, by ``options.carry``; ``None`` where it updates nothing. ``TreadleError``
    TR-530 to TR-537 for what cannot run in the next call."""
    plain = captured.step.copy()
    run_passes(plain, _PLAIN)
    if not update_blocks(plain).blocks:
        return None
    if dims_of_graph(plain.graph):
        raise TreadleError(
            "a step with declared shapes cannot carry updates to its next call",
            code="TR-537",
            remedy="leave shapes= out, or carry nothing",
        )
    _split_lists(plain, options)
    moves = [move for carry in options.carries for move in _moves(plain, carry)]
    steps = carried(plain, moves)
    _refuse_handed_out(captured, steps)
    return steps


def _refuse_handed_out(captured: Captured, steps: CarriedSteps) -> None:
    """A parameter that the call itself returns would be read before the next call."""
    ids = {id(tensor) for tensor in captured.result.handed_out()}
    for at in steps.flushed:
        if id(captured.inputs.sources[at].read([], {})) in ids:
            raise TreadleError(
                f"the update of {captured.step.signature.inputs[at].name!r} cannot run in the "
                "next call: this call returns the parameter itself",
                code="TR-532",
                remedy="do not return it, or carry another parameter",
            )


def _split_lists(step: StepGraph, options: Options) -> None:
    """Operations on lists that only a part of moves become two."""
    if not any(map(is_list_call, step.graph.nodes)) or update_blocks(step).couplings:
        return
    for carry in options.carries:
        names = frozenset(_taken(step, carry))
        if len(names) < len(update_blocks(step).blocks):
            run_passes(step, [SplitUpdates(names)])


def _taken(step: StepGraph, carry: Carry) -> list[str]:
    """The parameters of a choice. TR-530 where there are none."""
    known = [block.name for block in update_blocks(step).blocks]
    names = [name for name in known if carry.takes(name)]
    if not names:
        raise TreadleError(
            f"carry: the step updates no parameter of {carry.words}",
            code="TR-530",
            remedy=f"it updates {', '.join(known)}",
        )
    return names


def _moves(step: StepGraph, carry: Carry) -> tuple[Move, ...]:
    names = _taken(step, carry)
    before = _first_of(step, carry.before) if carry.before else None
    return update_moves(step, names, before)


def _first_of(step: StepGraph, pattern: str) -> fx.Node:
    """The first operation of the modules that ``pattern`` names."""
    inside = [
        node
        for node in step.graph.nodes
        if node.op == "call_function" and fnmatchcase(info(node).module, pattern)
    ]
    if inside:
        return inside[0]
    known = dict.fromkeys(info(node).module for node in step.graph.nodes if info(node).module)
    raise TreadleError(
        f"carry: no operation of the step is in a module {pattern!r}",
        code="TR-535",
        remedy=f"one of {', '.join(known) or 'none: the step calls no module'}",
    )
