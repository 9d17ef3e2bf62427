"""The only file that names private parts of torch. ``NAMES`` says which versions have them."""

import functools
import logging
import operator
import sys
import threading
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.nn.modules import transformer
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils.checkpoint import CheckpointPolicy

from treadle.capture.opened import (
    Opened,
    Shell,
    Sized,
    has_own,
    is_value,
    names_of_parts,
    opened,
)
from treadle.graph.grouped import GROUPED
from treadle.util.draw_operators import TRACED_AS
from treadle.util.errors import CaptureError
from treadle.util.extents import Size

NAMES: dict[str, tuple[str, ...]] = {
    "torch.autograd.Variable._execution_engine": ("2.11", "2.13", "2.15"),
    "torch._C.DisableTorchFunction": ("2.11", "2.13", "2.15"),
    "torch._C._dynamo.guards.TensorGuards": ("2.11", "2.13", "2.15"),
    "torch._C._dynamo.guards.dict_version": ("2.11", "2.13", "2.15"),
    "torch._C._dispatch_keys": ("2.11", "2.13", "2.15"),
    "torch._C._len_torch_function_stack": ("2.11", "2.13", "2.15"),
    "torch._C._get_mkldnn_enabled": ("2.11", "2.13", "2.15"),
    "torch._C._set_mkldnn_enabled": ("2.11", "2.13", "2.15"),
    "torch._C._distributed_c10d.Reducer": ("2.11", "2.13", "2.15"),
    "torch._dynamo.backends.common.aot_autograd": ("2.11", "2.13", "2.15"),
    "torch._dynamo.source.ConstantSource": ("2.11", "2.13", "2.15"),
    "torch._dynamo.utils.counters": ("2.11", "2.13", "2.15"),
    "torch._C._functorch.get_unwrapped": ("2.11", "2.13", "2.15"),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("2.11", "2.13", "2.15"),
    "torch._functorch.eager_transforms._wrap_for_grad": ("2.11", "2.13", "2.15"),
    "torch._functorch.vmap._add_batch_dim": ("2.11", "2.13", "2.15"),
    "torch._guards.detect_fake_mode": ("2.11", "2.13", "2.15"),
    "torch._subclasses.fake_tensor.DataDependentOutputException": ("2.11", "2.13", "2.15"),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": ("2.11", "2.13", "2.15"),
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": ("2.11", "2.13", "2.15"),
    "torch._subclasses.fake_tensor.FakeTensor": ("2.11", "2.13", "2.15"),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("2.11", "2.13", "2.15"),
    "torch.utils._sympy.value_ranges.ValueRanges": ("2.11", "2.13", "2.15"),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": ("2.11", "2.13", "2.15"),
    "torch.fx._lazy_graph_module._LazyGraphModule": ("2.11", "2.13", "2.15"),
    "torch.fx._lazy_graph_module._use_lazy_graph_module": ("2.11", "2.13", "2.15"),
    "torch.nn.modules.transformer._detect_is_causal_mask": ("2.11", "2.13", "2.15"),
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": ("2.11", "2.13", "2.15"),
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": ("2.11", "2.13", "2.15"),
    "torch.optim.optimizer._global_optimizer_pre_hooks": ("2.11", "2.13", "2.15"),
    "torch.optim.optimizer._global_optimizer_post_hooks": ("2.11", "2.13", "2.15"),
    "torch.utils.checkpoint._is_compiling": ("2.11", "2.13", "2.15"),
    "torch.utils.checkpoint._CachingTorchDispatchMode": ("2.11", "2.13", "2.15"),
    "torch.utils.checkpoint._recomputation_hook": ("2.11", "2.13", "2.15"),
    "torch.utils._python_dispatch.TorchDispatchMode": ("2.11", "2.13", "2.15"),
    "torch.utils._python_dispatch._disable_current_modes": ("2.11", "2.13", "2.15"),
    "torch.utils._pytree.register_pytree_node": ("2.11", "2.13", "2.15"),
    "torch.utils._pytree.tree_flatten": ("2.11", "2.13", "2.15"),
    "torch.utils._pytree.tree_unflatten": ("2.11", "2.13", "2.15"),
}

UNSUPPORTED = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)
"""What fake tensors raise where nobody knows the type of a result."""

NEEDS_MEMORY = ("data pointer", "doesn't have storage", "data_ptr", "access storage")
"""Words of errors about tensors without memory."""

TreeSpec = pytree.TreeSpec
__all__ = [
    "NAMES",
    "DataDependentOutputException",
    "DispatchMode",
    "FakeTensor",
    "TreeSpec",
    "detect_fake_mode",
    "dict_version",
]


def flatten_containers(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves of nested lists, tuples, dicts and registered classes, and their structure."""
    return pytree.tree_flatten(tree, is_leaf=_is_size)


_ENTRIES = (dict, list, tuple)


def _is_size(node: Any) -> bool:
    """A shape, which PyTorch would put together again as a tuple; entries of an object that has
    attributes as well, which PyTorch would lose."""
    kind = type(node)
    if kind in _ENTRIES:
        return False
    return kind is torch.Size or (isinstance(node, _ENTRIES) and has_own(node))


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves of nested lists, tuples, dicts, registered classes and objects that hold tensors, and
    their structure."""
    with _no_circles():
        leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_size)
        if all(map(is_value, leaves)):
            return leaves, spec
        return pytree.tree_flatten(_open(tree), is_leaf=_is_size)


@contextmanager
def _no_circles() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise CaptureError(
            "a container among the arguments or results holds itself",
            code="TR-116",
            remedy="pass and return nested lists, dicts and data classes without circles",
        ) from None


def _open(tree: Any) -> Any:
    """``tree`` with objects that hold tensors, and shapes that hold symbols, as nodes."""

    def each(leaf: Any) -> Any:
        if type(leaf) is torch.Size and not is_value(leaf):
            return Sized(tuple(leaf))
        found = opened(leaf, pytree.tree_leaves)
        return leaf if found is None else Opened(found.shell, tuple(map(_open, found.values)))

    return pytree.tree_map(each, tree, is_leaf=_is_size)


def _sizes_with_keys(node: Sized) -> tuple[list[tuple[Any, Any]], None]:
    key: Any = pytree.SequenceKey
    return [(key(at), size) for at, size in enumerate(node.sizes)], None


pytree.register_pytree_node(
    Sized,
    lambda node: (list(node.sizes), None),
    lambda sizes, _: torch.Size(sizes),
    flatten_with_keys_fn=_sizes_with_keys,
)


def _keys(node: Opened) -> tuple[list[tuple[Any, Any]], Shell]:
    named = issubclass(node.shell.kind, dict | list | tuple | UserDict)
    key: Any = pytree.MappingKey if named else pytree.GetAttrKey
    pairs = zip(node.shell.names, node.values, strict=True)
    return [(key(name), value) for name, value in pairs], node.shell


pytree.register_pytree_node(
    Opened,
    lambda node: (list(node.values), node.shell),
    lambda values, shell: shell.filled(list(values)),
    flatten_with_keys_fn=_keys,
)


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The structure with these leaves."""
    return pytree.tree_unflatten(leaves, spec)


OURS = -1
"""The key of our own hook among those of every optimizer, while a step is traced."""


def global_step_hooks() -> dict[Any, Any]:
    """What is called before any optimizer's ``step``, but for those whose ``step`` is replaced."""
    return _global_optimizer_pre_hooks


def step_hooks(optimizer: Optimizer) -> bool:
    """Whether anything is to be called around ``optimizer.step``."""
    everywhere = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any(key != OURS for each in (*everywhere, *own) for key in each)


def tensor_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """What is called with the tensor's gradient, and what after it was accumulated."""
    own, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (*(own or {}).values(), *(after or {}).values())


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Let the gradient hooks of ``source`` see that of ``target``."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)


_OWN_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def has_tensor_hooks(tensors: Sequence[Tensor]) -> bool:
    """Whether any of them has hooks."""
    return any(chain.from_iterable(map(_OWN_HOOKS, tensors)))


def hook_dicts(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Where the hooks of ``module_hooks`` are kept."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def step_hook_dicts(optimizers: Iterable[Optimizer]) -> tuple[dict[Any, Any], ...]:
    """Where the hooks of ``step_hooks`` are kept."""
    own = (
        hooks
        for each in optimizers
        for hooks in (each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks)
    )
    return (_global_optimizer_pre_hooks, _global_optimizer_post_hooks, *own)


def module_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """What is called before and after the module's forward and backward."""
    hooks = module._forward_pre_hooks, module._forward_hooks
    back = module._backward_pre_hooks, module._backward_hooks
    return tuple(hook for each in (*hooks, *back) if each for hook in each.values())


def watched_checkpointing(
    begins: Callable[[], None],
    ends: Callable[[], None],
    marked: Callable[[int, CheckpointPolicy], None],
    mode: Callable[[], AbstractContextManager[Any]],
) -> tuple[tuple[Any, str, Any], ...]:
    """What to put where (owner, name, value) while a step is traced: ``begins`` and ``ends`` hear
    when a checkpointed region runs again, ``marked`` what a selective policy says of the nodes
    from one on. Nothing of other threads is heard. ``mode``: what a region ran in at first; while
    gradients are computed it is off, and on again for the region."""
    thread = threading.get_ident()

    class Again(checkpointing._recomputation_hook):
        def __enter__(self) -> Any:
            self.modes = ExitStack()
            if works_for(thread):
                begins()
                self.modes.enter_context(mode())
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            self.modes.close()
            if works_for(thread):
                ends()
            return super().__exit__(*error)

    class Caching(checkpointing._CachingTorchDispatchMode):
        def __init__(self, policy_fn: Callable[..., Any], *rest: Any, **named: Any) -> None:
            def policy(*args: Any, **kwargs: Any) -> Any:
                said = policy_fn(*args, **kwargs)
                self.said = _policy(said)
                return said

            super().__init__(policy, *rest, **named)
            self.said: CheckpointPolicy | None = None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            start, self.said = traced_nodes(), None
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.said is not None and works_for(thread):
                marked(start, self.said)
            return result

    reentrant = checkpointing.CheckpointFunction
    original = vars(reentrant)["backward"].__func__

    def backward(ctx: Any, *grads: Any) -> Any:
        if works_for(thread):
            begins()  # the inner call of ``torch.autograd.backward`` ends it
            ctx.run_function = _within(mode, ctx.run_function)
        return original(ctx, *grads)

    return (
        (checkpointing, "_recomputation_hook", Again),
        (checkpointing, "_CachingTorchDispatchMode", Caching),
        (checkpointing, "_is_compiling", _never),  # it would keep all, for a compiler to choose
        (reentrant, "backward", staticmethod(backward)),
    )


def masks_as_given() -> tuple[Any, str, Any]:
    """What to put where (owner, name, value) while a step is traced: transformers of torch.nn look
    at the values of a mask, to see whether a kernel may do without it. Here it is just used."""

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return transformer, "_detect_is_causal_mask", detect


def _within(
    mode: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return function(*args, **kwargs)

    return call


def _never(*_: Any) -> bool:
    return False


def _policy(said: Any) -> CheckpointPolicy:
    """A policy, or what a boolean stands for."""
    if isinstance(said, CheckpointPolicy):
        return said
    return CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE


def note_stepped(optimizer: Optimizer) -> None:
    """What schedulers look at to warn that they are stepped before the optimizer."""
    vars(optimizer)["_opt_called"] = True


def storage_key(value: Any) -> int | None:
    """Equal for values that share storage; ``None`` for what is no tensor, and for sparse ones."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def alone(tensor: Tensor) -> Tensor:
    """The same memory, for fake tensors to be made of, as a tensor that is no view and has no
    ``.grad``: these need not be of its dtype, where ``.data`` was set since (``Module.to``)."""
    if tensor.grad is None and not tensor._is_view():
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def fake_mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    """The mode that made the fake ones among them, or a new one that takes real ones as well."""
    found: FakeTensorMode | None = detect_fake_mode(list(tensors))
    return found or FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_operations_heard(tensors: Sequence[Tensor], hear: Callable[[], None]) -> Iterator[None]:
    """``hear`` is called before each operation on fake tensors like ``tensors``, in any thread."""
    mode: Any = detect_fake_mode(list(tensors))
    if mode is None:
        yield
        return
    dispatch = mode.dispatch

    def heard(*args: Any, **kwargs: Any) -> Any:
        hear()
        return dispatch(*args, **kwargs)

    mode.dispatch = heard
    try:
        yield
    finally:
        del mode.dispatch


def is_fake(tensor: Tensor) -> bool:
    """Has it a shape and nothing else?"""
    return isinstance(tensor, FakeTensor)


def trace(
    function: Callable[..., Any], inputs: list[Tensor], *, symbolic: bool = False
) -> fx.GraphModule:
    """``function`` of a list of tensors as one ATen graph, run on fake tensors; ``symbolic``: those
    of ``symbolic_mode``.

    Without oneDNN, whose recurrent layers give an opaque workspace that fake ones do not have:
    they become products and pointwise work. What runs may still use it. Nobody calls the module:
    its graph is not made into a text and compiled.
    """

    def flat(*values: Tensor) -> Any:
        with _use_lazy_graph_module(False):  # those that the function itself makes
            return function(list(values))

    with without_onednn(), without_words(), _use_lazy_graph_module(True):
        return make_fx(
            flat,
            decomposition_table={**TRACED_AS, **GROUPED},
            tracing_mode="symbolic" if symbolic else "fake",
            _allow_non_fake_inputs=True,
        )(*inputs)


def hold_constants(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """``graph``, made of ``owner``'s, gets a module with the constants that it names."""
    _LazyGraphModule(owner, graph)


@contextmanager
def without_words() -> Iterator[None]:
    """Fake tensors log what they then raise as well; the error says it all."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN off and then as it was. The public switch warns about TF32 on Intel GPUs."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


def uses_onednn() -> bool:
    """Whether PyTorch may use oneDNN now."""
    return torch._C._get_mkldnn_enabled()


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN's layers run in ``dtype`` on this machine."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def flat_weights(module: nn.RNNBase, table: Mapping[int, Tensor]) -> dict[str, list[Any]]:
    """A recurrent layer's own lists of its weights, with the tensors of ``table`` (by the id of the
    user's) in the place of the user's."""
    weights = [table.get(id(each), each) for each in module._flat_weights]
    refs = [None if each is None else weakref.ref(each) for each in weights]
    return {"_flat_weights": weights, "_flat_weight_refs": refs}


def after_backward(function: Callable[[], None]) -> None:
    """``function`` is called at the end of the backward pass that runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


METHOD_FILES = frozenset(
    str(sys.modules[name].__file__) for name in ("torch.overrides", "torch._tensor")
)
"""Where methods of tensors are written in Python."""


def held_input(tensor: Tensor) -> Tensor:
    """For a tensor from outside of a trace one that is traced: an attribute of the graph, without a
    value that could be looked at or changed meanwhile."""
    proxies = get_proxy_mode()
    mode = detect_fake_mode()
    if proxies is None or mode is None:
        return tensor
    tracer = proxies.tracer
    name = f"_held_{len(tracer.root.__dict__)}"
    setattr(tracer.root, name, tensor)
    with _disable_current_modes():
        fake = mode.from_tensor(tensor.detach())
    proxy = tracer.create_proxy("get_attr", name, (), {})
    return track_tensor_tree(fake, proxy, constant=None, tracer=tracer)


def works_for(thread: int) -> bool:
    """Whether this is the thread (by its identity) that traces, or one of the autograd engine's,
    which runs the backward pass of a GPU for it."""
    return threading.get_ident() == thread or get_proxy_mode() is not None


def without_functions(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose operations no mode or class sees before they are traced."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def traced_nodes() -> int:
    """How many nodes the trace in progress has; 0 outside one."""
    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


def traced_targets() -> list[Any]:
    """What the nodes of the trace in progress call, in their order."""
    mode = get_proxy_mode()
    return [node.target for node in mode.tracer.graph.nodes] if mode is not None else []


def dispatch_of_trace() -> tuple[Any, str]:
    """The method that puts an operation into the graph; where a trace runs."""
    return type(get_proxy_mode()), "__torch_dispatch__"


def reducer_methods() -> tuple[tuple[Any, str], ...]:
    """What ``DistributedDataParallel`` calls, however its forward is reached, before its hooks send
    anything."""
    if not torch.distributed.is_available():
        return ()
    from torch._C._distributed_c10d import Reducer  # builds without distributed lack it

    return (Reducer, "prepare_for_forward"), (Reducer, "prepare_for_backward")


def communicates(target: Any) -> bool:
    """Does this operator exchange data with other processes? Those of ``torch.distributed`` live in
    namespaces of their own, or take a process group."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    takes = any("c10d" in str(each.type) for each in target._schema.arguments)
    return takes or target.namespace.strip("_").startswith(("c10d", "symm_mem", "dtensor"))


def unwrapped(tensor: Tensor) -> Tensor:
    """What the wrappers of ``torch.func`` around a tensor hold, inside of all of them."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def tensor_entries() -> tuple[tuple[Any, str], ...]:
    """Functions of a tensor first that ``torch.func`` calls without asking any mode."""
    return (
        (eager_transforms, "_wrap_for_grad"),
        (functorch_vmap, "_add_batch_dim"),
        (forward_ad, "make_dual"),
    )


def accumulator_hooks(parameter: Tensor) -> bool:
    """Whether Python hooks stand at the node that adds to the parameter's ``.grad``. A hook of our
    own joins them in their dict for a moment, which is the only way to see it."""
    if not (parameter.requires_grad and parameter.is_leaf):
        return False
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    if node is None:
        return False
    for register in (node.register_hook, node.register_prehook):
        handle: Any = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def is_mutable(target: Any) -> bool:
    """Does this operator declare that it writes to an argument?"""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def changes_shape(target: Any) -> bool:
    """Does this operator make its argument another view of its own storage, as ``t_`` does?"""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.inplace_view in target.tags


def argument_types(target: Any) -> tuple[tuple[str, str], ...]:
    """Names and types of an operator's arguments, those of an ``out=`` aside."""
    arguments = target._schema.arguments
    return tuple((each.name, str(each.type)) for each in arguments if not each.is_out)


def filled_arguments(target: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments by position, defaults filled in where positions are missing."""
    positional = [each for each in target._schema.arguments if not each.kwarg_only]
    return (*given, *(each.default_value for each in positional[len(given) :]))


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    if not is_mutable(target):
        return []
    arguments = enumerate(target._schema.arguments)
    return [
        (at, each.name)
        for at, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]


def returns_written(target: Any) -> bool:
    """Does this operator return nothing but what it has written to, if anything?"""
    return all(each.alias_info is not None for each in target._schema.returns)


def _with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], TreeSpec]:
    try:
        return pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError:  # a class that was registered without names of its parts
        leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
        key: Any = pytree.SequenceKey
        return [((key(0), key(at)), leaf) for at, leaf in enumerate(leaves)], spec


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] = _is_size
) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Leaves with readable paths: ``args[0]``, ``kwargs['x']``, and their structure."""
    with _no_circles():
        pairs, spec = _with_paths(tree, is_leaf)
        if not all(is_value(value) for _, value in pairs):
            pairs, spec = _with_paths(_open(tree), _is_size)
    words = ("args", "kwargs")
    at: Any
    named: list[tuple[str, Any]] = []
    for (at, *rest), value in pairs:
        named.append((words[at.idx] + pytree.keystr(tuple(rest)), value))
    return named, spec


_LEAVES = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None)})
_PLAIN_NODES = _LEAVES | {list, tuple, dict, torch.Size}


@dataclass(frozen=True, slots=True)
class Container:
    """An argument that is taken apart, or a part of one. ``parts``: the names of attributes that
    are parts of it."""

    value: Any
    parts: frozenset[Any]


def _taken_apart(tree: Any) -> Iterator[tuple[Any, Opened | None]]:
    """All containers, in an order that their structure decides."""
    met: list[Any] = []

    def meet(node: Any) -> bool:
        if type(node) not in _LEAVES:
            met.append(node)
        return _is_size(node)

    those = {id(leaf) for leaf in pytree.tree_flatten(tree, is_leaf=meet)[0]}
    for node in met:
        if id(node) not in those:
            yield node, None
            continue
        inside = opened(node, pytree.tree_leaves)
        if inside is not None:
            yield node, inside
            yield from _taken_apart(inside.values)


def containers_in(tree: Any) -> list[Container]:
    """Those that may have more than their parts, in an order that their structure decides."""
    found: list[Container] = []
    for node, inside in _taken_apart(tree):
        if type(node) not in _ENTRIES:
            leaves = () if inside is not None else pytree.tree_leaves(node)
            found.append(Container(node, names_of_parts(node, inside, leaves)))
    return found


def nodes_in(tree: Any) -> list[Any]:
    """All containers, and the dicts that they keep their entries in."""
    found: list[Any] = []
    for node, _ in _taken_apart(tree):
        found.append(node)
        if isinstance(node, UserDict):
            found.append(node.data)
    return found


def replaced(tree: Any, instead: Callable[[Any], Any]) -> Any:
    """``tree`` with what ``instead`` gives for containers and leaves, but for ``None``."""

    def each(node: Any) -> Any:
        other = instead(node)
        return node if other is None else other

    def is_leaf(node: Any) -> bool:
        return instead(node) is not None or _is_size(node)

    return pytree.tree_map(each, tree, is_leaf=is_leaf)


@dataclass(slots=True)
class Given:
    """A call's arguments: what is left of them when they are taken apart, and what they were."""

    leaves: list[Any] = field(default_factory=list[Any])
    containers: list[Container] = field(default_factory=list[Container])
    tree: Any = None


class FlatCalls:
    """The leaves of calls' arguments with paths and structure. Those of arguments that are leaves
    themselves are known from how many there are, and from their names."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[str, ...], TreeSpec]] = {}

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["Given", tuple[str, ...], TreeSpec]:
        """Leaves and containers, the leaves' paths (``args[0]``, ``kwargs['x']``), and their
        structure."""
        leaves = [*args, *kwargs.values()]
        if not _LEAVES.issuperset(map(type, leaves)):
            kinds: set[type] = set()

            def meet(node: Any) -> bool:
                kinds.add(type(node))
                return _is_size(node)

            tree = args, kwargs
            found, structure = flatten_with_paths(tree, meet)
            containers = containers_in(tree) if kinds - _PLAIN_NODES else []
            leaves = [value for _, value in found]
            return Given(leaves, containers, tree), tuple(path for path, _ in found), structure
        key = len(args), *kwargs
        if key not in self._known:
            found, structure = flatten_with_paths((args, kwargs))
            self._known[key] = tuple(path for path, _ in found), structure
        return Given(leaves, [], (args, kwargs)), *self._known[key]


def symbolic_mode(dims: Iterable[Size]) -> tuple[FakeTensorMode, dict[str, tuple[Any, Size]]]:
    """A fake mode whose tensors may have these sizes, and by the name of its symbol each size as
    a ``SymInt`` and as it was given."""
    from torch._dynamo.source import ConstantSource  # late: Dynamo takes a second to import

    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    known: dict[str, tuple[Any, Size]] = {}
    for size in dims:
        (dim,) = size.formula.dims
        source = ConstantSource(dim.name)
        ends = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(dim.low, dim.high))
        symbol = env.create_symbol(
            dim.sample,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=ends,
            do_not_specialize_zero_one=True,
        )
        known[str(symbol)] = env.create_symintnode(symbol, hint=dim.sample, source=source), size
    mode = FakeTensorMode(shape_env=env, static_shapes=True, allow_non_fake_inputs=True)
    return mode, known


def through_autograd(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """A graph of Dynamo's as a function with a backward: traced jointly, cut by ``partition``, its
    parts compiled by ``forward`` (inference graphs as well) and ``backward``."""
    from torch._dynamo.backends.common import aot_autograd  # late: as above

    compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
    return compiler(module, inputs)


def mutated_inputs(joint: fx.Graph) -> list[int]:
    """Positions of the placeholders of AOTAutograd's joint graph that are written when the forward
    has run; ``InputMutationAOTOutput`` stands for the new value of one among the results."""
    (output,) = joint.find_nodes(op="output")
    places = [node.meta.get("desc") for node in joint.find_nodes(op="placeholder")]
    told = output.meta.get("desc") or ()
    kept = [each for each in told if type(each).__name__ == "InputMutationAOTOutput"]
    return [places.index(each.mutated_input) for each in kept]


@contextmanager
def outside_modes() -> Iterator[None]:
    """Inside, tensors are real again, whatever traces outside."""
    with _disable_current_modes():
        yield


def retraced(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """``module``, traced with symbols, for inputs of known sizes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in inputs]
    return make_fx(fx.Interpreter(module).run, tracing_mode="fake")(*fakes)


def dispatch_keys(tensor: Tensor) -> int:
    """What kind of a tensor it is to PyTorch's dispatcher, as bits."""
    return torch._C._dispatch_keys(tensor).raw_repr()


class SameLayouts:
    """Whether tensors have the types that they had: class, dtype, device, sizes, strides, whether
    they want gradients. PyTorch looks at all of them at some 100 ns each; of those whose words are
    known (``tensor_words``) these are compared instead."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        sizes: Any = [list(each.shape) for each in tensors]  # their declared types are others
        strides: Any = [list(each.stride()) for each in tensors]
        self._guards = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        )

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "SameLayouts | None":
        """For these; ``None`` if some are not dense or not PyTorch's own."""
        unique = list({id(each): each for each in tensors}.values())
        known = (Tensor, nn.Parameter)
        if any(type(t) not in known or t.layout is not torch.strided for t in unique):
            return None
        found = SameLayouts(unique)
        return found if found.hold() else None

    def hold(self) -> bool:
        """Whether each is as it was. Says no as well where modes are on that change operations."""
        return self._guards.check(*self._tensors)


def sample_mode() -> FakeTensorMode:
    """A fake mode for values of known sizes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


_OF_THE_PROCESS = ("thread_name", "caught_jit", "cache_stats", "worker")
"""Parts of names of getters that tell of the process and not of how PyTorch computes."""


def switches() -> dict[str, str]:
    """How PyTorch is set to compute, by name: every getter of its core that takes nothing and
    gives a plain value, the default dtype and device, and what autocast does."""
    found = {name.removeprefix("_get_"): repr(_switch(name)) for name in _getters()}
    found["default_dtype"] = str(torch.get_default_dtype())
    found["default_device"] = str(torch.get_default_device())
    for kind in ("cpu", "cuda"):
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        found[f"autocast_{kind}"] = f"{on} {dtype}"
    return found


class Switches:
    """What ``switches`` says, put into words only where it changed."""

    def __init__(self) -> None:
        self._raw: Any = None
        self._words: tuple[str, ...] = ()

    def now(self) -> tuple[str, ...]:
        """The values of ``switches()``; the very same object while nothing changed."""
        raw = self._read()
        if raw is None or raw != self._raw:
            words = tuple(switches().values())
            self._raw, self._words = raw, self._words if words == self._words else words
        return self._words

    def _read(self) -> Any:
        try:
            return (
                *[each() for each in _getter_functions()],
                torch.get_default_dtype(),
                torch._C._len_torch_function_stack() and torch.get_default_device(),
                torch.is_autocast_enabled("cpu"),
                torch.is_autocast_enabled("cuda"),
                torch.get_autocast_dtype("cpu"),
                torch.get_autocast_dtype("cuda"),
            )
        except RuntimeError:  # new and old interfaces have set one
            return None


@functools.cache
def _getter_functions() -> tuple[Callable[[], Any], ...]:
    return tuple(vars(torch._C)[name] for name in _getters())


def _switch(name: str) -> Any:
    """What a getter says, which is nothing for what new and old interfaces have set."""
    try:
        return vars(torch._C)[name]()
    except RuntimeError:
        return "mixed"


@contextmanager
def switches_kept(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """What ``refuse(name)`` gives is raised if one of the switches is another one afterwards; they
    are put back, as far as PyTorch has a way, also after an error."""
    names = [name for name in _getters() if name.replace("_get_", "_set_", 1) in vars(torch._C)]
    names.sort(key="_get_float32_matmul_precision".__ne__)  # others follow from it
    kept = {name: _switch(name) for name in names}
    dtype, gradients, before = torch.get_default_dtype(), torch.is_grad_enabled(), switches()
    strict = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        now = switches()
        changed = [name for name in before if now[name] != before[name]]
        if torch.is_grad_enabled() != gradients:
            changed.append("grad mode")
        if changed:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(gradients)
            torch.use_deterministic_algorithms(strict)
            for name in names:
                if _switch(name) != kept[name]:
                    vars(torch._C)[name.replace("_get_", "_set_", 1)](kept[name])
    if changed:
        raise refuse(changed[0].replace("_", " "))


_ASKS = ("get_", "is_", "are_", "initial_seed")


def getters_named(names: Iterable[str]) -> list[tuple[str, Callable[[], Any]]]:
    """Those of PyTorch's functions with such a name that take nothing and give a plain value."""
    found: list[tuple[str, Callable[[], Any]]] = []
    for name in sorted(names):
        getter = vars(torch).get(name) if name.startswith(_ASKS) else None
        if getter is not None and callable(getter) and _answers(getter):
            found.append((name, getter))
    return found


def _answers(getter: Callable[[], Any]) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            return isinstance(getter(), bool | int | float | str | torch.dtype | torch.device)
    except (TypeError, RuntimeError):
        return False


@functools.cache
def _getters() -> tuple[str, ...]:
    """The names of the getters of switches that this version has."""
    return tuple(
        name
        for name, getter in sorted(vars(torch._C).items())
        if name.startswith("_get_")
        and not any(part in name for part in _OF_THE_PROCESS)
        and _is_plain(getter)
    )


def _is_plain(getter: Any) -> bool:
    try:
        value = getter()
    except (TypeError, RuntimeError, AttributeError):
        return False
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | int | str) for each in parts)


def captured_graphs() -> int:
    """How many graphs ``torch.compile`` has captured in this process, whatever the backend."""
    utilities = sys.modules.get("torch._dynamo.utils")  # importing Dynamo takes seconds
    return 0 if utilities is None else utilities.counters["stats"]["unique_graphs"]


def clear_workspaces() -> None:
    """Give cuBLAS's workspaces back to the allocator; the next product takes one again."""
    torch._C._cuda_clearCublasWorkspaces()
