"""Fake tensors, and the modes that make them."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
from torch import SymInt, Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental import proxy_tensor
from torch.overrides import get_default_nowrap_functions

from treadle.algebra.dims import Dim
from treadle.algebra.extents import Size
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.compat.late_modules import loading_late

T = TypeVar("T")
aten = torch.ops.aten

UNSUPPORTED = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)
"""What fake tensors raise where nobody knows the type of a result."""

NO_FAKE = "no fake impl registered"
"""Words of the error of a custom operation where it has no fake implementation."""

VALUES_DECIDE = (DynamicOutputShapeException, DataDependentOutputException)
"""What they raise where values decide the sizes of a result, or a number."""

NEEDS_MEMORY = ("data pointer", "doesn't have storage", "data_ptr", "access storage")
"""Words of errors about tensors without memory."""

FROM_OUTSIDE = "backward() through example input"
"""Words of the error about a backward that leaves what is traced: it began outside."""

NESTED = ("NestedInt", "nested_tensor")
"""Words of errors about nested tensors, of which there are no fake ones that can be traced."""

MISTYPED = frozenset({
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
})  # fmt: skip
"""Functional operations whose fake kernels give another dtype than the real ones do."""

METADATA_CHANGES = "Can't call metadata mutating ops on non-Fake Tensor"
"""Words of the error about ``set_`` of a tensor that is real."""


def fake_mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    """The mode that made the fake ones among them, or a new one that takes real ones as well."""
    found: FakeTensorMode | None = detect_fake_mode(list(tensors))
    return found or FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_operations_heard(tensors: Sequence[Tensor], hear: Callable[[], None]) -> Iterator[None]:
    """``hear`` is called before each operation on fake tensors like ``tensors``, in any thread."""
    mode: FakeTensorMode | None = detect_fake_mode(list(tensors))
    if mode is None:
        yield
        return
    dispatch = mode.dispatch

    def heard(*args: Any, **kwargs: object) -> object:
        hear()
        return dispatch(*args, **kwargs)

    mode.dispatch = heard
    try:
        yield
    finally:
        del mode.dispatch


PLAIN_CLASSES = frozenset({Tensor, nn.Parameter})
"""Those of tensors without a class of their own."""

_SET_CLASS = vars(object)["__class__"].__set__
"""What sets the class of an object that answers ``__class__`` itself."""

_MEMO = type(vars(FakeTensor)["item_memo"])
MEMOS = frozenset(
    "_".join(("", name, *what))
    for name, each in vars(FakeTensor).items()
    if isinstance(each, _MEMO)
    for what in ((), ("vc",), ("epoch",))
)
"""Attributes in which a fake tensor keeps what was asked of it: sizes that depend on values."""


def is_fake(tensor: Tensor) -> TypeGuard[FakeTensor]:
    """Has it a shape and nothing else?"""
    return isinstance(tensor, FakeTensor)


DEVICE_OF = torch.ops.prim.device.default
"""What PyTorch's C++ calls of a fake tensor, through all modes, whenever it asks for its device: in
the trace of a training step half of all operations."""


def device_of_fake(tensor: FakeTensor) -> torch.device:
    """What ``DEVICE_OF`` gives of it, if no other mode is asked."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def is_traced(value: object) -> TypeGuard[Tensor]:
    """Whether a trace knows it: a fake tensor, or a DTensor that holds one."""
    held = local_of(value) if isinstance(value, Tensor) else value
    return isinstance(held, FakeTensor)


def mark_parameter(tensor: Tensor) -> None:
    """From now on ``isinstance(tensor, nn.Parameter)``, of whatever class it is."""
    tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]


class _StandIn(FakeTensor):
    """A fake tensor that answers ``__class__`` as the user's tensor does: that is what
    ``isinstance``, ``match`` and ``super()`` ask."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return class_of(self)


_StandIn.__name__ = _StandIn.__qualname__ = Tensor.__name__  # Python's and PyTorch's errors show it
STAND_INS = frozenset({FakeTensor, _StandIn})
"""What stands for tensors of PyTorch's own classes."""


class _Unheard:
    """First among the bases: no class of the user's hears that it is derived from."""

    __slots__ = ()

    def __init_subclass__(cls) -> None: ...


class _OwnClass(_StandIn):
    """Of a class of the user's own, which stands before this one among the bases."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """As ``Tensor`` has it: results are of the class as well."""
        kind = _own_class(cls)
        if not all(issubclass(kind, _own_class(each)) for each in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in get_default_nowrap_functions() or any(each is result for each in args):
            return result
        return _in_class(result, kind)


class WatchedClass:
    """Beside a class of PyTorch's own as a base: for the time being it stands for that one."""

    __slots__ = ()


def users_class(tensor: object) -> type:
    """The class of one of the user's tensors, whether it is watched or not."""
    kind = type(tensor)
    return kind.__bases__[0] if WatchedClass in kind.__bases__ else kind


def _own_class(kind: type) -> type:
    """That of the user's of which ``kind`` makes stand-ins."""
    return kind.__bases__[1] if _OwnClass in kind.__bases__ else kind


def _in_class(result: object, kind: type) -> object:
    if isinstance(result, Tensor):
        return result if isinstance(result, kind) else stand_in_for(result, kind)
    if isinstance(result, list | tuple):
        parts = [_in_class(each, kind) for each in result]
        return parts if isinstance(result, list) else type(result)(parts)
    return result


def of_class(kind: type, tensor: Tensor, needs_gradient: bool) -> Tensor:
    """Another tensor of the same memory, of that class, which begins a graph of gradients."""
    return Tensor._make_subclass(kind, tensor.detach(), needs_gradient)


def class_of(tensor: Tensor) -> type:
    """The class that it stands for."""
    kind = type(tensor)
    if kind in STAND_INS:
        return nn.Parameter if vars(tensor).get("_is_param") else Tensor
    return _own_class(kind)


def stand_in_for(traced: T, kind: type) -> T:
    """``traced``, from now on of the class ``kind``, if it is a fake tensor. One with slots of its
    own stays a plain tensor, and so does one of the user's that is fake itself."""
    if not isinstance(traced, FakeTensor):
        return traced
    is_plain = kind in PLAIN_CLASSES or issubclass(kind, FakeTensor)
    is_own = not is_plain and kind.__basicsize__ == Tensor.__basicsize__
    _SET_CLASS(traced, _class_in_place_of(kind) if is_own else _StandIn)
    return traced


def _class_in_place_of(kind: type) -> type:
    """With the methods and attributes of ``kind``, but PyTorch's own of a parameter: those would
    ask no mode."""
    for known in type.__subclasses__(kind):
        if _OwnClass in known.__bases__:
            return known
    asked = ("__deepcopy__", "__reduce_ex__", "__repr__")
    theirs = [name for name in asked if getattr(kind, name) is getattr(nn.Parameter, name)]
    members = {name: getattr(Tensor, name) for name in theirs}
    return type(kind)(kind.__name__, (_Unheard, kind, _OwnClass), members)


@contextmanager
def standing_in(is_asked: Callable[[], bool]) -> Iterator[None]:
    """Fake tensors that are made where ``is_asked()`` know the class that they stand for."""
    original = FakeTensor.__new__

    def make(cls: type[FakeTensor], *args: Any, **kwargs: object) -> FakeTensor:
        return original(_StandIn if cls is FakeTensor and is_asked() else cls, *args, **kwargs)

    known = proxy_tensor.HANDLED_TYPES
    setattr(FakeTensor, "__new__", make)  # noqa: B010 - its type says that it is fixed
    proxy_tensor.HANDLED_TYPES = (*known, _StandIn)
    try:
        yield
    finally:
        setattr(FakeTensor, "__new__", original)  # noqa: B010
        proxy_tensor.HANDLED_TYPES = known


def fake_like(value: FakeTensor) -> FakeTensor:
    """A fake tensor of the same type, in memory of its own; outside all modes."""
    plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, plain, value.device)


def fakes_in_one_storage(values: Sequence[FakeTensor]) -> list[FakeTensor]:
    """Fake tensors of the same types in a storage of their own, where they lie to each other as the
    given ones do in theirs; outside all modes."""
    starts = [int(value.storage_offset()) * value.element_size() for value in values]
    size = max(value.element_size() for value in values)
    first = min(starts) // size * size
    memory = torch.empty(0, dtype=torch.uint8, device="meta").untyped_storage()
    found: list[FakeTensor] = []
    for value, start in zip(values, starts, strict=True):
        plain = torch.empty(0, dtype=value.dtype, device="meta")
        offset = (start - first) // value.element_size()
        plain.set_(memory, offset, value.shape, value.stride())
        found.append(FakeTensor(value.fake_mode, plain, value.device))
    return found


def alone(tensor: Tensor) -> Tensor:
    """The same memory, for fake tensors to be made of, as a tensor that is not a view and has no
    ``.grad``: these need not be of its dtype, where ``.data`` was set since (``Module.to``)."""
    if tensor.grad is None and not tensor._is_view():
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


@loading_late()
def symbolic_mode(dims: Iterable[Size]) -> tuple[FakeTensorMode, dict[str, tuple[SymInt, Size]]]:
    """A fake mode whose tensors may have these sizes, and by the name of its symbol each size as
    a ``SymInt`` and as it was given."""
    # late: Dynamo and sympy take a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env, static_shapes=True, allow_non_fake_inputs=True)
    known: dict[str, tuple[SymInt, Size]] = {}
    for size in dims:
        (dim,) = size.formula.dims
        number, name = new_symbol(mode, dim)
        known[name] = number, size
    return mode, known


def new_symbol(mode: FakeTensorMode, dim: Dim) -> tuple[SymInt, str]:
    """A symbol for a dim, in a mode that has symbols; and its name."""
    # late: as above
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
    from torch.utils._sympy.value_ranges import ValueRanges

    env = mode.shape_env
    assert env is not None, "a mode without symbols"
    source = ConstantSource(dim.name)
    bounds = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(dim.low, dim.high))
    symbol = env.create_symbol(
        dim.sample,
        source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=bounds,
        do_not_specialize_zero_one=True,
    )
    number = env.create_symintnode(symbol, hint=dim.sample, source=source)
    assert isinstance(number, SymInt), symbol
    return number, str(symbol)


@contextmanager
def without_words() -> Iterator[None]:
    """Fake tensors log what they then raise as well; the error says it all."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def is_of_values(symbol: Any) -> bool:
    """Whether a symbol stands for an integer that values of tensors decide, and no shape."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type  # late: as above

    return symbol_is_type(symbol, SymT.UNBACKED_INT)


def fake_result(
    operation: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """``operation(*args, **kwargs)`` of fake tensors, in whatever mode is on: also where this
    PyTorch has a kernel and cannot say what it gives, or says another dtype."""
    if operation is aten.addmm.dtype and not _types_sums_of_products():
        _, left, right, *rest = args
        wide = rest[0] if rest else kwargs["out_dtype"]
        return aten.mm.dtype(left, right, wide)
    result = operation(*args, **kwargs)
    return _with_wide_statistics(args, result) if operation in MISTYPED else result


def _with_wide_statistics(args: tuple[object, ...], result: tuple[Any, ...]) -> tuple[object, ...]:
    """The results of a norm. Of 16 bits with parameters of 32 all kernels keep mean and deviation
    in 32 bits: in 16, as PyTorch's types say for CPUs, they would cost gradients a hundredth."""
    x, *others = [each for each in args if isinstance(each, Tensor)]
    wide = any(each.dtype is torch.float32 for each in others)
    if x.dtype not in (torch.bfloat16, torch.float16) or not wide:
        return result
    return result[0], result[1].float(), result[2].float(), *result[3:]


@functools.cache
def _types_sums_of_products() -> bool:
    """Whether the type of ``addmm.dtype`` can be asked for: PyTorch 2.11 takes the dtype that it is
    given for a factor."""
    with without_words(), FakeTensorMode():
        x = torch.empty(1, 1, dtype=torch.bfloat16)
        try:
            aten.addmm.dtype(x.float(), x, x, torch.float32)
        except TypeError:
            return False
    return True


__all__ = [
    "DEVICE_OF",
    "FROM_OUTSIDE",
    "MEMOS",
    "METADATA_CHANGES",
    "MISTYPED",
    "NEEDS_MEMORY",
    "NESTED",
    "NO_FAKE",
    "PLAIN_CLASSES",
    "STAND_INS",
    "UNSUPPORTED",
    "VALUES_DECIDE",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "WatchedClass",
    "alone",
    "class_of",
    "detect_fake_mode",
    "device_of_fake",
    "enable_python_dispatcher",
    "fake_like",
    "fake_mode_of",
    "fake_operations_heard",
    "fake_result",
    "fakes_in_one_storage",
    "is_fake",
    "is_of_values",
    "is_traced",
    "mark_parameter",
    "of_class",
    "stand_in_for",
    "standing_in",
    "symbolic_mode",
    "users_class",
    "without_words",
]
