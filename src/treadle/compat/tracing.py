"""The trace in progress: what it holds, and what it must not see."""

import functools
import importlib
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import SymInt, Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.traceback import preserve_node_meta
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from treadle.compat.distributed.sharded_tensors import layout_of, load_sharded_tensors, local_of
from treadle.compat.dynamo import as_written
from treadle.compat.fake import stand_in_for, standing_in, users_class, without_words
from treadle.compat.known_sizes import KnownLayout
from treadle.compat.late_modules import loading_late
from treadle.compat.operators.traced_operations import TracedOperations
from treadle.compat.switches import without_onednn
from treadle.compat.transforms import viewed_zero_tangents

P = ParamSpec("P")
T = TypeVar("T")

Args = tuple[Any, ...]
"""The arguments by position of a call that a mode hears of: each function knows its own."""
Kwargs = Mapping[str, Any]
"""Those by name."""

TRACING = threading.RLock()
"""Held by the thread that traces: PyTorch has one tracer in a process, and modes and patches are
everyone's."""


def trace(
    function: Callable[..., object],
    inputs: list[Tensor],
    instead: Mapping[Any, Callable[..., object]],
    *,
    symbolic: bool = False,
) -> fx.GraphModule:
    """``function`` of a list of tensors as one ATen graph, run on fake tensors; ``symbolic``: those
    of ``symbolic_mode``. ``instead``: by operator what to trace in its place.

    Without oneDNN, whose recurrent layers give an opaque workspace that fake ones do not have:
    they become products and pointwise work. What runs may still use it. Nobody calls the module:
    its graph is not made into a text and compiled.
    """

    def flat(*values: Tensor) -> object:
        with _use_lazy_graph_module(False):  # those that the function itself makes
            return function([stand_in_for(each, Tensor) for each in values])

    ours = functools.partial(works_for, threading.get_ident())
    inside = standing_in(ours), without_onednn(), without_words(), as_written()
    inside = *inside, _own_operations(instead), viewed_zero_tangents()
    with TRACING, ExitStack() as undo:
        for each in (*inside, _use_lazy_graph_module(True)):
            undo.enter_context(each)
        return make_fx(
            flat,
            decomposition_table=dict(instead),
            tracing_mode="symbolic" if symbolic else "fake",
            _allow_non_fake_inputs=True,
        )(*inputs)


@contextmanager
def _own_operations(instead: Mapping[Any, Callable[..., object]]) -> Iterator[None]:
    """While inside, operations of known types become nodes without PyTorch's tracer. ``instead``:
    as of ``trace``."""
    owner, method = ProxyTorchDispatchMode, "__torch_dispatch__"
    original = vars(owner)[method]
    setattr(owner, method, TracedOperations(instead).instead_of(original))
    try:
        yield
    finally:
        setattr(owner, method, original)


def traced(
    function: Callable[..., object],
    inputs: Sequence[object],
    instead: Mapping[Any, Callable[..., object]] | None = None,
    *,
    symbolic: bool = False,
) -> fx.GraphModule:
    """A function of tensors as a graph, beside the step's own trace. ``instead``, ``symbolic``: as
    of ``trace``."""
    mode = "symbolic" if symbolic else "fake"
    with TRACING:
        make = make_fx(function, decomposition_table=dict(instead or {}), tracing_mode=mode)
        return make(*inputs)


def hold_constants(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """``graph``, made of ``owner``'s, gets a module with the constants that it names."""
    _LazyGraphModule(owner, graph)


def held_input(tensor: Tensor) -> Tensor:
    """For a tensor from outside a trace one that is traced: an attribute of the graph, without a
    value that could be looked at or changed meanwhile. Of a DTensor its part here is traced."""
    proxies = get_proxy_mode()
    mode = detect_fake_mode()
    if proxies is None or mode is None:
        return tensor
    tracer = proxies.tracer
    name = f"_held_{len(tracer.root.__dict__)}"
    tracer.root.__dict__[name] = tensor  # not as one of its parameters, which are kept elsewhere
    with _disable_current_modes():
        fake = mode.from_tensor(local_of(tensor).detach())
    proxy = tracer.create_proxy("get_attr", name, (), {})
    fake = stand_in_for(fake, users_class(tensor))
    found: Tensor = track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
    layout = layout_of(tensor)
    return found if layout is None else layout.around(found)


def track_size(size: SymInt) -> SymInt:
    """A size that nothing in the trace has: a node of its own, whose value it is."""
    proxies = get_proxy_mode()
    if proxies is None:
        return size
    tracer = proxies.tracer
    proxy = tracer.create_proxy("call_function", torch.sym_int, (0,), {})
    found: SymInt = track_tensor_tree(size, proxy, constant=None, tracer=tracer)
    return found


class TraceInProgress:
    """The graph that is being made, and which of its nodes tensors are."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None, "no trace is in progress"
        self._tracer = mode.tracer

    @property
    def graph(self) -> fx.Graph:
        """What was traced so far."""
        return self._tracer.graph

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that ``tensor`` is now."""
        found: Any = get_proxy_slot(tensor, self._tracer)
        return found.proxy.node

    @property
    def count(self) -> int:
        """How many nodes it has."""
        return len(self._tracer.graph.nodes)

    def find(self, tensor: Tensor) -> fx.Node | None:
        """The node that ``tensor`` is now; ``None`` for a tensor from outside the trace."""
        found: Any = get_proxy_slot(tensor, self._tracer, None)
        return None if found is None else found.proxy.node

    def held(self, node: fx.Node) -> object:
        """The constant that ``node``, a ``get_attr``, names."""
        return operator.attrgetter(str(node.target))(self._tracer.root)

    def track(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on ``tensor`` is ``node``."""
        proxy = self._tracer.proxy(node)
        track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)


def works_for(thread: int) -> bool:
    """Whether this is the thread (by its identity) that traces, or one of the autograd engine's,
    which runs the backward pass of a GPU for it."""
    return threading.get_ident() == thread or get_proxy_mode() is not None


def without_functions(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, whose operations no mode or class sees before they are traced."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def without_classes() -> AbstractContextManager[None]:
    """Within it, no class of a tensor sees an operation first; modes do."""
    return torch._C.DisableTorchFunctionSubclass()


def traced_nodes() -> int:
    """How many nodes the trace in progress has; 0 outside one."""
    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


def traced_positions() -> dict[fx.Node, int]:
    """The nodes of the trace in progress, by how many were traced before each: PyTorch removes
    those of sizes that nothing uses when a trace ends, so that later ones move up."""
    mode = get_proxy_mode()
    return {} if mode is None else {node: at for at, node in enumerate(mode.tracer.graph.nodes)}


def is_traced_here() -> bool:
    """Whether a trace is in progress in this thread."""
    return get_proxy_mode() is not None


def traced_targets() -> list[object]:
    """What the nodes of the trace in progress call, in their order."""
    mode = get_proxy_mode()
    return [node.target for node in mode.tracer.graph.nodes] if mode is not None else []


def dispatch_of_trace() -> tuple[object, str]:
    """The method that puts an operation into the graph; where a trace runs."""
    return type(get_proxy_mode()), "__torch_dispatch__"


@contextmanager
def outside_modes() -> Iterator[None]:
    """Inside, tensors are real again, whatever traces outside."""
    with _disable_current_modes():
        yield


def retraced(
    module: fx.GraphModule, inputs: Sequence[object], later: Sequence[KnownLayout] = ()
) -> fx.GraphModule:
    """``module``, traced with symbols, for inputs of known sizes: nodes have the notes of those
    they come from. ``later``: of those that come after ``inputs``, and are not there yet."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in inputs]
    with mode:
        fakes += [layout.empty() for layout in later]
    run = functools.partial(fx.Interpreter(module).run, enable_io_processing=False)
    with preserve_node_meta():
        return traced(run, fakes)


@loading_late()
def load_tracer() -> None:
    """Import what traces use, before one begins: inside, imports would be the step's. It takes a
    second, and a process that needs no trace goes without."""
    for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes"):
        importlib.import_module(name)
    load_sharded_tensors()


METHOD_FILES = frozenset(
    str(sys.modules[name].__file__) for name in ("torch.overrides", "torch._tensor")
)
"""Where methods of tensors are written in Python."""


def masks_as_given() -> tuple[ModuleType, str, Callable[..., bool]]:
    """What to put where (owner, name, value) while a step is traced: transformers of torch.nn look
    at the values of a mask, to see whether a kernel may do without it. Here it is just used."""

    def detect(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return transformer, "_detect_is_causal_mask", detect


def flat_weights(module: nn.RNNBase, table: Mapping[int, Tensor]) -> dict[str, list[object]]:
    """A recurrent layer's own lists of its weights, with the tensors of ``table`` (by the id of the
    user's) in the place of the user's."""
    weights: list[object] = [table.get(id(each), each) for each in module._flat_weights]
    refs: list[object] = [None if each is None else weakref.ref(each) for each in weights]
    return {"_flat_weights": weights, "_flat_weight_refs": refs}


__all__ = [
    "METHOD_FILES",
    "TRACING",
    "DispatchMode",
    "TraceInProgress",
    "dispatch_of_trace",
    "flat_weights",
    "held_input",
    "hold_constants",
    "masks_as_given",
    "outside_modes",
    "retraced",
    "trace",
    "traced",
    "traced_nodes",
    "traced_positions",
    "traced_targets",
    "without_functions",
    "works_for",
]
