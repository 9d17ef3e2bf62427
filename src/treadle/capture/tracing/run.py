"""The one run of the user's function on traced tensors, with all that it touches replaced."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TypeGuard, final

import torch
from torch import Tensor, fx, nn

from treadle.capture.argument_containers import Copies
from treadle.capture.distributed.communication import refuse_collectives
from treadle.capture.distributed.gradient_sync import GradientSync, RankGroup
from treadle.capture.explain_errors import called_with, show_line
from treadle.capture.integrations.grad_scaler import ScalerBegins
from treadle.capture.integrations.recurrent import RecurrentLayers
from treadle.capture.python_state.changed_line import LineWatch
from treadle.capture.python_state.changes import LateError
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.containers.container_changes import ContainerChanges
from treadle.capture.python_state.containers.outputs import OutputLog
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.flatten import flatten, unflatten
from treadle.capture.python_state.parts import Part
from treadle.capture.symbolic.deferred import AsksNumber, asks_size
from treadle.capture.symbolic.functions.reductions import asked_call, asks_extreme
from treadle.capture.symbolic.numbers import no_size
from treadle.capture.symbolic.size_numbers import as_number
from treadle.capture.tensors.gradient_effects import GradientEffects
from treadle.capture.tensors.result_slots import LossSlot, ResultSlot
from treadle.capture.tensors.sparse_gradients import SparseGradients
from treadle.capture.tracing.container_stand_ins import ContainerStandIns
from treadle.capture.tracing.gradients import Gradients
from treadle.capture.tracing.graph_updates import GraphUpdates
from treadle.capture.tracing.input_bindings import InputBindings
from treadle.capture.tracing.number_inputs import NumberInputs
from treadle.capture.tracing.optimizer_states import OptimizerStates
from treadle.capture.tracing.optimizer_steps import OptimizerSteps
from treadle.capture.tracing.outgoing import OutgoingValues
from treadle.capture.tracing.patching import patched
from treadle.capture.tracing.request import Substitutes, TraceRequest
from treadle.capture.tracing.side_effects import SideEffect, SideEffects
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.capture.tracing.user_tensors import UserTensors
from treadle.compat.checkpointing import leave_regions
from treadle.compat.hooks import is_scheduler_in_order
from treadle.compat.pytree import TreeSpec
from treadle.compat.switches import switches, switches_kept, uses_onednn
from treadle.compat.tracing import traced_positions, without_functions
from treadle.compat.unsized import Symbol, is_unsized


@final
@dataclass(frozen=True, slots=True)
class Returned:
    """The values that leave a step: the leaves of its result, with slots for tensors, and their
    structure; its effects on gradients; what it stores outside."""

    leaves: tuple[object, ...]
    tree: TreeSpec
    gradients: GradientEffects


@final
class Run:
    """What stands in for the user's objects in one run, what is recorded of it, and what it leaves.

    ``originals``: of code that was rewritten. ``failed``: the error of a run in which an answer was
    guessed: it is traced up to there.
    """

    def __init__(self, request: TraceRequest, substitutes: Substitutes) -> None:
        self.request = request
        self.failed: Exception | None = None
        self.lines: LineWatch | None = None  # which looks at a place after each line
        self.positions: Mapping[fx.Node, int] = {}  # of the nodes, once it is over
        self.substitutes, self.originals = substitutes, substitutes.originals
        self.returned = Returned((), flatten(None)[1], GradientEffects())
        self.external: ExternalState | None = None  # once it has begun
        self.effects: SideEffects | None = None  # likewise
        self.outputs = OutputLog()
        self.numbers = NumberInputs(request, substitutes)
        self.containers = ContainerStandIns(substitutes.containers, self.numbers.for_groups)
        sync = GradientSync(request.group if request.update else None)
        self.recorder = TraceRecorder(request.models, sync, request.update)
        self._copies: Copies | None = None  # of the arguments, once they are bound
        self._layers = RecurrentLayers(uses_onednn())  # asked before the trace
        self._sparse = SparseGradients()
        uses = self.numbers.uses
        self.bindings = InputBindings(request, sync, self._sparse)
        parts = request, self.bindings
        self.updates = GraphUpdates(*parts, self.recorder, uses, self._sparse)
        self.steps = OptimizerSteps(*parts, self.updates, self.recorder)
        self.states = OptimizerStates(*parts, self.updates, self.recorder, self.numbers.for_groups)
        self.tensors = UserTensors(*parts, self.recorder)
        self.gradients = Gradients(*parts, self.steps, self.recorder)
        self._connect()

    def _connect(self) -> None:
        """Connect the parts, which call each other during the run."""
        uses, recorder = self.numbers.uses, self.recorder
        recorder.asks_size, recorder.numbers.is_rewritten = self._asks_size, self._is_rewritten
        for table in (uses, recorder.numbers.uses):
            table.mode = lambda: recorder.mode()
            table.of_size = self._number_of
            table.extreme_asked, table.call_asked = asks_extreme, asked_call
            table.only_warns = is_scheduler_in_order
        if self.numbers.sizes is not None:
            uses.as_size = self.numbers.sizes.symbol
        recorder.conditions.path = self.request.path
        recorder.memory, recorder.argument_view = self.tensors.memory, self.tensors.argument_view
        recorder.constants.inputs = self.updates.constants, uses.inputs, uses.arrays
        if not self.request.update:
            recorder.after_backward = self.gradients.keep

    def _is_rewritten(self, code: CodeType) -> bool:
        """Whether another run may have a form of ``code`` that needs no numbers; else it is given
        them."""
        return self.originals.get(code, code) not in self.substitutes.given

    def _asks_size(self, frame: FrameType) -> AsksNumber | None:
        """The error that ends the run, so that ``frame`` needs no number for a size in the next
        run."""
        sizes = self.numbers.sizes
        if sizes is None:
            return None
        asks = asks_size(frame) if self._is_rewritten(frame.f_code) else None
        if asks is not None:
            asks.codes = tuple(self.originals.get(code, code) for code in asks.codes)
        elif code_owner(frame.f_code.co_filename) >= CodeOwner.INSTALLED:
            sizes.lines.append(show_line((frame.f_code.co_filename, frame.f_lineno)))
        return asks

    def _number_of(self, size: Symbol) -> object:
        """The number for a size that depends on values or on the arguments."""
        if is_unsized(size):
            return self.recorder.numbers.of_size(size)
        return as_number(size)

    def traced(self, inputs: list[Tensor]) -> list[Tensor]:
        """The function that ``make_fx`` traces: the step as a function of everything that it
        reads."""
        with self._sparse:
            outputs = self._traced(inputs)
        self.positions = traced_positions()
        return outputs

    def _traced(self, inputs: list[Tensor]) -> list[Tensor]:
        self.bindings.bind(inputs)
        self.tensors.begin()
        args, kwargs = unflatten(self.numbers.bind(self.bindings.batch), self.request.spec)
        copies = self._copies = Copies((args, kwargs), self.request.call)
        with self._replaced():
            external = self._begin()
            outgoing = self._outgoing(copies, external)
            effects = self.effects = SideEffects(outgoing, external)
            try:
                with external.watching(inputs), self.outputs.recording():
                    try:
                        with switches_kept(_sets_switch), self.lines or nullcontext():
                            result = called_with(self.request.function, args, kwargs)
                            self._require_numbers()
                    except Exception as error:
                        leave_regions(error)
                        if not self._may_be_wrong(error):
                            raise
                        self.failed = error
                        return []
                    self._check()
                    self._note_effects(copies, external, effects)
            finally:
                self.recorder.ends()
                for table in (self.numbers.uses, self.recorder.numbers.uses):
                    table.settle_index()
                    table.mode = table.of_size = None  # which know the run
                    table.as_size = no_size
        return self._return(result, outgoing, effects)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Inside, the user's objects are replaced, and events are recorded."""
        recorder = self.recorder
        with ExitStack() as undo:
            undo.enter_context(
                patched(
                    self.request,
                    self.bindings.by_id(),
                    self.steps,
                    self.states,
                    recorder,
                    self._layers,
                    self.numbers.for_groups,
                )
            )
            undo.enter_context(recorder.watching())
            undo.enter_context(self.numbers.standing_in())
            undo.enter_context(self.containers.standing_in())
            yield

    def _begin(self) -> ExternalState:
        """Track everything that the step can reach from now on."""
        request, recorder = self.request, self.recorder
        recorder.rng.meet(request.leaves)
        self.updates.hyper.begin(request.optimizers)
        external = ExternalState(
            request.function,
            request.models,
            request.optimizers,
            (*request.leaves, *self.numbers.changing.real_arrays, *self.containers.values),
            seen=recorder.rng.meet,
            draws=self.numbers.draws,
        )
        self.external = self.updates.external = external
        recorder.provenance.listen = external.listen
        recorder.pause, recorder.resume = external.pause, external.resume
        self.outputs.knows = external.knows
        return external

    def _outgoing(self, copies: Copies, external: ExternalState) -> OutgoingValues:
        return OutgoingValues(
            self.bindings.batch,
            self.request.call,
            copies,
            external,
            self.recorder.numbers,
            self.tensors,
            self._sparse,
        )

    def _require_numbers(self) -> None:
        """The refusal that says which whole number Python needed, if somebody's ``except`` has
        caught it."""
        if self.recorder.conditions.lacks_numbers:
            self.recorder.numbers.check()

    def _may_be_wrong(self, error: Exception) -> bool:
        """Whether an answer was guessed or is unknown, so that the real step may not get to this
        point."""
        if self.recorder.conditions.lacks_numbers:
            return True
        numbers = self.numbers
        stands_in = bool(self.containers.values) or (numbers.stand_in and numbers.uses.is_used)
        runs_again = stands_in or isinstance(error, AsksNumber | ScalerBegins)
        return self.recorder.conditions.has_guessed and not runs_again

    def _check(self) -> None:
        """Refuse what can only be found once the step is over."""
        recorder = self.recorder
        recorder.numbers.check()
        if not self.request.optimizers:
            recorder.sync.finish()
        refuse_collectives(recorder.provenance.lines)
        recorder.indices.check()
        recorder.rng.check()
        recorder.scaling.check()

    def _note_effects(self, copies: Copies, external: ExternalState, effects: SideEffects) -> None:
        self.containers.refuse_others(external)
        changing, recorder = self.numbers.changing, self.recorder
        traced = self.bindings.by_id().values()
        effects.note_changes(copies.changes(), changing, self.tensors, traced)
        effects.note_operations(ContainerChanges(self.containers.log))
        effects.note_outputs(self.outputs)
        effects.note_skipped(recorder.scaling)
        kept = effects.note_states(self.states.changes(changing), recorder.inside)

        def note_tensors() -> None:
            self.tensors.replace_states(kept, [*self.states.replaced()])
            self.bindings.refuse_changed_parameters(recorder.tensors)
            effects.note_tensors(self.tensors.changes())

        without_functions(note_tensors)()  # else gradients would count as read

    def _return(
        self, result: object, outgoing: OutgoingValues, effects: SideEffects
    ) -> list[Tensor]:
        """The results of the graph: the step's result, values stored outside, numbers that Python
        needs, gradients, and those for optimizers that step after it."""
        leaves, tree = outgoing.result(result)
        self._layers.packed.refuse(leaves)
        for leaf in (*leaves, *(leaf for change in effects.left for leaf in change.leaves)):
            self.recorder.rng.refuse_state(leaf)
        self.tensors.settle()
        effects.note_made_gradients(leaves)
        slots, tensors = outgoing.slots(leaves, _is_tensor)
        slots = [
            LossSlot() if slot is ResultSlot and _is_tensor(leaf) and LossSlot.fits(leaf) else slot
            for slot, leaf in zip(slots, leaves, strict=True)
        ]
        tensors += effects.take_slots()
        tensors += self.recorder.numbers.fetched_tensors()
        gradients, left = self.gradients.effects()
        grads = (*left, *self.steps.gradients())
        tensors += [part for grad in grads for part in outgoing.parts(grad)]
        self.returned = Returned(tuple(slots), tree, gradients)
        return self.tensors.written(tensors)

    def argument_part(self, node: int, at: int) -> Part:
        """The part ``at`` of the ``node``th container among the arguments."""
        assert self._copies is not None
        return self._copies.part(node, at)

    def tensor_for(self, tensor: object) -> Tensor | None:
        """The traced tensor for one of the user's."""
        traced = self.bindings.by_id().get(id(tensor))
        others = (entry.traced for entry in self.tensors.entries() if entry.find() is tensor)
        return next(others, None) if traced is None else traced

    def recorded(self, at: int) -> Sequence[object]:
        """The contents of the ``at``th container that stands in for another one."""
        return self.containers.log.contents(at)

    def is_seeded(self, generator: torch.Generator) -> bool:
        """Whether the step set the state of one of PyTorch's generators."""
        return self.recorder.rng.is_seeded(generator)

    def draws_otherwise(self) -> bool:
        """Whether Python's or NumPy's generators were used otherwise than by draws that each call
        makes again."""
        return self.external is not None and self.external.draws_otherwise()

    @property
    def left(self) -> tuple[SideEffect, ...]:
        """The side effects of the run."""
        return () if self.effects is None else tuple(self.effects.left)

    def met(self) -> Iterable[object]:
        """The objects that the step could reach."""
        return () if self.external is None else self.external.met()

    def unread_modes(self) -> frozenset[int]:
        """Modules, by their numbers, of which the run did not ask in which mode they were."""
        return frozenset() if self.external is None else self.external.unread_modes()

    def wrapped(self) -> Iterator[tuple[nn.Parameter, RankGroup]]:
        """Parameters whose gradients a wrapper averages in the end, and over which ranks."""
        for parameter in self.request.parameters:
            group = self.recorder.sync.expected_of(self.bindings.of(parameter))
            if group is not None and group.ranks > 1:
                yield parameter, group


def _is_tensor(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor)


def _sets_switch(name: str) -> LateError:
    key = name.replace(" ", "_")
    error = LateError(
        f"the step leaves PyTorch's {name} at another value: this would happen during capture, "
        "and not at later calls",
        code="TR-117",
        remedy="set it outside the step, or inside it with a context manager",
    )
    seen = (torch.is_grad_enabled, torch.is_anomaly_enabled)
    return error.seen_by(lambda _: (switches().get(key), *[each() for each in seen]))
