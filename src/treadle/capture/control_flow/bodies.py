"""The bodies of control-flow functions: while a step is traced, they may only compute."""

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from treadle.capture.explain_errors import here
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.operators.operator_facts import (
    Effect,
    call_effects,
    raises_for_zeros,
    sizes_from_values,
    written_names,
)
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.pytree import tree_leaves
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import Args, DispatchMode, Kwargs, without_functions
from treadle.graph.core.operators import arguments_of
from treadle.util.errors import CaptureError

Function = Callable[..., object]

MOST_COPIES = 256
"""The most iterations of a ``map`` or ``scan`` whose body cannot be in a loop: more would give a
graph of many equal parts."""

_SLICES = (
    "let its function only compute tensors of fixed types, without random numbers or other side "
    f"effects, or give it at most {MOST_COPIES} slices"
)
_REMEDIES = {
    "cond": (
        "let both branches compute tensors of one type and have no side effects, or do this "
        "outside the step"
    ),
    "map": f"{_SLICES}, or use operations on the whole tensor",
    "scan": f"{_SLICES}, or use operations on the whole tensor (cumsum, cumprod)",
    "while_loop": (
        "let its functions only compute tensors, without side effects, and keep the types of the "
        "carried tensors; or do this outside the step"
    ),
    "associative_scan": (
        "let its function only compute tensors of the types that it receives, without side effects"
    ),
}


def unfit(name: str, why: str, where: str = "") -> CaptureError:
    """TR-151, for the user's line ``where``, or the one that runs. ``name``: the function of
    ``torch``."""
    return CaptureError(
        f"torch.{name} cannot be captured: {why}",
        code="TR-151",
        where=where or here(),
        remedy=_REMEDIES[name],
    )


class OperandsFromOutside(TorchFunctionMode):
    """Replaces tensors from outside in the calls that a body makes.

    ``name``: the function of ``torch``; ``part``: which of its functions. TR-151 where that
    computes gradients, sets an attribute of a tensor or, with ``values=False``, asks for the value
    of one.
    """

    def __init__(self, name: str, part: str, *, values: bool = True) -> None:
        super().__init__()
        self._values = values
        self._name = name
        self._part = part

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        if computes_gradients(func):
            raise unfit(self._name, f"{self._part} computes gradients")
        if func in _VALUES and not self._values:
            raise unfit(self._name, f"{self._part} asks for the value of a tensor")
        if func in ATTRIBUTES:
            return func(*args, **(kwargs or {}))
        if sets_attribute(func):
            raise unfit(self._name, f"{self._part} sets an attribute of a tensor")
        leaves, spec = flatten_containers((args, dict(kwargs or {})))
        args, named = unflatten([self.inside(leaf) for leaf in leaves], spec)
        result = func(*args, **named)
        self.made(result)
        return result

    @abstractmethod
    def inside(self, leaf: object) -> object:
        """The replacement of ``leaf`` in the body; ``leaf`` itself if it is from inside."""

    def made(self, result: object) -> None:
        """Note the results of a function that the body called."""


def require_closed(
    results: Iterable[object], known: Container[object], error: Callable[[], CaptureError]
) -> None:
    """Raise ``error()`` if a gradient of ``results`` could leave a body other than through the
    functions ``known``, because a function of the user's got a tensor from outside that was not
    replaced."""
    left = [result.grad_fn for result in results if isinstance(result, Tensor)]
    seen: set[object] = set()
    while left:
        node = left.pop()
        if node is None or node in known or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            raise error()
        left += [function for function, _ in node.next_functions]


def computes_gradients(func: Function) -> bool:
    """Whether a function that modes intercept computes gradients, which no body may do. The names
    are looked up at the call, because they are patched while a step is traced."""
    return func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


_VALUES: frozenset[object] = frozenset(
    (
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.is_nonzero),
        *(Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__),
    )
)
"""Functions that give Python the value of a tensor and that modes intercept."""

ATTRIBUTES: frozenset[object] = frozenset(
    cast(Any, descriptor).__get__
    for descriptor in (
        *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout),
        *(Tensor.is_leaf, Tensor.requires_grad, Tensor.grad, Tensor.grad_fn),
    )
)
"""Functions that only ask for the type of a tensor: another tensor of the type would give the
same."""


def sets_attribute(func: Function) -> bool:
    """Whether a function that modes intercept sets an attribute of a tensor."""
    return getattr(func, "__name__", "") == "__set__"


class Pure(DispatchMode):
    """Refuses operations of a body that do more than compute. ``part``: the name of the body;
    ``always``: eager runs the body as well, so it may raise where eager does."""

    def __init__(self, name: str, part: str, *, always: bool = False) -> None:
        super().__init__()
        self._name = name
        self._part = part
        self._always = always
        self._made: dict[int | None, Tensor] = {}  # by the memory they have

    def __torch_dispatch__(
        self,
        func: Function,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        return without_functions(self._checked)(func, args, dict(kwargs or {}))

    def _checked(self, func: Function, args: Args, named: Kwargs) -> object:
        if isinstance(func, OpOverload) and func.namespace != "prim":  # that is not a computation
            self._check(func, args, named)
        result = func(*args, **named)
        if isinstance(func, OpOverload) and sizes_from_values(func) and not _is_sized(result):
            raise unfit(self._name, f"in {self._part} a size depends on values ({func})")
        storage_keys = {storage_key(tensor) for tensor in _tensors((args, named))}
        for tensor in _tensors(result):
            if storage_key(tensor) not in storage_keys:
                self._made[storage_key(tensor)] = tensor
        return result

    def _check(self, op: OpOverload, args: Args, kwargs: Kwargs) -> None:
        part = self._part
        arguments = arguments_of(op, args, kwargs)
        effects = call_effects(op, arguments)
        if Effect.WRITES in effects:
            written = _tensors([arguments[name] for name in written_names(op, arguments)])
            if any(storage_key(tensor) not in self._made for tensor in written):
                raise unfit(self._name, f"{part} writes to a tensor from outside ({op})")
            effects &= ~Effect.WRITES
        if effects:
            raise unfit(self._name, f"{part} has a side effect ({op})")
        whole = [
            not (tensor.is_floating_point() or tensor.is_complex()) for tensor in _tensors(args)
        ]
        if raises_for_zeros(op) and all(whole) and not self._always:
            raise unfit(
                self._name, f"{part} divides integers, which raises an error for a zero ({op})"
            )


def _is_sized(result: object) -> bool:
    """Whether all results are tensors of known sizes, and none is a number from a tensor's
    value."""
    leaves = tree_leaves(result)
    return all(
        isinstance(leaf, Tensor) and all(type(size) is int for size in leaf.shape)
        for leaf in leaves
    )


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
