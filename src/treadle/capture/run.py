"""The one run of the user's function on traced tensors, with all it touches swapped in."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeVar, final

import torch
from torch import SymInt, Tensor, nn
from torch.optim import Optimizer

from treadle.capture.argument_containers import ArgumentAlias, ArgumentLocation, Copies, ServedCall
from treadle.capture.distributed.communication import refuse_collectives
from treadle.capture.distributed.gradient_sync import GradientSync, RankGroup
from treadle.capture.distributed.row_shards import RowShards
from treadle.capture.eager import CallsClosure, EagerStep, Reason, why_eager
from treadle.capture.explain_errors import here, users_codes
from treadle.capture.failures import called_with
from treadle.capture.integrations.grad_scaler import (
    ScalerBegins,
    SkippedUpdate,
    refused_scaling,
    selected,
)
from treadle.capture.integrations.recurrent import RecurrentLayers
from treadle.capture.optimizers.hyper_parameters import HyperParameters
from treadle.capture.optimizers.optimizer_state import StateLocation, TracedState, refused_state
from treadle.capture.optimizers.own_steps import OwnSteps
from treadle.capture.optimizers.registry import OptimizerUpdate, Values, check_step, update_rule
from treadle.capture.optimizers.updates import UpdatesOfGroup
from treadle.capture.patching import TraceRecorder, patched
from treadle.capture.python_state.call_arguments import parameter_names
from treadle.capture.python_state.code.frames import CodeOwner
from treadle.capture.python_state.containers.container_changes import (
    ChangedContainer,
    ContainerChanges,
    ContainersChanged,
    Reference,
    read_keys,
    recorded,
)
from treadle.capture.python_state.containers.container_recorders import (
    ContainerRecorder,
    OperationLog,
)
from treadle.capture.python_state.containers.outputs import OutputCall, OutputLog, Stream
from treadle.capture.python_state.external import (
    Change,
    DeferredValue,
    ExternalState,
    owner_of,
    refused,
)
from treadle.capture.python_state.flatten import flatten, flatten_with_paths, replaced, unflatten
from treadle.capture.python_state.parts import MISSING, is_plain
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.python_state.reads import Location, Reads
from treadle.capture.refuse import refuse_unfinished
from treadle.capture.sources import (
    Batch,
    BufferSlot,
    ClosedOverTensor,
    Grad,
    Held,
    Parameter,
    ParamGroup,
    ParamGroups,
    Pending,
    RunTimeArray,
    RunTimeNumber,
    Scalar,
    Source,
    State,
)
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf, is_numeric
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.capture.symbolic.changing_numbers import ChangingNumbers, counted, direct_place
from treadle.capture.symbolic.deferred import AsksNumber, is_known_later
from treadle.capture.symbolic.entries import asked_position
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.symbolic.memberships import membership_asked
from treadle.capture.symbolic.numbers import Number, Text, Uses, as_key, is_stand_in
from treadle.capture.tensors.own_tensors import KeptView, OwnTensors
from treadle.capture.tensors.result_slots import NamedOnce, slot_of
from treadle.capture.tensors.sparse_gradients import SparseGradients, SparseRows, is_sparse
from treadle.capture.tensors.tensor_effects import (
    Aspect,
    GivenTensor,
    HeldTensor,
    MadeGradient,
    TensorLocation,
    made_gradient,
    read_attributes,
    refused_storage,
)
from treadle.compat.distributed.sharded_tensors import ShardedLayout, layout_of, local_of, placed_as
from treadle.compat.fake import is_traced, mark_parameter, stand_in_for, users_class
from treadle.compat.hooks import copy_hooks, tensor_hooks
from treadle.compat.pytree import TreeSpec
from treadle.compat.switches import switches_kept, uses_onednn
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import outside_modes, traced_nodes, without_functions
from treadle.compat.unsized import is_unsized
from treadle.graph.core.signature import Input, Role
from treadle.util.errors import CaptureError

T = TypeVar("T")
Toggle = tuple[nn.Parameter, bool]
"""A parameter, and whether it needs a gradient from then on."""


@final
@dataclass(frozen=True, slots=True)
class SideEffect:
    """What the step leaves in a place outside of it. ``leaves``: slots for tensors."""

    place: (
        Location
        | TensorLocation
        | MadeGradient
        | ArgumentLocation
        | ContainerChanges
        | SkippedUpdate
        | StateLocation
        | OutputCall
    )
    leaves: tuple[Any, ...]
    tree: TreeSpec

    def put(self, values: list[Any]) -> None:
        """From now on it is there; where it is there already, nothing is written."""
        value = values[0] if len(values) == 1 and self.tree.is_leaf() else None
        if value is None or not is_plain(value):
            value = unflatten(values, self.tree)
        elif self.place.get() is value:
            return
        self.place.put(value)


def own_tensor(leaf: object) -> Tensor | None:
    """The user's own parameter, buffer or optimizer state that a leaf of a result is at every call,
    or that it is a view of."""
    compute = leaf.compute if isinstance(leaf, DeferredValue) else None
    compute = compute.find if isinstance(compute, KeptView) else compute
    if not isinstance(compute, functools.partial):
        return None
    is_state = isinstance(getattr(compute.func, "__self__", None), State)
    found = compute() if is_state or compute.func in (_itself, _buffer) else None
    return found if isinstance(found, Tensor) else None


def _sets_switch(name: str) -> CaptureError:
    return CaptureError(
        f"the step leaves PyTorch's {name} set to another value: that would happen when it is "
        "captured, and not at later calls",
        code="TR-117",
        remedy="set it outside of the step, or for a part of it by a context manager",
    )


def _buffer(owner: nn.Module, key: str) -> Tensor | None:
    return owner._buffers[key]


@dataclass
class Trace:
    """What the traced run leaves behind, in terms of the traced tensors."""

    watch: TraceRecorder
    leaves: list[Any] = field(default_factory=list[Any])
    tree: TreeSpec | None = None
    grads: list[tuple[nn.Parameter, Tensor]] = field(
        default_factory=list[tuple[nn.Parameter, Tensor]]
    )
    cleared: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    update: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    stepped: set[int] = field(default_factory=set[int])
    eager: list[EagerStep] = field(default_factory=list[EagerStep])
    external: ExternalState | None = None
    uses: Uses = field(default_factory=Uses)
    changed: list[Change | None] = field(
        default_factory=list[Change | None]
    )  # beside each of ``left``; none for what is done to arguments and to tensors themselves
    left: list[SideEffect] = field(default_factory=list[SideEffect])
    toggled: list[Toggle] = field(default_factory=list[Toggle])
    fresh: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    untouched: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    kept: list[nn.Parameter] = field(default_factory=list[nn.Parameter])  # of these
    scalars: dict[int, tuple[Input, Source]] = field(
        default_factory=dict[int, tuple[Input, Source]]
    )  # by the id of a constant
    lost: set[int] = field(default_factory=set[int])  # nodes that stand for what those leave
    own_rows: dict[int, int] = field(default_factory=dict[int, int])  # nodes that take them: ranks


@dataclass(frozen=True, slots=True)
class _EagerGradient:
    """The gradient that an optimizer outside of the graph gets, and the one it was copied from."""

    copy: Tensor
    original: Tensor
    version: int


class Run:
    """The one run of the user's function, with everything it touches swapped and put back."""

    def __init__(
        self,
        function: Callable[..., Any],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        param_groups: ParamGroups,
        sources: list[tuple[Input, Source]],
        leaves: list[Any],
        spec: TreeSpec,
        *,
        update: bool = True,
        plans: bool = False,
        call: ServedCall | None = None,
        numbers: Sequence[Location] = (),
        stand_in: bool = True,
        containers: Sequence[ChangedContainer] | None = None,
        group: RankGroup | None = None,
        path: Answers | None = (),
        own_steps: OwnSteps,
    ) -> None:
        """``call``: where the arguments of later calls are found. ``numbers``: places whose numbers
        change from call to call. ``stand_in=False``: every number is taken as it is.
        ``containers``: those that others stand in for, since a run before changed them; ``None``:
        nothing stands in for any.
        ``path``: the answers to its first decisions on values of tensors. ``own_steps``: of
        optimizers without a form those whose own code is captured.
        ``update=False``: gradients only. Optimizers do not step, and what the last backward left
        in ``.grad`` stays there, whatever clips or clears it afterwards. ``plans``: there are no
        values."""
        self.function = function
        self.models = models
        self.optimizers = optimizers
        self.param_groups = param_groups
        self.sources = sources
        self.leaves = leaves
        self.spec = spec
        self._divided: dict[int, RowShards] = {
            id(each.parameter): each.shards
            for _, each in sources
            if isinstance(each, State) and each.shards is not None
        }
        self.sync = GradientSync(group if update else None)
        self.trace = Trace(TraceRecorder(models, self.sync, updates=update))
        self.trace.watch.conditions.path = path
        self.trace.uses.of_size = self.trace.watch.numbers.of_size
        watch = self.trace.watch
        for uses in (self.trace.uses, watch.numbers.uses):
            uses.mode = lambda: watch.mode()
        self.trace.uses.membership_asked = membership_asked
        self.trace.uses.place_asked = asked_position
        self.failed: Exception | None = None  # after a guess
        self._layers = RecurrentLayers(uses_onednn())  # asked before the trace
        self._updates = update
        self._plans = plans
        self._call = call or ServedCall()
        self.sparse = SparseGradients()
        self.numbers = ChangingNumbers(numbers, self.trace.uses, lambda: self._call.leaves)
        self._scaling = frozenset(each.label for each in numbers)
        self._stands_in = stand_in
        self._containers = containers
        self._log = OperationLog()
        self.draws = HostDraws(self.trace.uses)
        self.outputs = OutputLog()
        self._steps: list[int] = []  # the ids of optimizers, by each of their updates
        self._kept: dict[int, Tensor] | None = None  # by the last backward; ``None`` before it
        self._of_fakes: set[str] = set()
        self._on_tensor: set[str] = set()
        self._hooks: dict[int, tuple[object, ...]] = {}  # of parameters, by their ids
        self._given: list[GivenTensor] = []  # among the arguments
        self._memory: set[int | None] = set()  # that inputs have, before it runs
        self._hyper = HyperParameters(self.trace.uses, self.trace.watch.held_as)
        if not update:
            self.trace.watch.after_backward = self._keep_gradients
        self._assigned: list[tuple[Tensor, Tensor]] = []  # what they were, and what is assigned
        self._owned = OwnTensors()
        self.pending: Pending = {}  # state that there was not yet when a call began
        self._stand_ins: dict[int, Tensor] = {}
        self._values: dict[tuple[int, str], Tensor] = {}
        self._handed: dict[int, _EagerGradient] = {}
        self._looked_at: dict[int, Optimizer] = {}  # whose state was there, or not, for the step
        self._started: dict[int, dict[str, float]] = {}
        self._own_steps = own_steps
        self._states: list[TracedState] = []

    def traced(self, inputs: list[Tensor]) -> list[Tensor]:
        """What ``make_fx`` traces: the step as a function of all it reads."""
        with self.sparse:
            return self._traced(inputs)

    def _traced(self, inputs: list[Tensor]) -> list[Tensor]:
        batch, self._buffers = self._bind(inputs)
        self._memory = {storage_key(each) for each in inputs}
        self._given = [
            *(
                self._given_tensor(at, x)
                for at, x in enumerate(batch)
                if isinstance(x, Tensor) and id(self.leaves[at]) not in self._stand_ins
            ),
            *(self._buffer_tensor(*each) for each in self._buffers),
        ]
        self._inputs = {id(each): at for at, each in enumerate(batch) if not is_plain(each)}
        given, _ = flatten_with_paths(unflatten(batch, self.spec), parameter_names(self.function))
        self._paths = [path for path, _ in given]
        batch = [self._standing_in(at, leaf) for at, leaf in enumerate(batch)]
        args, kwargs = unflatten(batch, self.spec)
        self._copies = Copies((args, kwargs), self._call)
        watch = self.trace.watch
        watch.memory = self._users_memory
        table = self._table(self._buffers)
        self._groups = {id(each): dict(each.group) for each in self.param_groups}
        uses = self.trace.uses if self._stands_in else None
        ours = self._stepper, self._traced_state
        inside = patched(self.models, self.optimizers, table, *ours, watch, self._layers, uses)
        containers = self._containers or ()
        standing = recorded(containers, self._log)
        draws = self.draws.noted() if self._stands_in else contextlib.nullcontext()
        with inside, watch.watching(), self.numbers.standing_in(), standing, draws:
            watch.rng.meet(self.leaves)
            self._hyper.begin(self.optimizers)
            external = ExternalState(
                self.function,
                self.models,
                self.optimizers,
                (*self.leaves, *self.numbers.real_arrays, *(each.value for each in containers)),
                seen=watch.rng.meet,
                draws=self.draws,
            )
            self.trace.external = external
            watch.listen = external.listen
            watch.masks.inputs = self.trace.scalars, self.trace.uses.inputs, self.trace.uses.arrays
            self.outputs.knows = external.knows
            try:
                with external.watching(inputs), self.outputs.recording():
                    try:
                        with switches_kept(_sets_switch):
                            result = called_with(self.function, args, kwargs)
                    except Exception as error:
                        if not self._may_be_wrong(error):
                            raise
                        self.failed = error
                        return []
                    watch.numbers.check()
                    if not self.optimizers:
                        self.sync.finish()
                    refuse_collectives(watch.lines)
                    watch.indices.check()
                    watch.rng.check()
                    watch.scaling.check()
                    self._refuse_unrecorded(external)
                    self._note_left(external, table)
                    self._note_states()
                    without_functions(self._refuse_on_parameters)()
                    without_functions(self._note_tensors)(table)
            finally:
                watch.ends()
                self.trace.uses.mode = None
        return self._returned(result)

    def _may_be_wrong(self, error: Exception) -> bool:
        """Whether the step itself would not get there: an answer was guessed."""
        stands_in = bool(self._containers) or (self._stands_in and self.trace.uses.is_used)
        runs_again = stands_in or isinstance(error, AsksNumber | ScalerBegins)
        return self.trace.watch.conditions.has_guessed and not runs_again

    def _bind(
        self, inputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[tuple[nn.Module, str, Tensor]]]:
        """What is traced in the place of parameters, state and scalars; the leaves of the
        arguments, and the buffers, as they are traced."""
        batch = list(self.leaves)
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        for (_, source), value in zip(self.sources, inputs, strict=True):
            match source:
                case Parameter(parameter):
                    leaf = around(value.detach(), layout_of(parameter))
                    stand_in_for(leaf, users_class(parameter))
                    leaf.requires_grad_(parameter.requires_grad)
                    mark_parameter(leaf)
                    self._of_fakes |= vars(leaf).keys()
                    self._on_tensor |= vars(parameter).keys()
                    theirs = vars(parameter).items()  # of a fake one also where it is
                    vars(leaf).update({k: v for k, v in theirs if k not in self._of_fakes})
                    if is_sparse(parameter.grad):
                        leaf.grad = self.sparse.left_before(leaf)
                    self.sync.watch(leaf, has_gradient=parameter.grad is not None)
                    copy_hooks(parameter, leaf)
                    self._hooks[id(parameter)] = tensor_hooks(leaf)
                    self._stand_ins[id(parameter)] = leaf
                case BufferSlot(owner, key):
                    buffer = owner._buffers[key]
                    traced = stand_in_for(around(value, layout_of(buffer)), users_class(buffer))
                    buffers.append((owner, key, traced))
                case State(_, parameter, key):
                    self._values[id(parameter), key] = value
                case Scalar(param_group, key, _):
                    self._values[id(param_group), key] = value
                    self._started.setdefault(id(param_group), _hyper_parameters(param_group))
                case Grad(parameter, layout):
                    self._stand_ins[id(parameter)].grad = around(value, layout)
                case Batch(at):
                    leaf = self.leaves[at]
                    batch[at] = stand_in_for(around(value, layout_of(leaf)), users_class(leaf))
                case ClosedOverTensor() | Held() | RunTimeNumber() | RunTimeArray():
                    raise AssertionError("constants are found after the trace")
        for at, leaf in enumerate(self.leaves):
            batch[at] = self._stand_ins.get(id(leaf), batch[at])  # a parameter that is passed
        return batch, buffers

    def _standing_in(self, at: int, leaf: Any) -> Any:
        """A number or text among the arguments, as what may be another one at a later call."""
        roots, call = frozenset({("argument", at)}), self._call
        if not self._stands_in:
            return leaf
        self.trace.uses.decisions.labels["argument", at] = f"argument {self._paths[at]}"
        if is_real(leaf):
            scales = f"argument {at}" in self._scaling
            return Number(leaf, lambda: call.leaves[at], roots, self.trace.uses, scales=scales)
        if is_numeric(leaf):
            return ArrayLeaf(leaf, lambda: call.leaves[at], roots, self.trace.uses)
        if type(leaf) is str:
            return Text(leaf, lambda: call.leaves[at], roots, self.trace.uses)
        return leaf

    def met(self) -> Iterable[object]:
        """What the step could reach when it ran."""
        return self.trace.external.met() if self.trace.external is not None else ()

    def asked(self, error: Exception | None = None) -> Iterable[tuple[CodeType, ...]]:
        """Where a real number was asked for and another stands in, or ``type`` of what may be a
        traced tensor: the codes of the frames. ``error``: what ended the run, where something of
        C++ may have refused what stands in."""
        external = self.trace.external
        types = () if external is None else external.calls_type
        refused = () if error is None else users_codes(error)
        return [*self.trace.uses.asked.values(), *types, *([refused] if refused else [])]

    def asks_types(self) -> bool:
        """Whether a number that stands in may have been asked for its type: then the run is one
        of another program."""
        external = self.trace.external
        if external is None or not external.asks_types:
            return False
        if self._containers:
            return True
        if not self._stands_in:
            return bool(self.numbers.keys())
        given = any(is_real(leaf) or type(leaf) is str or is_numeric(leaf) for leaf in self.leaves)
        return given or bool(self.numbers.keys()) or external.is_named_in_code("param_groups")

    def read(self) -> Reads:
        """What the run read of the Python around it, now that everything is as it was before."""
        external, uses = self.trace.external, self.trace.uses
        assert external is not None
        entries = read_keys(self._log.recorders)
        names = external.names(lambda value: value is self._call, entries)
        parameters = [p for model in self.models.values() for p in model.parameters()]
        free = {key: None for key in self._stood_in() if key not in uses.needed}
        groups = [id(g) for each in self.optimizers.values() for g in each.param_groups]
        reads = Reads(names, bound=parameters, free=free, unordered=groups)
        external.add_roots(reads)
        for each in self._log.recorders:
            if each.reads_length and not each.reads_all:
                reads.add_computed(f"len({each.label})", functools.partial(_length, each))
        for at, (path, leaf) in enumerate(zip(self._paths, self.leaves, strict=True)):
            if is_numeric(leaf) and self._is_free(at):
                continue
            if not isinstance(leaf, Tensor) and not is_plain(leaf):
                reads.add_argument(f"argument {path}", leaf, functools.partial(self._leaf, at))
        self.numbers.read(reads)
        given = self._all_given()
        for each in given:
            each.read(reads, self.trace.watch, external.is_named_in_code)
        read_attributes(given, reads, external.is_named_in_code)
        for each in self._looked_at.values():
            reads.add_computed(f"the state of {type(each).__name__}", functools.partial(_has, each))
        for each in self._states:
            if each.has_own():
                needed = frozenset(uses.needed)
                reads.add_computed(each.name, functools.partial(each.layout, needed))
                elsewhere, label = reads.places(), f"a tensor in {each.name}"
                for key, place in each.places().items():
                    if key in elsewhere:
                        is_one = functools.partial(_are_one, place, elsewhere[key])
                        reads.add_computed(label, is_one)
        for at, each in enumerate(self._call.containers):
            label, getter = type(each.value).__name__, functools.partial(self._container, at)
            reads.add_container(f"argument {label}", each.value, getter, each.parts)
        for at, key in enumerate(self._call.given.keys):
            if not is_plain(key):
                getter = functools.partial(self._key, at)
                reads.add_argument(f"a key of an argument ({type(key).__name__})", key, getter)
        reads.settle()
        if reads.opaque:
            raise CaptureError(
                f"{reads.opaque[0]} can be neither compared nor read: whether it is the same at "
                "a later call cannot be told",
                code="TR-116",
                remedy="pass tensors, Python values, or lists, dicts and data classes of them",
            )
        return reads

    def _leaf(self, at: int) -> Any:
        return self._call.leaves[at]

    def _container(self, at: int) -> Any:
        return self._call.containers[at].value

    def _key(self, at: int) -> Any:
        return self._call.given.keys[at]

    def _stood_in(self) -> Iterator[tuple[int, Any]]:
        """Places whose numbers stood in."""
        yield from self.numbers.keys()
        if not self._stands_in:
            return
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for key, value in group.items():
                    values = value if type(value) is tuple else (value,)
                    if key != "params" and all(map(is_real, values)):
                        yield id(group), key

    def unread_modes(self) -> frozenset[int]:
        """Modules, by their numbers, of which the run did not ask in which mode they were."""
        external = self.trace.external
        return frozenset() if external is None else external.unread_modes()

    def free_arguments(self) -> frozenset[int]:
        """Leaves of the arguments on whose values nothing depends."""
        if not self._stands_in:
            return frozenset()
        return frozenset(
            at
            for at, leaf in enumerate(self.leaves)
            if (is_real(leaf) or type(leaf) is str) and self._is_free(at)
        )

    def _is_free(self, at: int) -> bool:
        """Whether nothing depends on what stands in for this argument."""
        return self._stands_in and ("argument", at) not in self.trace.uses.needed

    def placed(self, reads: Reads) -> None:
        """What is left outside goes where its owner is found at a call, and is read there."""
        self.numbers.placed(reads)
        for each in self._log.recorders:
            node = reads.node_of(each.real)
            if node is not None:
                each.found = node.current
            elif not self._log.is_got(each):
                raise refused(each.label, type(each.real).__name__)
        self._leave_what_stands_there(reads)
        places = self.places_of_tensors(reads)
        for tensor, given in self.trace.watch.held.values():
            if id(tensor) in places and isinstance(given.find, HeldTensor):
                given.find.found_at(places[id(tensor)])
        for at, (left, change) in enumerate(zip(self.trace.left, self.trace.changed, strict=True)):
            if change is None:
                continue
            place = reads.place_of(change.owner, change.at, change.name, change.label)
            if place is not None:
                self.trace.left[at] = SideEffect(place, left.leaves, left.tree)

    def places_of_tensors(self, reads: Reads) -> dict[int, Location | StateLocation]:
        """By its id, where a tensor of the user's is found at a call."""
        found: dict[int, Location | StateLocation] = {}
        for state in self._states:
            found |= state.places()
        return {**reads.places(), **found}

    def _leave_what_stands_there(self, reads: Reads) -> None:
        """An object from outside that is left in another place is the one that stands in its own
        at a call."""
        places = self.places_of_tensors(reads)

        def now(leaf: Any) -> Any:
            if is_plain(leaf) or isinstance(leaf, DeferredValue):
                return leaf
            if id(leaf) in places:
                return DeferredValue(places[id(leaf)].get)
            node = reads.node_of(leaf)
            return DeferredValue(node.current) if node is not None and node.is_found_anew else leaf

        for at, each in enumerate(self.trace.left):
            leaves = tuple(map(now, each.leaves))
            self.trace.left[at] = SideEffect(each.place, leaves, each.tree)

    def _note_left(self, external: ExternalState, stand_ins: Mapping[int, Tensor]) -> None:
        """``self.mean = 0.9 * self.mean + ...`` of a buffer is a write to the buffer that was
        there; what is left elsewhere is a result that is put there."""
        written = {id(each) for each in stand_ins.values()}
        rebound: list[tuple[Tensor, Tensor]] = []
        changes = external.changes()
        again = [
            each
            for each in changes
            if external.was_read(each) and self.numbers.depends_on(each.before, each.now)
        ]
        if again:
            raise counted(again)
        outside = [(change, None) for change in changes]
        for change, place in [*outside, *self._copies.changes()]:
            old, new = change.before, change.now
            if id(old) in written and _is_alike(old, new):
                rebound.append((old, new.detach().clone()))
                continue
            leaves, tree = self._taken_apart(self._copies.with_whole(new), change.label)
            others = [leaf for leaf in leaves if not self._is_given(leaf)]
            if len(others) == len(leaves) and not isinstance(new, list | dict | tuple):
                leaves, tree = [external.again(new, change.label)], flatten(None)[1]
            self.trace.left.append(SideEffect(place or direct_place(change), tuple(leaves), tree))
            self.trace.changed.append(None if place else change)
        self._note_operations(external)
        for output, leaves, tree in self.outputs.calls:
            self.trace.left.append(SideEffect(output, tuple(map(_later, leaves)), tree))
            self.trace.changed.append(None)
        for optimizer, found in self.trace.watch.scaling.stepped.values():
            leaves, tree = flatten(found)
            self.trace.left.append(SideEffect(SkippedUpdate(optimizer), tuple(leaves), tree))
            self.trace.changed.append(None)
        self._assigned += rebound

    def _refuse_unrecorded(self, external: ExternalState) -> None:
        """``ContainersChanged`` for containers that are to be stood in for."""
        if self._containers is None:
            return
        found = external.changed_containers()
        known = {id(each.value) for each in self._containers}
        if any(id(each.value) not in known for each in found):
            raise ContainersChanged([*self._containers, *found])

    def _note_states(self) -> None:
        """What it left among the user's own entries of the state of optimizers."""
        kept: list[Tensor] = []
        for state in self._states:
            for place, value in state.changes():
                if self.numbers.depends_on(place.before, value):
                    raise refused_state(f"counts in {place.label}, and depends on the number")
                leaves, tree = flatten(value)
                leaves = [self._held(leaf) for leaf in leaves]
                self.trace.left.append(SideEffect(place, tuple(leaves), tree))
                self.trace.changed.append(None)
                kept += [leaf for leaf in leaves if is_traced(leaf)]
        without_functions(self._refuse_views)(kept)  # else gradients would count as read

    def _refuse_views(self, kept: Sequence[Tensor]) -> None:
        """TR-125 for tensors of which one is in the memory of another, or of one that is there
        before: what is written to the one at a later call, the other would not have."""
        grads = [leaf.grad for leaf in self._stand_ins.values() if leaf.grad is not None]
        own = {id(each) for each in (*self._stand_ins.values(), *grads)}
        own |= {id(given.traced) for given in self._all_given()}
        owners = {storage_key(each): id(each) for each in grads} | dict.fromkeys(self._memory, 0)
        for each in kept:
            if id(each) in own:
                continue
            if owners.setdefault(storage_key(each), id(each)) != id(each):
                raise refused_state("keeps a view of another tensor in optimizer.state")

    def _held(self, leaf: Any) -> Any:
        """A tensor of the user's becomes the one that is there at a call."""
        return self.trace.watch.inside(leaf) if isinstance(leaf, Tensor) else leaf

    def _note_operations(self, external: ExternalState) -> None:
        """What was done to containers outside, as one side effect."""
        place = ContainerChanges(self._log)
        for each in self._log.recorders:
            if not self._log.is_complete(each):
                raise refused(each.label, type(each.real).__name__)
        if not place.label:
            return
        roots = [DeferredValue(each) for each in place.roots()]
        given = self._copies.with_whole((tuple(0 for _ in roots), place.args()))
        leaves, tree = self._taken_apart(given, place.label)
        made: list[Any] = [*roots]
        for leaf in leaves[len(roots) :]:
            made.append(leaf if self._is_given(leaf) else external.again(leaf, place.label))
        self.trace.left.append(SideEffect(place, tuple(made), tree))
        self.trace.changed.append(None)

    def _taken_apart(self, value: Any, label: str) -> tuple[list[Any], TreeSpec]:
        """Leaves and structure of what is returned or left outside: containers, and objects that
        the run made around its tensors."""
        external = self.trace.external
        assert external is not None

        def instead(leaf: object, rest: object) -> object:
            if self._is_given(leaf) or not external.hides_traced(rest):
                return None
            return external.taken_apart(leaf, label)

        return flatten(replaced(value, _with_real_keys), instead)

    def _is_given(self, leaf: Any) -> bool:
        """Whether it is of this call, and another one at the next."""
        is_made = (
            is_traced(leaf) or isinstance(leaf, ArgumentAlias | Reference) or is_stand_in(leaf)
        )
        is_made = is_made or isinstance(leaf, SymInt) or is_unsized(leaf)
        return is_made or id(leaf) in self._inputs

    def _table(self, buffers: list[tuple[nn.Module, str, Tensor]]) -> dict[int, Tensor]:
        """The traced tensor for each of the user's, by its id."""
        held = {id(owner._buffers[key]): value for owner, key, value in buffers}
        return self._stand_ins | held

    def _returned(self, result: Any) -> list[Tensor]:
        given = self._copies.with_whole(result)
        refuse_unfinished(flatten(given)[0])
        leaves, self.trace.tree = self._taken_apart(given, "its result")
        self._layers.packed.refuse(leaves)
        for leaf in (*leaves, *(leaf for each in self.trace.left for leaf in each.leaves)):
            self.trace.watch.rng.refuse_state(leaf)
        self._owned = self._own_tensors()
        self._leave_made_gradients(leaves)
        leaves = [self._own(leaf) for leaf in leaves]
        named = NamedOnce()
        leaves = named.of(leaves)
        tensors = [x for leaf in leaves if isinstance(leaf, Tensor) for x in self._parts(leaf)]
        slots = [slot_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.trace.leaves = slots
        tensors += self._left_tensors(named)
        tensors += self.trace.watch.numbers.fetched_tensors()
        for parameter in self._parameters():
            if id(self._stand_ins[id(parameter)]) in self.trace.watch.fresh:
                self.trace.fresh.append(parameter)
                if self.trace.watch.conditions.keeps(self._stand_ins[id(parameter)]):
                    self.trace.kept.append(parameter)
            flag = self._stand_ins[id(parameter)].requires_grad
            if flag != parameter.requires_grad:
                self.trace.toggled.append((parameter, flag))
        for parameter in self._parameters():
            grad = self._gradient(parameter)
            if self._is_as_handed(parameter):
                continue
            if not self.trace.watch.uses_gradient(self._stand_ins[id(parameter)]):
                self.trace.untouched.append(parameter)
            elif grad is not None:
                self.trace.grads.append((parameter, grad))
                tensors += self._parts(grad)
            else:
                self.trace.cleared.append(parameter)
        for each in self.trace.eager:
            tensors += [x for p in each.parameters for x in self._parts(self._handed[id(p)].copy)]
        return self._written(tensors)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """What the graph gives for a tensor that leaves it, which ``slot_of`` puts together."""
        if is_sparse(tensor):
            rows = self.sparse.rows_of(tensor)
            return [rows.indices.detach(), rows.values.detach()]
        return [local_of(tensor.detach())]

    def _written(self, results: list[Tensor]) -> list[Tensor]:
        """The results, and after them the values that ``.data =`` gave to parameters and buffers
        are in their memory. What was in it until then is a result's own."""
        memory = {storage_key(before) for before, _ in self._assigned}
        with torch.no_grad():
            results = [each.clone() if storage_key(each) in memory else each for each in results]
            for before, now in self._assigned:
                before.copy_(now)
        return results

    def _left_tensors(self, named: NamedOnce) -> list[Tensor]:
        """The tensors that go to places outside, which get slots; the user's own go as they are.
        ``named``: has those of the result."""
        found: list[Tensor] = []
        for at, each in enumerate(self.trace.left):
            leaves = named.of([self._own(leaf) for leaf in each.leaves])
            made = [x for leaf in leaves if is_traced(leaf) for x in self._parts(leaf)]
            slots = [slot_of(leaf) if is_traced(leaf) else leaf for leaf in leaves]
            self.trace.left[at] = SideEffect(each.place, tuple(slots), each.tree)
            found += made
        return found

    def _leave_made_gradients(self, leaves: Sequence[Any]) -> None:
        """What the step returns (``leaves``) and leaves has the gradients of a call, as far as it
        was made in the step."""
        left = [leaf for each in self.trace.left for leaf in each.leaves]
        for leaf in {id(each): each for each in (*leaves, *left) if is_traced(each)}.values():
            own = self._own(leaf)
            if isinstance(own, DeferredValue) and not isinstance(own.compute, KeptView):
                continue
            grad = made_gradient(leaf)
            if grad is not None:
                pair = (leaf, grad)
                self.trace.left.append(SideEffect(MadeGradient(), pair, flatten((0, 0))[1]))
                self.trace.changed.append(None)

    def _refuse_on_parameters(self) -> None:
        """TR-117 for attributes, hooks and shapes that the step leaves on parameters."""
        for parameter in self._parameters():
            leaf = self._stand_ins[id(parameter)]
            where = self.trace.watch.line_of(leaf)
            found, before = vars(leaf), vars(parameter)
            known = self._on_tensor - self._of_fakes
            if any(found.get(k, MISSING) is not before.get(k, MISSING) for k in known):
                raise refused("an attribute of a parameter", "tensor", where)
            new = found.keys() - before.keys() - self._of_fakes
            if new:
                raise refused(f"the attribute {min(new)} of a parameter", "tensor", where)
            if tensor_hooks(leaf) != self._hooks[id(parameter)]:
                raise refused("the hooks of a parameter", "tensor", where)
            if leaf.shape != parameter.shape:
                raise refused_storage(leaf, where)

    def _given_tensor(self, at: int, traced: Tensor) -> GivenTensor:
        """A tensor among the arguments."""
        find = functools.partial(self._tensor, at)
        return GivenTensor.of(f"argument {at}", find, self.leaves[at], traced, is_argument=True)

    def _buffer_tensor(self, owner: nn.Module, key: str, traced: Tensor) -> GivenTensor:
        """A buffer."""
        find, buffer = functools.partial(_buffer, owner, key), owner._buffers[key]
        assert buffer is not None, key
        return GivenTensor.of(f"the buffer {key}", find, buffer, traced, is_argument=False)

    def _tensor(self, at: int) -> object:
        """A leaf of the arguments; ``MISSING`` between two calls."""
        return self._call.leaves[at] if at < len(self._call.leaves) else MISSING

    def _note_tensors(self, table: Mapping[int, Tensor]) -> None:
        """What the step did to the user's own tensors. Of parameters and buffers, whose memory
        stays, values that ``.data =`` gave them are written to it when all results are known."""
        watch = self.trace.watch
        given = self._all_given()
        known = self._memory | {each.memory for each in given}
        owned = list({id(each): each for each in table.values()}.values())
        assigned = watch.assignments
        assigned.refuse_shared([*owned, *(each.traced for each in given)], known, watch)
        for each in owned:
            before = assigned.before(each)
            if before is None:
                continue
            if not _is_alike(before, each):
                raise refused_storage(each, watch.line_of(each))
            self._assigned.append((before, each))
        stay = set(map(id, owned))
        for each in given:
            for place, value in each.changes(assigned, watch):
                if place.aspect is not Aspect.DATA or id(each.traced) not in stay:
                    self._leave(place, value)

    def _users_memory(self) -> frozenset[int | None]:
        """The keys of the memory of tensors that were there before, or are when it is done."""
        held = (each.memory for _, each in self.trace.watch.held.values())
        return frozenset(self._memory).union(held)

    def _all_given(self) -> list[GivenTensor]:
        """The user's tensors that are no parameters, and those that the step met outside."""
        return [*self._given, *(each for _, each in self.trace.watch.held.values())]

    def _leave(self, place: TensorLocation, value: object) -> None:
        """From now on ``value`` is left there by every call."""
        leaves, tree = flatten(value)
        others = [leaf for leaf in leaves if not self._is_given(leaf) and not is_plain(leaf)]
        if others and value is not MISSING:
            raise refused(place.label, type(value).__name__, here())
        self.trace.left.append(SideEffect(place, tuple(leaves), tree))
        self.trace.changed.append(None)

    def _own(self, leaf: Any) -> Any:
        """A tensor of the user's that is returned or left somewhere is that object, and a view of
        one is a view of it; a size that was declared is the number it is for the sizes that this
        variant is for."""
        if is_unsized(leaf):
            leaf = self.trace.watch.numbers.of_size(leaf)
        if isinstance(leaf, SymInt):
            return int(leaf)
        if is_known_later(leaf):
            self.trace.watch.numbers.fetch(leaf)
        if is_stand_in(leaf):
            return DeferredValue(leaf.compute)
        if isinstance(leaf, ArgumentAlias | Reference):
            return DeferredValue(leaf)
        if id(leaf) in self._inputs:
            return DeferredValue(functools.partial(self._leaf, self._inputs[id(leaf)]))
        for tensor, given in self.trace.watch.held.values():
            if leaf is tensor or leaf is given.traced:
                return DeferredValue(given.find)
        if not isinstance(leaf, Tensor) or not is_traced(leaf):
            return leaf
        return self._owned.of(leaf) or leaf

    def _own_tensors(self) -> OwnTensors:
        """Parameters, buffers, arguments, tensors outside and the state of optimizers."""
        found = OwnTensors()
        before = self.trace.watch.assignments.before
        written = {storage_key(old) for old, _ in self._assigned}
        for parameter in self._parameters():
            traced = self._stand_ins[id(parameter)]
            is_written = before(traced) is not None or storage_key(traced) in written
            found.add(functools.partial(_itself, parameter), traced, None if is_written else traced)
        for given in self._all_given():
            was = before(given.traced)
            was = given.traced if was is None else was
            is_rebound = given.memory in written
            if not is_rebound or before(given.traced) is not None:
                found.add(given.find, given.traced, None if is_rebound else was)
        for _, source in self.sources:
            if isinstance(source, State) and source.shards is None:
                traced = self._values[id(source.parameter), source.key]
                found.add(functools.partial(source.read, [], self.pending), traced, traced)
        return found

    def _is_as_handed(self, parameter: nn.Parameter) -> bool:
        """Whether ``.grad`` is still what an optimizer outside of the graph was given."""
        handed = self._handed.get(id(parameter))
        grad = self._gradient(parameter)
        if handed is None or grad is None or grad is not handed.original:
            return False
        return grad._version == handed.version

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What the step leaves in ``.grad``."""
        if self._kept is not None:
            return self._kept.get(id(parameter))
        return self._stand_ins[id(parameter)].grad

    def _keep_gradients(self) -> None:
        """What is in ``.grad`` after a backward, for a call without an update."""
        found = {} if self._kept is None else self._kept
        with torch.no_grad():
            for key, leaf in self._stand_ins.items():
                if leaf.grad is not None:
                    found[key] = leaf.grad.clone()
        self._kept = found

    def _stepper(self, optimizer: Optimizer) -> Callable[..., Any]:
        """``optimizer.step`` in functional form, on the traced parameters and state."""
        check_step(optimizer)
        if self._own_steps.takes(optimizer):
            trace, updates = self.trace, self._updates
            return self._own_steps.stepper(optimizer, trace.watch, trace.update, updates=updates)
        reason = self._own_steps.why_eager(optimizer)

        def step(closure: Callable[[], T] | None = None) -> T | None:
            loss = None
            if closure is not None:
                if reason is not None:
                    raise CallsClosure(optimizer, here())
                with torch.enable_grad():
                    loss = closure()
            self._refuse_more_steps(optimizer)
            start = traced_nodes()
            with torch.no_grad():
                if self._updates and reason is not None:
                    self._hand_over(optimizer, reason)
                elif self._updates:
                    param_groups = [
                        each for each in self.param_groups if each.optimizer is optimizer
                    ]
                    means = self._reduce_gradients(param_groups)
                    for param_group in param_groups:
                        self._update(update_rule(optimizer), param_group, means)
            self.trace.update.append((start, traced_nodes()))
            self._steps.append(id(optimizer))
            return loss

        return step

    def _traced_state(self, optimizer: Optimizer) -> TracedState | None:
        """What the step finds in the place of ``optimizer.state``; nothing in that of an optimizer
        outside of the graph."""
        own = self._own_steps.takes(optimizer)
        if not own and why_eager(optimizer) is not None:
            return None
        owners = {id(leaf): key for key, leaf in self._stand_ins.items()}
        given = {id(each): each for each in self._parameters()}
        pairs = [
            (given[owners[id(leaf)]], leaf)
            for group in optimizer.param_groups  # which have what stands in by now
            for leaf in group["params"]
        ]
        known = {id(key): pair for pair in pairs for key in pair}
        param_groups = {
            id(parameter): each
            for each in self.param_groups
            if each.optimizer is optimizer
            for parameter in each.parameters
        }

        def entries(parameter: nn.Parameter) -> dict[str, Tensor]:
            param_group = param_groups.get(id(parameter))
            return {} if param_group is None else self._state_of(parameter, param_group)

        def names(parameter: nn.Parameter) -> frozenset[str]:
            param_group = param_groups.get(id(parameter))
            return frozenset() if param_group is None else param_group.state_names(parameter)

        uses = self.trace.uses if self._stands_in else None
        self._states.append(TracedState(optimizer, known, entries, names, uses))
        return self._states[-1]

    def _state_of(self, parameter: nn.Parameter, param_group: ParamGroup) -> dict[str, Tensor]:
        """The state of a parameter at this point of the step."""
        optimizer, form = param_group.optimizer, update_rule(param_group.optimizer)
        taken = param_group.taken.get(id(parameter), 0)
        if not taken:
            self._looked_at[id(optimizer)] = optimizer
            if not param_group.state_names(parameter) & optimizer.state.get(parameter, {}).keys():
                return {}
        if id(parameter) in self._divided or layout_of(self._stand_ins[id(parameter)]) is not None:
            raise refused_state("looks at optimizer.state of parameters of which ranks hold parts")
        if id(optimizer) in self.trace.watch.scaling.skips or form.counters.keys() - {"step"}:
            raise refused_state(f"looks at the counters of {type(optimizer).__name__}")
        found: dict[str, Tensor] = {}
        if form.counters:
            step = self._scalar(param_group, "step", max(taken - 1, 0))
            kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            found["step"] = (step if taken else step - 1).to(kind)
        names = form.states(parameter, self._groups[id(param_group)])
        return found | {key: self._values[id(parameter), key] for key in names}

    def _refuse_more_steps(self, optimizer: Optimizer) -> None:
        """TR-106 for a second update of an optimizer that a scaler steps: whether the first one
        counted is not known."""
        if id(optimizer) in self.trace.watch.scaling.stepped and (
            id(optimizer) in self._steps or why_eager(optimizer) is not None
        ):
            raise refused_scaling(
                f"a GradScaler steps {type(optimizer).__name__}, which steps twice in the call or "
                "outside of the graph"
            )

    def _hand_over(self, optimizer: Optimizer, reason: Reason) -> None:
        """The optimizer steps after the graph: its gradients are results, and its parameters are
        written with something that nobody may read."""
        if any(each.optimizer is optimizer for each in self.trace.eager):
            raise _steps_twice(reason)
        parameters: list[nn.Parameter] = []
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for parameter in self._parameters():
            leaf = self._stand_ins[id(parameter)]
            if id(leaf) not in stepped:
                continue
            if leaf.grad is not None:
                copy = leaf.grad.clone()
                self._handed[id(parameter)] = _EagerGradient(copy, leaf.grad, leaf.grad._version)
                parameters.append(parameter)
            value = local_of(leaf).detach()
            self.trace.lost.add(traced_nodes())
            value.copy_(torch.empty_like(value))
        slots = tuple(slot_of(self._handed[id(each)].copy) for each in parameters)
        values = tuple(self._hyper.set_values(optimizer))
        self.trace.eager.append(EagerStep(optimizer, reason, tuple(parameters), slots, values))

    def _parameters(self) -> list[nn.Parameter]:
        sources = [source for _, source in self.sources]
        return [each.parameter for each in sources if isinstance(each, Parameter)]

    def wrapped(self) -> Iterator[tuple[nn.Parameter, RankGroup]]:
        """Parameters whose gradients a wrapper averages in the end, and over which ranks."""
        for parameter in self._parameters():
            group = self.sync.expected_of(self._stand_ins[id(parameter)])
            if group is not None and group.ranks > 1:
                yield parameter, group

    def _reduce_gradients(self, param_groups: Sequence[ParamGroup]) -> dict[int, Tensor]:
        """What of an optimizer's gradients is not a mean over ranks yet becomes one; where ranks
        divide an update, the rows of this rank, by their parameter. All of them are sent ahead of
        the first update, whose parameters ranks may have to send."""
        means: dict[int, Tensor] = {}
        owner = {
            id(self._stand_ins[id(parameter)]): id(parameter)
            for param_group in param_groups
            for parameter in param_group.parameters
        }
        for leaf in self.sync.unreduced(self._stand_ins[key] for key in owner.values()):
            shards = self._divided.get(owner[id(leaf)])
            if shards is None:
                self.sync.looked_at(leaf)
                continue
            with self.sync.unlooked():
                grad = leaf.grad
            if grad is not None:
                means[owner[id(leaf)]] = shards.mean(grad)
        return means

    def _update(
        self, form: OptimizerUpdate, param_group: ParamGroup, means: Mapping[int, Tensor]
    ) -> None:
        """A step of those that have gradients. In each call each of them counts its own."""
        with self.sync.unlooked():
            with_grad = [
                p for p in param_group.parameters if self._stand_ins[id(p)].grad is not None
            ]
        if not with_grad:
            return
        self.trace.watch.note_line()
        self.trace.uses.ours = True
        try:
            self._aside(form, self._step)(form, param_group, with_grad, means)
        finally:
            self.trace.uses.ours = False

    def _aside(self, form: OptimizerUpdate, function: Callable[..., None]) -> Callable[..., None]:
        """Nobody looks at what our own forms call: they take traced tensors alone."""
        external = self.trace.external
        if external is None or owner_of(type(form)) is not CodeOwner.OURS:
            return function
        return external.unseen(without_functions(function))

    def _step(
        self,
        form: OptimizerUpdate,
        param_group: ParamGroup,
        with_grad: list[nn.Parameter],
        means: Mapping[int, Tensor],
    ) -> None:
        group = self._groups[id(param_group)]
        changed = self._hyper.at_update(param_group.optimizer, param_group.at, group)
        group = changed.values(form) if changed.set else group
        self.trace.stepped.add(self.param_groups.index(param_group))
        if not param_group.taken:
            param_group.active.clear()
        param_group.active.extend(p for p in with_grad if id(p) not in param_group.taken)
        taken = {id(p): param_group.taken.get(id(p), 0) for p in with_grad}  # before this step
        for nth in sorted({*taken.values()}):
            some = [p for p in with_grad if taken[id(p)] == nth]
            names = param_group.scalar_names(group)
            scalars = {name: self._scalar(param_group, name, nth) for name in names}
            if changed.set:
                device = next(iter(scalars.values())).device
                scalars |= changed.scalars(form, device, self.trace.watch.inside)
            shared = form.prepare(scalars, group)
            updates = UpdatesOfGroup() if owner_of(type(form)) is CodeOwner.OURS else None
            for parameter in some:
                names = form.states(parameter, group)
                state = {key: self._values[id(parameter), key] for key in names}
                with self._rows_of(parameter, means) as (leaf, grad):
                    update = functools.partial(
                        self._update_one, form, group, leaf, grad, state, shared
                    )
                    found = self.trace.watch.scaling.skips.get(id(param_group.optimizer))
                    if found is not None:
                        written = (leaf.detach(), *state.values())
                        update = functools.partial(selected, found, update, written)
                    if updates is None:
                        update()
                    else:
                        parts = (grad.indices, grad.values) if type(grad) is SparseRows else (grad,)
                        updates.run((leaf, *parts, *state.values()), tuple(state), update)
                param_group.taken[id(parameter)] = nth + 1

    @contextlib.contextmanager
    def _rows_of(
        self, parameter: nn.Parameter, means: Mapping[int, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor | SparseRows]]:
        """What this rank updates of a parameter, with the mean gradient of it, in ``means`` or
        whole in ``.grad``; afterwards the parameter is whole."""
        leaf, shards = self._stand_ins[id(parameter)], self._divided.get(id(parameter))
        if shards is None:
            yield self._parts_here(leaf)
            return
        mean = means.get(id(parameter))
        if mean is None:
            with self.sync.unlooked():
                grad = leaf.grad
            assert grad is not None
            start = traced_nodes()
            mean = shards.own(grad)
            taken = range(start, traced_nodes())
            self.trace.own_rows |= dict.fromkeys(taken, shards.group.ranks)
        own = shards.own(leaf.detach()).clone()
        yield own, mean
        leaf.detach().copy_(shards.whole(own, leaf.shape[0]))

    def _parts_here(self, leaf: Tensor) -> tuple[Tensor, Tensor | SparseRows]:
        """What this rank holds of a parameter and of its gradient. The gradient of a DTensor may be
        placed otherwise, as summands are: then it is brought where the parameter is."""
        assert leaf.grad is not None
        layout = layout_of(leaf)
        if layout is not None:
            return local_of(leaf), local_of(placed_as(leaf.grad, layout))
        return leaf, self.sparse.rows_of(leaf.grad) if is_sparse(leaf.grad) else leaf.grad

    def _update_one(
        self,
        form: OptimizerUpdate,
        group: dict[str, Any],
        leaf: Tensor,
        grad: Tensor | SparseRows,
        state: Values,
        shared: Values,
    ) -> None:
        value = leaf.detach()
        if isinstance(grad, SparseRows):
            form.update_rows(value, grad, state, shared, group)
            return
        if value.is_complex():  # real and imaginary parts are numbers of their own
            value, grad = torch.view_as_real(value), torch.view_as_real(grad)
            state = {key: _parts(each) for key, each in state.items()}
        form.update(value, grad, state, shared, group)

    def _scalar(self, param_group: ParamGroup, name: str, nth: int) -> Tensor:
        """A scalar of the ``nth`` step of a call. Those of later steps are known when they are
        met: they enter as constants, which become inputs when the trace is finished."""
        first = self._values[id(param_group), name]
        if nth == 0 or name in self._started[id(param_group)] or self._plans:
            return first
        key = (id(param_group), f"{name} {nth}")
        if key not in self._values:
            source = Scalar(param_group, name, first.device, nth)
            with outside_modes():
                value = source.read([], {})
            self._values[key] = value
            number = self.param_groups.index(param_group)
            label = f"{param_group.label}.{name}.{number} of step {nth + 1}"
            self.trace.scalars[id(value)] = Input(Role.SCALAR, label), source
        return self._values[key]


def around(local: T, layout: ShardedLayout | None) -> T | Tensor:
    """The DTensor with this part here, or ``local`` itself where there is no layout."""
    return layout.around(local) if layout is not None and isinstance(local, Tensor) else local


def _parts(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _later(leaf: Any) -> Any:
    return DeferredValue(leaf) if isinstance(leaf, Stream) else leaf


def _with_real_keys(node: object) -> object:
    """For a dict with keys that stand in, one with the keys themselves."""
    if type(node) is not dict or all(as_key(key) is key for key in node):
        return None
    return {as_key(key): replaced(each, _with_real_keys) for key, each in node.items()}


def _length(recorder: ContainerRecorder) -> int:
    return len(recorder.get())


def _itself(value: Any) -> Any:
    return value


def _are_one(one: StateLocation, other: Location) -> bool:
    return one.get() is other.get()


def _is_alike(old: Any, new: Any) -> bool:
    alike = isinstance(old, Tensor) and isinstance(new, Tensor)
    return alike and (old.shape, old.dtype) == (new.shape, new.dtype)


def _has(optimizer: Optimizer) -> tuple[bool, ...]:
    """Which parameters have state."""
    of = (p for group in optimizer.param_groups for p in group["params"])
    return tuple(bool(optimizer.state.get(each)) for each in of)


def _hyper_parameters(param_group: ParamGroup) -> dict[str, float]:
    return update_rule(param_group.optimizer).scalars(param_group.group)


def _steps_twice(reason: Reason) -> CaptureError:
    return CaptureError(
        f"an optimizer that steps outside of the graph steps twice in one step: {reason.words}",
        code="TR-109",
        where=here(),
        remedy="compile a function that calls its step() once, or give the optimizer a form "
        "(treadle.register_optimizer)",
    )
