"""``CustomOp``: an operator of treadle, with everything that PyTorch and the compiler need to know
about it.

::

    HALVED = CustomOp(
        "halved(Tensor x, Tensor like, bool deep) -> Tensor",
        fake=lambda x: x.new_empty(x.shape),       the result, without running anything
        kernel=lambda x, like, deep: x / 2,        or None, and implement("halved", ...) gives it
        flops=lambda x: prod(x),                   from shapes in the place of tensors
    )
    HALVED.op(x, y, True)                          treadle::halved

``fake``, ``flops`` and ``holds`` take the arguments that they need by the names of the schema, in
any order, and receive no others; so operators with similar schemas can share them.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, final

import torch
from torch import Tensor
from torch._library.simple_registry import singleton as operator_records
from torch.utils.flop_counter import register_flop_formula

from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.util.errors import CaptureError

NAMESPACE = "treadle"


class CallContext(Protocol):
    """PyTorch's context of one call: tensors are saved for its backward, and the arguments that are
    no tensors stand in ``rest``."""

    rest: Sequence[object]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What ``save_for_backward`` was given."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each argument of the call, whether its gradient is wanted."""
        ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""
        ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """These results never need a gradient."""
        ...

    def set_materialize_grads(self, value: bool) -> None:
        """Whether gradients that are not there are given as zeros."""
        ...


Gradients = tuple[Tensor | Sequence[Tensor | None] | None, ...]
"""One for each argument of the call; a list for a list of tensors."""


@final
@dataclass(frozen=True)
class Gradient:
    """``keep(context, inputs, output)`` saves what backward needs; ``of(context, *gradients)``
    gives the gradients of the inputs."""

    keep: Callable[..., None]
    of: Callable[..., Gradients]


def no_second_derivative(what: str, remedy: str) -> Gradient:
    """Of the backward of ``what``: ``CaptureError`` TR-140 where it is differentiated."""

    def keep(ctx: object, inputs: object, output: object) -> None:
        """Nothing."""

    def refuse(ctx: object, *gradients: object) -> NoReturn:
        message = f"the gradient of {what} is differentiated again"
        raise CaptureError(message, code="TR-140", remedy=remedy)

    return Gradient(keep, refuse)


@final
@dataclass(frozen=True, eq=False)
class CustomOp:
    """An operator, known to PyTorch from the moment that its record is made.

    ``fake``: the types of the results; the kernel itself where it runs on fake tensors as well;
    ``None`` for an operator that never stands in a graph. ``kernel``: for any device. ``flops``:
    floating-point operations; without it nothing that PyTorch counts. ``holds``: bytes that a call
    allocates beside its results, from anything with a ``shape`` and a ``dtype`` in the place of
    tensors; measured if not given. ``library``: why it is a call of the library by choice; empty if
    it has a formula or a reason of another kind.
    """

    schema: str
    fake: Callable[..., object] | None = None
    kernel: Callable[..., object] | None = None
    gradient: Gradient | None = None
    flops: Callable[..., int] | None = None
    holds: Callable[..., int] | None = None
    library: str = ""
    tags: tuple[torch.Tag, ...] = ()
    namespace: str = NAMESPACE
    op: OpOverload = field(init=False)

    def __post_init__(self) -> None:
        library = _library(self.namespace)
        library.define(self.schema, tags=self.tags)
        dotted = self.schema.partition("(")[0]
        packet, _, overload = dotted.partition(".")
        found: OpOverload = getattr(
            getattr(getattr(torch.ops, self.namespace), packet), overload or "default"
        )
        object.__setattr__(self, "op", found)
        name = f"{self.namespace}::{dotted}"
        if self.kernel is not None:
            implement(dotted, self.kernel, self.namespace)
        if self.fake is not None:
            fake = self.fake if self.fake is self.kernel else self._by_name(self.fake)
            _register_fake(library, dotted, fake)
        if self.gradient is not None:
            keep, of = self.gradient.keep, self.gradient.of
            torch.library.register_autograd(name, of, setup_context=keep, lib=library)
        if self.flops is not None:
            register_flop_formula(found.overloadpacket)(self._by_name(self.flops))

    def _by_name(self, function: Callable[..., object]) -> Callable[..., Any]:
        """``function`` as one of all arguments of the operator, in their order."""
        names = [each.name for each in schema_of(self.op).arguments]
        wanted = tuple(inspect.signature(function).parameters)
        assert set(wanted) <= set(names), f"{self.schema} has not all of {wanted}"

        def call(*args: object, **kwargs: object) -> object:
            given = dict(zip(names, args, strict=False)) | kwargs
            return function(**{name: given[name] for name in wanted})

        return call

    def bytes_held(self, args: Sequence[object]) -> int:
        """What a call with ``args`` allocates beside its results; for records that say it."""
        assert self.holds is not None, self.schema
        return self._by_name(self.holds)(*args)


def implement(name: str, kernel: Callable[..., object], namespace: str = NAMESPACE) -> None:
    """The kernel of an operator whose record stands elsewhere, made before this or later."""
    _library(namespace).impl(name, kernel, "CompositeExplicitAutograd")


def _register_fake(
    library: torch.library.Library, dotted: str, fake: Callable[..., object]
) -> None:
    """As ``torch.library.register_fake``, which also looks for its caller's line in all that is
    loaded: 30 ms of the import of this package."""
    entry = operator_records.find(f"{library.ns}::{dotted}")
    entry.fake_impl.register(fake, __name__, lib=library, allow_override=True)


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


@contextmanager
def kernels_replaced(key: str, kernels: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Inside, operators of PyTorch's have these kernels for a dispatch key, by their names."""
    with torch.library._scoped_library("aten", "IMPL", key) as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that others had been there
            for name, kernel in kernels.items():
                library.impl(name, kernel, allow_override=True)
        yield


def replaces_gradients() -> bool:
    """Whether one of PyTorch's own operators has a kernel in Python, a user's, that runs ahead of
    the modes that hear of operations."""
    return any(
        name.startswith("aten/") and ("Autograd" in name or "Composite" in name)
        for name in torch.library._impls
    )
