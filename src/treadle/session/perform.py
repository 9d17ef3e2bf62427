"""One run of a program: all of it or nothing."""

from collections.abc import Sequence

from torch import OutOfMemoryError, Tensor

from treadle.compiler.compiled import Compiled
from treadle.session.agreement import RankCall
from treadle.session.bind import clear_fresh, forget_call, step_eagerly
from treadle.session.undo import Undo
from treadle.util.errors import GroupFailure, RuntimeFailure
from treadle.util.expected import NotExpected


def perform(
    compiled: Compiled,
    inputs: Sequence[Tensor],
    undo: Undo,
    seconds: list[float] | None,
    call: RankCall,
) -> list[Tensor | None]:
    """The results of a run, optimizers that step outside the graph included. What fails before
    anything is written, or can be undone, has not happened; TR-406 otherwise. ``seconds``: gets the
    time of each host step. ``call``: among the ranks that it communicates with."""
    begun: list[bool] = []

    def begins() -> None:
        call.begin()
        begun.append(True)
        if compiled.captured.gradients.fresh:
            clear_fresh(compiled.captured)

    try:
        vouched = compiled.captured.inputs.call.vouched
        results = compiled.executable.run(inputs, seconds, begins, vouched)
        if compiled.captured.optimizers.eager:
            step_eagerly(compiled.captured, results)
    except NotExpected:
        undo.restore()
        forget_call(compiled.captured)
        raise
    except BaseException as error:
        if undo.restore() or not begun or isinstance(error, GroupFailure):
            raise
        raise RuntimeFailure(
            f"the step failed midway and is partly done: {error}",
            code="TR-406",
            remedy=f"load the last checkpoint before you continue; then {_mend(error)}",
        ) from error
    call.end()
    compiled.captured.dependencies.host_draws.happened()
    compiled.has_run = True
    return results


def _mend(error: BaseException) -> str:
    no_room = isinstance(error, OutOfMemoryError | MemoryError)
    return "give the step less memory" if no_room else "mend what the message names"
