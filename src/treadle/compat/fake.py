"""Fake tensors, and the modes that make them."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from treadle.algebra.extents import Size
from treadle.compat.distributed.sharded_tensors import local_of

aten = torch.ops.aten

UNSUPPORTED = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)
"""What fake tensors raise where nobody knows the type of a result."""

NEEDS_MEMORY = ("data pointer", "doesn't have storage", "data_ptr", "access storage")
"""Words of errors about tensors without memory."""

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

    def heard(*args: Any, **kwargs: Any) -> Any:
        hear()
        return dispatch(*args, **kwargs)

    mode.dispatch = heard
    try:
        yield
    finally:
        del mode.dispatch


_MEMO = type(vars(FakeTensor)["item_memo"])
MEMOS = frozenset(
    "_".join(("", name, *what))
    for name, each in vars(FakeTensor).items()
    if isinstance(each, _MEMO)
    for what in ((), ("vc",), ("epoch",))
)
"""Attributes in which a fake tensor keeps what was asked of it: sizes that depend on values."""


def is_fake(tensor: Tensor) -> bool:
    """Has it a shape and nothing else?"""
    return isinstance(tensor, FakeTensor)


def is_traced(value: object) -> bool:
    """Whether a trace knows it: a fake tensor, or a DTensor that holds one."""
    held = local_of(value) if isinstance(value, Tensor) else value
    return isinstance(held, FakeTensor)


def mark_parameter(tensor: Tensor) -> None:
    """From now on ``isinstance(tensor, nn.Parameter)``, of whatever class it is."""
    tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]


def class_of(tensor: Tensor) -> type:
    """The class that it stands for."""
    if type(tensor) is not FakeTensor:
        return type(tensor)
    return nn.Parameter if vars(tensor).get("_is_param") else Tensor


def fake_like(value: FakeTensor) -> FakeTensor:
    """A fake tensor of the same type, in memory of its own; outside of all modes."""
    plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, plain, value.device)


def fakes_in_one_storage(values: Sequence[FakeTensor]) -> list[FakeTensor]:
    """Fake tensors of the same types in a storage of their own, where they lie to each other as the
    given ones do in theirs; outside of all modes."""
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
    """The same memory, for fake tensors to be made of, as a tensor that is no view and has no
    ``.grad``: these need not be of its dtype, where ``.data`` was set since (``Module.to``)."""
    if tensor.grad is None and not tensor._is_view():
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def symbolic_mode(dims: Iterable[Size]) -> tuple[FakeTensorMode, dict[str, tuple[SymInt, Size]]]:
    """A fake mode whose tensors may have these sizes, and by the name of its symbol each size as
    a ``SymInt`` and as it was given."""
    from torch._dynamo.source import ConstantSource  # late: Dynamo takes a second to import

    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    known: dict[str, tuple[SymInt, Size]] = {}
    for size in dims:
        (dim,) = size.formula.dims
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
        known[str(symbol)] = number, size
    mode = FakeTensorMode(shape_env=env, static_shapes=True, allow_non_fake_inputs=True)
    return mode, known


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
    """Whether a symbol stands for a whole number that values of tensors decide, and no shape."""
    return symbol_is_type(symbol, SymT.UNBACKED_INT)


def fake_result(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``operation(*args, **kwargs)`` of fake tensors, in whatever mode is on: also where this
    PyTorch has a kernel and cannot say what it gives, or says another dtype."""
    if operation is aten.addmm.dtype and not _types_sums_of_products():
        _, left, right, *rest = args
        wide = rest[0] if rest else kwargs["out_dtype"]
        return aten.mm.dtype(left, right, wide)
    result = operation(*args, **kwargs)
    return _with_wide_statistics(args, result) if operation in MISTYPED else result


def _with_wide_statistics(args: tuple[Any, ...], result: tuple[Any, ...]) -> tuple[Any, ...]:
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
    "MEMOS",
    "METADATA_CHANGES",
    "MISTYPED",
    "NEEDS_MEMORY",
    "UNSUPPORTED",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "alone",
    "class_of",
    "detect_fake_mode",
    "fake_like",
    "fake_mode_of",
    "fake_operations_heard",
    "fake_result",
    "fakes_in_one_storage",
    "is_fake",
    "is_of_values",
    "is_traced",
    "mark_parameter",
    "symbolic_mode",
    "without_words",
]
