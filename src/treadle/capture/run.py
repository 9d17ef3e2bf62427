"""The one run of the user's function on traced tensors, with all it touches swapped in."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.communication import refuse_collectives
from treadle.capture.eager import EagerStep, Reason, why_eager
from treadle.capture.optimizers.registry import Form, Values, check_step, form_of
from treadle.capture.outside import Outside, refuse_new_tensors
from treadle.capture.places import Place, Reads
from treadle.capture.recurrent import RecurrentLayers
from treadle.capture.refuse import refuse_unfinished
from treadle.capture.sources import (
    Batch,
    BufferSlot,
    Cluster,
    Clusters,
    Fixed,
    Grad,
    Held,
    Parameter,
    Scalar,
    Source,
    State,
)
from treadle.capture.swap import Watch, swapped
from treadle.capture.torch_private import (
    FakeTensor,
    TreeSpec,
    copy_hooks,
    flatten,
    outside_modes,
    traced_nodes,
    unflatten,
    uses_onednn,
)
from treadle.capture.variables import Variables
from treadle.capture.words import here
from treadle.graph.signature import Input, Role
from treadle.util.errors import CaptureError

Toggle = tuple[nn.Parameter, bool]
"""A parameter, and whether it needs a gradient from then on."""


class ResultSlot:
    """Marks the place of a tensor among the leaves of the user's result."""


@final
@dataclass(frozen=True, slots=True)
class Left:
    """What the step leaves in a place outside of it. ``leaves``: ``ResultSlot`` for a tensor."""

    place: Place
    leaves: tuple[Any, ...]
    tree: TreeSpec

    def put(self, tensors: Iterator[Tensor | None]) -> None:
        """``tensors``: the values of the slots, taken from the front."""
        leaves = [next(tensors) if leaf is ResultSlot else leaf for leaf in self.leaves]
        self.place.put(unflatten(leaves, self.tree))


@dataclass
class Trace:
    """What the traced run leaves behind, in terms of the traced tensors."""

    watch: Watch
    leaves: list[Any] = field(default_factory=list[Any])
    tree: TreeSpec | None = None
    grads: list[tuple[nn.Parameter, Tensor]] = field(
        default_factory=list[tuple[nn.Parameter, Tensor]]
    )
    cleared: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    update: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    stepped: set[int] = field(default_factory=set[int])
    eager: list[EagerStep] = field(default_factory=list[EagerStep])
    reads: Reads = field(default_factory=lambda: Reads(()))
    held: Mapping[int, tuple[Place, int]] = field(default_factory=dict[int, tuple[Place, int]])
    left: list[Left] = field(default_factory=list[Left])
    toggled: list[Toggle] = field(default_factory=list[Toggle])
    fresh: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    scalars: dict[int, tuple[Input, Source]] = field(
        default_factory=dict[int, tuple[Input, Source]]
    )  # by the id of a constant
    lost: set[int] = field(default_factory=set[int])  # nodes that stand for what those leave


@dataclass(frozen=True, slots=True)
class _Handed:
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
        clusters: Clusters,
        sources: list[tuple[Input, Source]],
        leaves: list[Any],
        spec: TreeSpec,
        *,
        update: bool = True,
        plans: bool = False,
    ) -> None:
        """``update=False``: gradients only. Optimizers do not step, and what the last backward left
        in ``.grad`` stays there, whatever clips or clears it afterwards. ``plans``: there are no
        values."""
        self.function = function
        self.models = models
        self.optimizers = optimizers
        self.clusters = clusters
        self.sources = sources
        self.leaves = leaves
        self.spec = spec
        self.trace = Trace(Watch(models))
        self._layers = RecurrentLayers(uses_onednn())  # asked before the trace
        self._updates = update
        self._plans = plans
        self._kept: dict[int, Tensor] = {}
        if not update:
            self.trace.watch.after_backward = self._keep_gradients
        self._stand_ins: dict[int, Tensor] = {}
        self._values: dict[tuple[int, str], Tensor] = {}
        self._handed: dict[int, _Handed] = {}
        self._started: dict[int, dict[str, float]] = {}

    def traced(self, inputs: list[Tensor]) -> list[Tensor]:
        """What ``make_fx`` traces: the step as a function of all it reads."""
        batch = list(self.leaves)
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        for (_, source), value in zip(self.sources, inputs, strict=True):
            match source:
                case Parameter(parameter):
                    leaf = value.detach().requires_grad_(parameter.requires_grad)
                    copy_hooks(parameter, leaf)
                    self._stand_ins[id(parameter)] = leaf
                case BufferSlot(owner, key):
                    buffers.append((owner, key, value))
                case State(_, parameter, key):
                    self._values[id(parameter), key] = value
                case Scalar(cluster, key, _):
                    self._values[id(cluster), key] = value
                    self._started.setdefault(id(cluster), _hyper_parameters(cluster))
                case Grad(parameter):
                    self._stand_ins[id(parameter)].grad = value
                case Batch(at):
                    batch[at] = value
                case Fixed() | Held():
                    raise AssertionError("constants are found after the trace")
        args, kwargs = unflatten(batch, self.spec)
        watch = self.trace.watch
        table = self._table(buffers)
        inside = swapped(self.models, self.optimizers, table, self._stepper, watch, self._layers)
        with inside, watch.watching():
            variables = Variables(self.function, self.models.values())
            watch.rng.meet(self.leaves)
            outside = Outside(
                variables, self.models, self.optimizers, self.leaves, seen=watch.rng.meet
            )
            with outside.watching():
                result = self.function(*args, **kwargs)
                refuse_collectives(watch.lines)
                watch.indices.check()
                watch.rng.check()
                self._note_left(outside.changes(), table)
                refuse_new_tensors(args, kwargs, batch)
        self.trace.reads = outside.reads()
        self.trace.held = outside.places_of_tensors()
        return self._returned(result)

    def _note_left(
        self, changes: list[tuple[Place, Any, Any]], stand_ins: Mapping[int, Tensor]
    ) -> None:
        """``self.mean = 0.9 * self.mean + ...`` of a buffer is a write to the buffer that was
        there; what is left elsewhere is a result that is put there."""
        written = {id(each) for each in stand_ins.values()}
        rebound: list[tuple[Tensor, Tensor]] = []
        for place, old, new in changes:
            if id(old) in written and _is_alike(old, new):
                rebound.append((old, new.detach().clone()))
                continue
            leaves, tree = flatten(new)
            if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
                leaves, tree = [new], flatten(None)[1]  # as it is
            self.trace.left.append(Left(place, tuple(leaves), tree))
        for old, new in rebound:  # all are read before one is written
            old.detach().copy_(new)

    def _table(self, buffers: list[tuple[nn.Module, str, Tensor]]) -> dict[int, Tensor]:
        """The traced tensor for each of the user's, by its id."""
        held = {id(owner._buffers[key]): value for owner, key, value in buffers}
        return self._stand_ins | held

    def _returned(self, result: Any) -> list[Tensor]:
        leaves, self.trace.tree = flatten(result)
        self._layers.packed.refuse(leaves)
        for leaf in (*leaves, *(leaf for each in self.trace.left for leaf in each.leaves)):
            self.trace.watch.rng.refuse_state(leaf)
        refuse_unfinished(leaves)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self.trace.leaves = [ResultSlot if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors += self._left_tensors()
        for parameter in self._parameters():
            if id(self._stand_ins[id(parameter)]) in self.trace.watch.fresh:
                self.trace.fresh.append(parameter)
            flag = self._stand_ins[id(parameter)].requires_grad
            if flag != parameter.requires_grad:
                self.trace.toggled.append((parameter, flag))
        for parameter in self._parameters():
            grad = self._gradient(parameter)
            if self._is_as_handed(parameter):
                continue
            if grad is not None:
                self.trace.grads.append((parameter, grad))
                tensors.append(grad.detach())
            else:
                self.trace.cleared.append(parameter)
        for each in self.trace.eager:
            tensors += [self._handed[id(p)].copy for p in each.parameters]
        return tensors

    def _left_tensors(self) -> list[Tensor]:
        """The tensors that go to places outside, which get slots; the user's own go as they are."""
        own = {id(self._stand_ins[id(p)]): p for p in self._parameters()}
        found: list[Tensor] = []
        for at, each in enumerate(self.trace.left):
            leaves = [own.get(id(leaf), leaf) for leaf in each.leaves]
            made = [leaf.detach() for leaf in leaves if isinstance(leaf, FakeTensor)]
            slots = [ResultSlot if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
            self.trace.left[at] = Left(each.place, tuple(slots), each.tree)
            found += made
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
        if not self._updates:
            return self._kept.get(id(parameter))
        return self._stand_ins[id(parameter)].grad

    def _keep_gradients(self) -> None:
        with torch.no_grad():
            for key, leaf in self._stand_ins.items():
                if leaf.grad is not None:
                    self._kept[key] = leaf.grad.clone()

    def _stepper(self, optimizer: Optimizer) -> Callable[..., None]:
        """``optimizer.step`` in functional form, on the traced parameters and state."""
        reason = why_eager(optimizer)
        check_step(optimizer)

        def step(closure: object = None) -> None:
            if closure is not None:
                raise CaptureError(
                    "optimizer.step(closure) runs the model again",
                    code="TR-105",
                    remedy="call backward() in the step, and step() without a closure",
                )
            start = traced_nodes()
            with torch.no_grad():
                if self._updates and reason is not None:
                    self._hand_over(optimizer, reason)
                elif self._updates:
                    for cluster in self.clusters:
                        if cluster.optimizer is optimizer:
                            self._update(form_of(optimizer), cluster)
            self.trace.update.append((start, traced_nodes()))

        return step

    def _hand_over(self, optimizer: Optimizer, reason: Reason) -> None:
        """The optimizer steps after the graph: its gradients are results, and its parameters are
        written with something that nobody may read."""
        if any(each.optimizer is optimizer for each in self.trace.eager):
            raise _steps_twice()
        parameters: list[nn.Parameter] = []
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for parameter in self._parameters():
            leaf = self._stand_ins[id(parameter)]
            if id(leaf) not in stepped:
                continue
            if leaf.grad is not None:
                copy = leaf.grad.clone()
                self._handed[id(parameter)] = _Handed(copy, leaf.grad, leaf.grad._version)
                parameters.append(parameter)
            self.trace.lost.add(traced_nodes())
            lost = torch.empty_like(leaf)
            leaf.detach().copy_(lost)
        self.trace.eager.append(EagerStep(optimizer, reason, tuple(parameters)))

    def _parameters(self) -> list[nn.Parameter]:
        sources = [source for _, source in self.sources]
        return [each.parameter for each in sources if isinstance(each, Parameter)]

    def _update(self, form: Form, cluster: Cluster) -> None:
        """A step of those that have gradients. In each call each of them counts its own."""
        with_grad = [p for p in cluster.parameters if self._stand_ins[id(p)].grad is not None]
        if not with_grad:
            return
        if _hyper_parameters(cluster) != self._started[id(cluster)]:
            raise _changes_hyper_parameters(cluster)
        self.trace.stepped.add(self.clusters.index(cluster))
        if not cluster.taken:
            cluster.active.clear()
        cluster.active.extend(p for p in with_grad if id(p) not in cluster.taken)
        for nth in sorted({cluster.taken.get(id(p), 0) for p in with_grad}):
            some = [p for p in with_grad if cluster.taken.get(id(p), 0) == nth]
            scalars = {name: self._scalar(cluster, name, nth) for name in cluster.scalar_names()}
            shared = form.prepare(scalars, cluster.group)
            for parameter in some:
                self._update_one(form, cluster, parameter, shared)
                cluster.taken[id(parameter)] = nth + 1

    def _update_one(
        self, form: Form, cluster: Cluster, parameter: nn.Parameter, shared: Values
    ) -> None:
        leaf = self._stand_ins[id(parameter)]
        names = form.states(parameter, cluster.group)
        state: Values = {key: self._values[id(parameter), key] for key in names}
        assert leaf.grad is not None
        value, grad = leaf.detach(), leaf.grad
        if value.is_complex():  # real and imaginary parts are numbers of their own
            value, grad = torch.view_as_real(value), torch.view_as_real(grad)
            state = {key: _parts(each) for key, each in state.items()}
        form.update(value, grad, state, shared, cluster.group)

    def _scalar(self, cluster: Cluster, name: str, nth: int) -> Tensor:
        """A scalar of the ``nth`` step of a call. Those of later steps are known when they are
        met: they enter as constants, which become inputs when the trace is finished."""
        first = self._values[id(cluster), name]
        if nth == 0 or name in self._started[id(cluster)] or self._plans:
            return first
        key = (id(cluster), f"{name} {nth}")
        if key not in self._values:
            source = Scalar(cluster, name, first.device, nth)
            with outside_modes():
                value = source.read([], {})
            self._values[key] = value
            label = f"{cluster.label}.{name}.{self.clusters.index(cluster)} of step {nth + 1}"
            self.trace.scalars[id(value)] = Input(Role.SCALAR, label), source
        return self._values[key]


def _parts(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _is_alike(old: Any, new: Any) -> bool:
    alike = isinstance(old, Tensor) and isinstance(new, Tensor)
    return alike and (old.shape, old.dtype) == (new.shape, new.dtype)


def _hyper_parameters(cluster: Cluster) -> dict[str, float]:
    return form_of(cluster.optimizer).scalars(cluster.group)


def _changes_hyper_parameters(cluster: Cluster) -> CaptureError:
    return CaptureError(
        f"the step changes a hyper-parameter of {type(cluster.optimizer).__name__} before an "
        "update, which reads those that are there when it is called",
        code="TR-139",
        where=here(),
        remedy="set it before the call (a scheduler too is stepped outside), or use a second "
        "parameter group or optimizer",
    )


def _steps_twice() -> CaptureError:
    return CaptureError(
        "an optimizer that steps outside of the graph steps twice in one step",
        code="TR-109",
        where=here(),
        remedy="compile a function that calls its step() once, or give the optimizer a form "
        "(treadle.register_optimizer)",
    )
