"""The reads of a run, collected once it is over and everything is restored."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.read_names import ReadNames
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.stored.inputs import input_texts
from treadle.capture.stored.origin import ReadsOrigin
from treadle.capture.stored.reads import StoredReads
from treadle.capture.tensors.tensor_effects import GivenTensor, HeldTensor
from treadle.capture.tracing.run import Run
from treadle.util.errors import CaptureError


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunReads:
    """``guard``: what later calls compare. ``origin``: where it comes from. ``places``: where a
    call finds each tensor of the user's, by its id."""

    guard: ReadsGuard
    origin: ReadsOrigin
    places: Mapping[int, Location | StateLocation]

    def stored(self, run: Run) -> StoredReads:
        """The reads of the run, for other processes."""
        request, external = run.request, run.external
        assert external is not None
        step, graph = request.objects, self.guard.graph
        inputs = functools.partial(input_texts, step, request.sources, request.leaves, request.dims)
        return StoredReads.of(step, graph, self.origin, external.before, inputs)


def reads_of(run: Run) -> RunReads:
    """The reads of a run. Values that it stores outside are put where a call finds their owners."""
    external, request = run.external, run.request
    assert external is not None
    names = _names(run, external)
    walk = ReadsWalk(names, bound=[p for m in request.models.values() for p in m.parameters()])
    origin = ReadsOrigin(
        external.roots(),
        names,
        run.numbers.objects(),
        lambda: [entry.find for entry in run.tensors.entries() if not _is_made(entry, run)],
        tuple(run.originals.get(code, code) for code in external.executed_codes()),
    )
    origin.add_to(walk, request.objects)
    known = len(walk.graph.nodes)
    run.containers.read(walk)
    run.numbers.changing.read(walk)
    run.tensors.read(walk, external.is_named_in_code)
    run.states.read(walk, frozenset(run.numbers.uses.needed))
    origin.own = len(walk.graph.nodes) != known
    request.call.read(walk)
    guard = ReadsGuard(walk.end())
    _refuse_opaque(walk)
    return RunReads(guard, origin, _placed(run, guard))


def _is_made(entry: GivenTensor, run: Run) -> bool:
    """Whether it is a stand-in for a number or an array in the graph, and not a tensor of the
    user's."""
    made = run.numbers.uses.inputs, run.numbers.uses.arrays
    find = entry.find
    return isinstance(find, HeldTensor) and any(id(find.tensor) in each for each in made)


def _names(run: Run, external: ExternalState) -> ReadNames:
    call = run.request.call
    groups = (g for optimizer in run.request.optimizers.values() for g in optimizer.param_groups)
    return external.names(
        lambda value: value is call,
        run.containers.entries_read(),
        free=run.numbers.free_places(),
        unordered=map(id, groups),
    )


def _placed(run: Run, guard: ReadsGuard) -> dict[int, Location | StateLocation]:
    """From now on what the run met is found where its owner is at a call; where tensors are."""
    graph = guard.graph
    run.numbers.changing.placed(graph)
    run.containers.placed(graph)
    places = {**graph.tensors.places(), **run.states.places()}
    if run.effects is not None:
        run.effects.placed(graph, places)
    run.recorder.held.placed(places)
    return places


def _refuse_opaque(walk: ReadsWalk) -> None:
    if walk.opaque:
        raise CaptureError(
            f"treadle can neither compare nor read {walk.opaque[0]}, so it cannot tell whether "
            "it is the same at a later call",
            code="TR-116",
            remedy="pass tensors, Python values, or lists, dicts and dataclasses of them",
        )
