"""A training step to one functional graph, by running it once on fake tensors."""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from treadle.capture.functionalize import Functionalizer
from treadle.capture.optimizers.registry import Values, form_of
from treadle.capture.refuse import check_models, device_of
from treadle.capture.sources import (
    Batch,
    BufferSlot,
    Clusters,
    Fixed,
    Grad,
    Parameter,
    Scalar,
    Scalars,
    Source,
    State,
    clusters_of,
)
from treadle.capture.torch_private import (
    DataDependentOutputException,
    TreeSpec,
    flatten,
    storage_key,
    trace,
    traced_nodes,
)
from treadle.graph.signature import Input, Output, Role, Signature, StepGraph
from treadle.util.errors import CaptureError

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


@dataclass(slots=True)
class Captured:
    """A step's graph and how its inputs and outputs meet the user's objects.

    ``sources`` say where each input is found at a call, in the signature's order. Outputs are
    first the tensor leaves of the user's result, then gradients the user's code leaves in
    ``.grad``, then write-backs.
    """

    step: StepGraph
    device: str
    sources: tuple[Source, ...]
    result_tree: TreeSpec
    result_leaves: tuple[Any, ...]  # ``_TENSOR`` where a result tensor goes
    left_grads: tuple[nn.Parameter, ...]
    cleared_grads: tuple[nn.Parameter, ...]
    clusters: Clusters
    stepped: frozenset[int]  # clusters whose counters advance
    scalars: Scalars
    pending: dict[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])


class ResultSlot:
    """Marks the place of a tensor among the leaves of the user's result."""


@dataclass
class _Trace:
    """What the traced run leaves behind, in terms of the traced tensors."""

    leaves: list[Any] = field(default_factory=list[Any])
    tree: TreeSpec | None = None
    grads: list[tuple[nn.Parameter, Tensor]] = field(
        default_factory=list[tuple[nn.Parameter, Tensor]]
    )
    cleared: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    backward: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    update: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    stepped: set[int] = field(default_factory=set[int])


def capture(
    function: Callable[..., Any],
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Captured:
    """Run ``function`` once on fake tensors; nothing of the user's changes.

    Raises ``CaptureError`` with a code, the user's line and a remedy for what cannot become a
    graph; an exception of the user's own passes through unchanged.
    """
    check_models(models, optimizers)
    device = device_of(models)
    clusters = clusters_of(optimizers)
    sources = _sources(models, optimizers, clusters, args, kwargs, device)
    pending: dict[tuple[int, str], Tensor] = {}
    leaves, spec = flatten((args, kwargs))
    inputs = [source.read(leaves, pending) for _, source in sources]
    run = _Run(function, models, optimizers, clusters, sources, leaves, spec)
    with torch.random.fork_rng(devices=[]), _words_for_values():
        module = trace(run.traced, inputs)
    return _finish(module, run, device, pending)


def _sources(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    clusters: Clusters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> list[tuple[Input, Source]]:
    found: list[tuple[Input, Source]] = []
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            if id(parameter) not in names:
                names[id(parameter)] = full = f"{prefix}.{name}".lstrip(".")
                found.append((Input(Role.PARAMETER, full), Parameter(parameter)))
    seen: set[int] = set()
    for prefix, model in models.items():
        for path, owner in model.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    full = f"{prefix}.{path}.{key}".strip(".").replace("..", ".")
                    found.append((Input(Role.BUFFER, full), BufferSlot(owner, key)))
    for at, cluster in enumerate(clusters):
        form, group = form_of(cluster.optimizer), cluster.group
        for parameter in cluster.parameters:
            for key in form.state_names(group):
                label = f"{cluster.label}.{key}[{names[id(parameter)]}]"
                found.append((Input(Role.STATE, label), State(cluster.optimizer, parameter, key)))
        for key in cluster.scalar_names():
            label = f"{cluster.label}.{key}.{at}"
            found.append((Input(Role.SCALAR, label), Scalar(cluster, key, device)))
    for model in models.values():
        for parameter in model.parameters():
            if parameter.grad is not None:
                label = f"grad of {names[id(parameter)]}"
                found.append((Input(Role.GRADIENT, label), Grad(parameter)))
    leaves, _ = flatten((args, kwargs))
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            found.append((Input(Role.BATCH, f"batch {at}"), Batch(at)))
    return found


class _Run:
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
    ) -> None:
        self.function = function
        self.models = models
        self.optimizers = optimizers
        self.clusters = clusters
        self.sources = sources
        self.leaves = leaves
        self.spec = spec
        self.trace = _Trace()
        self._stand_ins: dict[int, Tensor] = {}
        self._values: dict[tuple[int, str], Tensor] = {}

    def traced(self, inputs: list[Tensor]) -> list[Tensor]:
        """What ``make_fx`` traces: the step as a function of all it reads."""
        batch = list(self.leaves)
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        for (_, source), value in zip(self.sources, inputs, strict=True):
            match source:
                case Parameter(parameter):
                    leaf = value.detach().requires_grad_(parameter.requires_grad)
                    self._stand_ins[id(parameter)] = leaf
                case BufferSlot(owner, key):
                    buffers.append((owner, key, value))
                case State(_, parameter, key):
                    self._values[id(parameter), key] = value
                case Scalar(cluster, key, _):
                    self._values[id(cluster), key] = value
                case Grad(parameter):
                    self._stand_ins[id(parameter)].grad = value
                case Batch(at):
                    batch[at] = value
                case Fixed():
                    raise AssertionError("constants are found after the trace")
        args, kwargs = _unflatten(batch, self.spec)
        with self._swapped(buffers), self._watched():
            result = self.function(*args, **kwargs)
        return self._returned(result)

    def _returned(self, result: Any) -> list[Tensor]:
        leaves, self.trace.tree = flatten(result)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self.trace.leaves = [ResultSlot if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for _, source in self.sources:
            if isinstance(source, Parameter):
                grad = self._stand_ins[id(source.parameter)].grad
                if grad is not None:
                    self.trace.grads.append((source.parameter, grad))
                    tensors.append(grad.detach())
                else:
                    self.trace.cleared.append(source.parameter)
        return tensors

    @contextlib.contextmanager
    def _swapped(self, buffers: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
        """Parameters, buffers and param_groups hold traced tensors inside."""
        undo: list[Callable[[], None]] = []
        try:
            for model in self.models.values():
                for module in model.modules():
                    for key, parameter in list(module._parameters.items()):
                        if parameter is not None:
                            undo.append(_setter(module._parameters, key, parameter))
                            module._parameters[key] = self._stand_ins[id(parameter)]  # type: ignore[assignment]
            originals = {id(owner._buffers[key]): value for owner, key, value in buffers}
            for model in self.models.values():
                for module in model.modules():
                    for key, buffer in list(module._buffers.items()):
                        if buffer is not None and id(buffer) in originals:
                            undo.append(_setter(module._buffers, key, buffer))
                            module._buffers[key] = originals[id(buffer)]
            for optimizer in self.optimizers.values():
                for group in optimizer.param_groups:
                    undo.append(_setter(group, "params", group["params"]))
                    group["params"] = [self._stand_ins[id(p)] for p in group["params"]]
                undo.append(_attribute(optimizer, "step"))
                vars(optimizer)["step"] = self._stepper(optimizer)
            yield
        finally:
            for each in reversed(undo):
                each()

    def _stepper(self, optimizer: Optimizer) -> Callable[..., None]:
        """``optimizer.step`` in functional form, on the traced parameters and state."""
        form = form_of(optimizer)

        def step(closure: object = None) -> None:
            if closure is not None:
                raise CaptureError(
                    "optimizer.step(closure) runs the model again",
                    code="TR-105",
                    remedy="call backward() in the step, and step() without a closure",
                )
            start = traced_nodes()
            with torch.no_grad():
                for cluster in self.clusters:
                    if cluster.optimizer is optimizer:
                        self._update(form, cluster)
            self.trace.update.append((start, traced_nodes()))

        return step

    def _update(self, form: Any, cluster: Any) -> None:
        at = self.clusters.index(cluster)
        with_grad = [p for p in cluster.parameters if self._stand_ins[id(p)].grad is not None]
        if not with_grad:
            return
        if at in self.trace.stepped:
            raise CaptureError(
                "the optimizer steps twice in one step",
                code="TR-109",
                remedy="compile a function that calls optimizer.step() once",
            )
        self.trace.stepped.add(at)
        names = cluster.scalar_names()
        scalars = {name: self._values[id(cluster), name] for name in names}
        shared = form.prepare(scalars, cluster.group)
        for parameter in with_grad:
            leaf = self._stand_ins[id(parameter)]
            state: Values = {
                key: self._values[id(parameter), key] for key in form.state_names(cluster.group)
            }
            assert leaf.grad is not None
            form.update(leaf.detach(), leaf.grad, state, shared, cluster.group)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes which nodes each backward makes."""
        originals = {"backward": torch.autograd.backward, "grad": torch.autograd.grad}

        def watching(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = traced_nodes()
                result = original(*args, **kwargs)
                self.trace.backward.append((start, traced_nodes()))
                return result

            return call

        try:
            for name, original in originals.items():
                setattr(torch.autograd, name, watching(original))
            yield
        finally:
            for name, original in originals.items():
                setattr(torch.autograd, name, original)


def _unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    from treadle.capture.torch_private import unflatten

    return unflatten(leaves, spec)


def _setter(target: Any, key: str, value: Any) -> Callable[[], None]:
    def put_back() -> None:
        target[key] = value

    return put_back


def _attribute(owner: Any, name: str) -> Callable[[], None]:
    had, old = name in vars(owner), vars(owner).get(name)

    def put_back() -> None:
        if had:
            vars(owner)[name] = old
        else:
            vars(owner).pop(name, None)

    return put_back


@contextlib.contextmanager
def _words_for_values() -> Iterator[None]:
    """Looking at a fake tensor's value, as the error a user can act on."""
    try:
        yield
    except DataDependentOutputException as error:
        raise _looks_at_value(error) from None
    except RuntimeError as error:
        if "data-dependent" in str(error) or "value out of a tracing tensor" in str(error):
            raise _looks_at_value(error) from None
        raise


def _looks_at_value(error: BaseException) -> CaptureError:
    return CaptureError(
        "the step looks at the value of a tensor, which does not exist while it is captured",
        code="TR-102",
        where=_user_line(traceback.extract_tb(error.__traceback__)),
        remedy="return the tensor and look at it outside, or use torch.where instead of a branch",
    )


def _user_line(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if not frame.filename.startswith((*_OURS, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _finish(
    module: fx.GraphModule, run: _Run, device: torch.device, pending: dict[tuple[int, str], Tensor]
) -> Captured:
    graph = module.graph
    _annotate(graph, run.trace)
    sources = list(run.sources)
    _constants_to_inputs(module, sources)
    _strip(graph)
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    new, results, writes = Functionalizer(graph).run(list(returned))
    outputs = [Output(f"result {at}") for at in range(run.trace.leaves.count(ResultSlot))]
    names = {id(s.parameter): i.name for i, s in sources if isinstance(s, Parameter)}
    outputs += [Output(f"grad of {names[id(p)]}") for p, _ in run.trace.grads]
    for at, value in writes.items():
        outputs.append(Output(sources[at][0].name, writes=at))
        results.append(value)
    new.output(tuple(results))
    fx.GraphModule(module, new)
    _drop_dead(new)
    step, kept = _drop_unused(new, sources, outputs)
    return Captured(
        step=step,
        device=str(device),
        sources=tuple(kept),
        result_tree=run.trace.tree,  # type: ignore[arg-type]
        result_leaves=tuple(run.trace.leaves),
        left_grads=tuple(p for p, _ in run.trace.grads),
        cleared_grads=tuple(run.trace.cleared),
        clusters=run.clusters,
        stepped=frozenset(run.trace.stepped),
        scalars=Scalars(kept),
        pending={},
    )


def _annotate(graph: fx.Graph, seen: _Trace) -> None:
    """``phase`` from the node ranges, ``where`` from the recorded stack."""
    last = max((end for _, end in seen.backward), default=1 << 60)
    for at, node in enumerate(graph.nodes):
        if any(start <= at < end for start, end in seen.backward):
            phase = "backward"
        elif at >= last or any(start <= at < end for start, end in seen.update):
            phase = "optimizer"
        else:
            phase = "forward"
        node.meta["phase"] = phase
        node.meta["where"] = _where(node.meta.get("stack_trace") or node.stack_trace or "")
        node.meta["module"] = ""
        for key in [k for k in node.meta if k not in ("val", "phase", "where", "module")]:
            del node.meta[key]


def _where(stack: str) -> str:
    """The last frame of a recorded stack that is neither torch's nor ours."""
    lines = stack.splitlines()
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at].strip()
        if line.startswith("File ") and not any(each in line for each in _OURS):
            name, _, rest = line.removeprefix('File "').partition('", line ')
            number = rest.partition(",")[0]
            text = lines[at + 1].strip() if at + 1 < len(lines) else ""
            return f"{name}:{number}: {text}"
    return ""


def _constants_to_inputs(module: fx.GraphModule, sources: list[tuple[Input, Source]]) -> None:
    """Tensors that the step reads from outside the model become inputs, read at every call."""
    graph = module.graph
    found: dict[int, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1] if sources else None
    for node in graph.find_nodes(op="get_attr"):
        tensor = module.get_parameter(node.target) if False else vars(module).get(node.target)
        if tensor is None:
            tensor = module.get_buffer(node.target)
        if id(tensor) not in found:
            with graph.inserting_after(last) if last else graph.inserting_before():
                place = graph.placeholder(f"constant_{len(found)}")
            place.meta = dict(node.meta)
            last = found[id(tensor)] = place
            sources.append((Input(Role.BUFFER, f"constant {len(found) - 1}"), Fixed(tensor)))
        node.replace_all_uses_with(found[id(tensor)])
        graph.erase_node(node)


def _strip(graph: fx.Graph) -> None:
    """Profiler ranges and other calls without values leave the graph."""
    for node in reversed(list(graph.nodes)):
        ranges = node.op == "call_function" and str(node.target).startswith("profiler")
        if ranges and not node.users:
            graph.erase_node(node)


_RANDOM = ("bernoulli", "rand", "normal", "uniform", "dropout", "multinomial", "exponential")


def _drop_dead(graph: fx.Graph) -> None:
    """Unused values go; random ones stay, since they advance eager's stream."""
    for node in reversed(list(graph.nodes)):
        random = any(word in str(node.target) for word in _RANDOM)
        if node.op == "call_function" and not node.users and not random:
            graph.erase_node(node)


def _drop_unused(
    graph: fx.Graph, sources: list[tuple[Input, Source]], outputs: list[Output]
) -> tuple[StepGraph, list[Source]]:
    """Inputs that nothing reads leave the signature (state of parameters without gradients)."""
    places = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    keep = [at for at, node in enumerate(places) if node.users]
    unchanged = {
        at
        for at, out in enumerate(outputs)
        if out.writes is not None and output.args[0][at] is places[out.writes]
    }
    new_index = {old: new for new, old in enumerate(keep)}
    results = [v for at, v in enumerate(output.args[0]) if at not in unchanged]
    kept = [
        Output(out.name, None if out.writes is None else new_index[out.writes])
        for at, out in enumerate(outputs)
        if at not in unchanged and (out.writes is None or out.writes in new_index)
    ]
    output.args = (tuple(results),)
    for at, node in enumerate(places):
        if at not in new_index:
            graph.erase_node(node)
    graph.lint()
    signature = Signature(tuple(sources[at][0] for at in keep), tuple(kept))
    return StepGraph(graph, signature), [sources[at][1] for at in keep]


__all__ = ["Captured", "ResultSlot", "capture", "storage_key"]
