"""Sparse gradients while a step is captured: pairs of dense tensors.

::

    embedding(w, i, sparse=True)   w.grad = sparse(indices i [1, N], values g [N, D], size [V, D])
    in the graph                   i, g

Rows of a gradient may repeat; their sum counts. Two gradients are added by concatenating their
rows; scaling a gradient scales its values. An optimizer updates only these rows
(``OptimizerUpdate.update_rows``), and a gradient that stays in ``.grad`` is assembled after the
call. So no gradient has as many rows as the table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.capture.explain_errors import here
from treadle.compat.fake import DEVICE_OF, device_of_fake, is_fake
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import Args, DispatchMode, Kwargs, without_functions
from treadle.graph.core.operators import arguments_of
from treadle.util.errors import CaptureError, joined_with

aten = torch.ops.aten
_MAKE = aten._sparse_coo_tensor_with_dims_and_tensors.default
_BAGS = aten._embedding_bag_backward.default
_MEAN = 1
"""The number of a bag's mode."""


@final
@dataclass(frozen=True, slots=True)
class SparseLayout:
    """How two dense tensors become the sparse one that a step leaves somewhere."""

    shape: torch.Size

    def around(self, indices: Tensor, values: Tensor) -> Tensor:
        """A tensor of these rows, which may repeat."""
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False)


@final
@dataclass(frozen=True, slots=True)
class SparseRows:
    """``grad[indices[0, n]] += values[n]``. ``known``: not for what the call before left."""

    indices: Tensor
    values: Tensor
    shape: torch.Size
    known: bool = True

    @property
    def at(self) -> Tensor:
        """The rows, as a tensor of one dim."""
        return self.indices.view(-1)

    def with_values(self, values: Tensor) -> "SparseRows":
        """The same rows with other values."""
        return replace(self, values=values)

    def beside(self, other: "SparseRows", alpha: float = 1) -> "SparseRows":
        """The sum: the rows of both."""
        added = other.values if alpha == 1 else other.values * alpha
        indices = torch.cat([self.indices, other.indices], 1)
        return SparseRows(indices, torch.cat([self.values, added]), self.shape)

    def onto(self, dense: Tensor, alpha: float = 1) -> Tensor:
        """A dense tensor and these rows."""
        return dense.index_add(0, self.at, self.values, alpha=alpha)

    def dense(self) -> Tensor:
        """All rows."""
        return self.onto(self.values.new_zeros(self.shape))

    def summed(self) -> tuple[Tensor, Tensor]:
        """All indices in order, repetitions included; beside each the sum of all rows with this
        index. The number of rows does not depend on the values of the indices."""
        order, place = torch.sort(self.at, stable=True)
        starts = torch.cat([torch.zeros_like(order[:1]), (order[1:] != order[:-1]).to(order.dtype)])
        group = starts.cumsum(0)
        sums = torch.zeros_like(self.values).index_add(0, group, self.values[place])
        return order, sums[group]


def _called(func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    return func(*args, **kwargs)


def is_sparse(value: object) -> bool:
    """Whether it is a sparse tensor, as embeddings have them for gradients."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def sparse_layout_of(value: object) -> SparseLayout | None:
    """``None`` for what is not sparse."""
    return SparseLayout(value.shape) if isinstance(value, Tensor) and is_sparse(value) else None


@final
class SparseGradients(DispatchMode):
    """While inside, operations on sparse tensors are traced as what they do to pairs. ``TR-127``
    for those that have no such form.

    It is the outermost mode of a trace: what PyTorch calls in Python to find the type of a result
    is hidden from modes for functions, which would take it for calls of a hook."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, SparseRows]] = {}  # by the id of a sparse tensor
        self._apply = without_functions(self._applied)
        self._run = without_functions(_called)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        if func is DEVICE_OF and is_fake(args[0]):
            return device_of_fake(args[0])
        named = dict(kwargs or {})
        asks = isinstance(func, OpOverload) and func.namespace == "prim"
        if not asks and (
            func in (_MAKE, _BAGS) or _has_sparse(args) or _has_sparse(named.values())
        ):
            return self._apply(func, args, named)
        return self._run(func, args, named)

    def rows_of(self, gradient: Tensor) -> SparseRows:
        """The pair of a sparse tensor that the step made."""
        _, rows = self._known.get(id(gradient), (None, None))
        if rows is None:
            raise refused_sparse(f"creates a {gradient.layout} tensor")
        if not rows.known:
            raise refused_sparse(
                "reads or adds to the sparse gradient that an earlier call left",
                "call zero_grad() in the step, before the backward; or use an embedding without "
                "sparse=True",
            )
        return rows

    def left_before(self, like: Tensor) -> Tensor:
        """For the sparse gradient that ``like`` has when the step begins: nobody may read it."""
        indices = like.new_empty((1, 0), dtype=torch.int64)
        values = like.detach().new_empty((0, *like.shape[1:]))
        return self._made(SparseRows(indices, values, like.shape, known=False))

    def _made(self, rows: SparseRows) -> Tensor:
        """A sparse tensor of these rows. Its node in the graph goes when the trace is over."""
        values = rows.values
        gradient: Tensor = _MAKE(
            1,
            len(rows.shape) - 1,
            list(rows.shape),
            rows.indices,
            values.detach(),
            dtype=values.dtype,
            layout=torch.sparse_coo,
            device=values.device,
        )
        self._known[id(gradient)] = gradient, rows
        return gradient

    def _applied(self, func: Any, args: Args, named: Kwargs) -> object:
        if func is _MAKE:
            sparse_dim, _, size, indices, values, *_ = args
            if sparse_dim != 1:
                return func(*args, **named)
            return self._made(SparseRows(indices, values, torch.Size(size)))
        if func is _BAGS:
            rows = _rows_of_bags(**arguments_of(func, args, named))
            return func(*args, **named) if rows is None else self._made(rows)
        rule = _RULES.get(func)
        if rule is None:
            name = func.name() if isinstance(func, OpOverload) else str(func)
            raise refused_sparse(f"calls {name} of a sparse tensor")
        result = rule(self, *args, **named)
        return self._made(result) if isinstance(result, SparseRows) else result

    def put(self, gradient: Tensor, rows: SparseRows) -> Tensor:
        """From now on a sparse tensor has these rows."""
        self._known[id(gradient)] = gradient, rows
        return gradient


def refused_sparse(what: str, remedy: str = "") -> CaptureError:
    """TR-127, which is a ``RuntimeError`` as well: eager refuses many of these operations."""
    return joined_with(RuntimeError, CaptureError)(
        f"the step {what}",
        code="TR-127",
        where=here(),
        remedy=remedy
        or (
            "compute with dense tensors in the step, or do this part outside and pass the "
            "result; gradients of embeddings may be sparse"
        ),
    )


def _has_sparse(values: Iterable[object]) -> bool:
    """Asked of the arguments of every operation: tensors, numbers, and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            is_sparse_one = value.layout is torch.sparse_coo
        elif isinstance(value, dict):
            is_sparse_one = _has_sparse(value.values())
        else:
            is_sparse_one = isinstance(value, list | tuple) and _has_sparse(value)
        if is_sparse_one:
            return True
    return False


def _rows_of_bags(
    *,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
    **_: object,
) -> SparseRows | None:
    """What a backward through ``EmbeddingBag`` gives: a row for each index, that of its bag.
    ``None`` where its gradient is dense, or PyTorch refuses it."""
    if not sparse or scale_grad_by_freq:
        return None
    place = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    bag = torch.searchsorted(offsets[: grad.shape[0]].contiguous(), place, right=True) - 1
    values = grad[bag]
    if mode == _MEAN:
        values = values * bag_size.to(grad.dtype).reciprocal()[bag].unsqueeze(1)
    if per_sample_weights is not None:
        values = values * per_sample_weights.unsqueeze(1)
    if padding_idx >= 0 and indices.numel():
        kept, indices = _without_padding(indices, padding_idx)
        values = torch.where(kept.unsqueeze(1), values, 0)
    shape = torch.Size((num_weights, *grad.shape[1:]))
    return SparseRows(indices.view(1, -1), values, shape)


def _without_padding(indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Which indices are none of padding, and all of them, where one of those others stands in the
    place of padding. It gets zeros added, so how many rows there are does not depend on values."""
    kept = indices != padding
    first = kept.view(-1).to(torch.int32).argmax(0, keepdim=True)
    return kept, torch.where(kept, indices, indices.view(-1)[first])


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding``. Of one with a sparse gradient and padding, rows of padding are looked up
    without a gradient."""
    options = max_norm, norm_type, scale_grad_by_freq, sparse
    plain = not sparse or max_norm is not None or scale_grad_by_freq
    if padding_idx is None or plain or not _has_rows(input):
        return F.embedding(input, weight, padding_idx, *options)
    padding = padding_idx % weight.shape[0]
    kept, at = _without_padding(input.contiguous(), padding)
    rows = F.embedding(at, weight, None, *options)
    return torch.where(kept.unsqueeze(-1), rows, weight.detach()[padding])


def _has_rows(indices: Tensor) -> bool:
    """Whether it is known how many there are, and that there are some."""
    return all(type(n) is int for n in indices.shape) and bool(indices.numel())


def _norm(
    mode: SparseGradients, gradient: Tensor, p: float | None = None, *rest: object, **_: object
) -> Tensor:
    """Of the sums of rows."""
    if any(rest):
        raise refused_sparse("takes norms of a sparse tensor along some of its dims")
    rows = mode.rows_of(gradient)
    at, sums = rows.summed()
    first = torch.cat([torch.ones_like(at[:1], dtype=torch.bool), at[1:] != at[:-1]])
    return torch.where(first.unsqueeze(1), sums.flatten(1), 0).norm(2 if p is None else p)


def _sum(
    mode: SparseGradients, one: Tensor, other: Tensor, *, alpha: float = 1
) -> SparseRows | Tensor:
    """``one + alpha * other``, of which at least one is sparse. A sparse one takes no dense one."""
    rows = mode.rows_of(other) if is_sparse(other) else None
    if rows is None:
        raise refused_sparse("adds a dense tensor to a sparse one", "dense + sparse")
    if is_sparse(one):
        return mode.rows_of(one).beside(rows, alpha)
    return rows.onto(one, alpha)


def _sum_in_place(mode: SparseGradients, one: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    total = _sum(mode, one, other, alpha=alpha)
    if isinstance(total, SparseRows):
        return mode.put(one, total)
    return one.copy_(total)


def _scaled(function: Callable[..., Tensor]) -> Callable[..., SparseRows]:
    """What an operation with a number does to the values."""

    def rule(mode: SparseGradients, gradient: Tensor, *numbers: object) -> SparseRows:
        if any(isinstance(tensor, Tensor) and tensor.dim() for tensor in (gradient, *numbers)[1:]):
            raise refused_sparse("multiplies or divides a sparse tensor by one that has dims")
        rows = mode.rows_of(gradient)
        return rows.with_values(function(rows.values, *numbers))

    return rule


def _scaled_in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    outside = _scaled(function)

    def rule(mode: SparseGradients, gradient: Tensor, *numbers: object) -> Tensor:
        rows = mode.rows_of(gradient)
        rows.values.copy_(outside(mode, gradient, *numbers).values)
        return gradient

    return rule


def _same(mode: SparseGradients, gradient: Tensor, *_: object, **__: object) -> SparseRows:
    return mode.rows_of(gradient)


def _cloned(mode: SparseGradients, gradient: Tensor, **_: object) -> SparseRows:
    rows = mode.rows_of(gradient)
    return replace(rows, indices=rows.indices.clone(), values=rows.values.clone())


def _cleared(mode: SparseGradients, gradient: Tensor) -> Tensor:
    """What ``zero_()`` leaves: no rows."""
    _, rows = mode._known[id(gradient)]
    if not rows.known:
        raise refused_sparse("clears a sparse gradient with zero_()", "zero_grad(set_to_none=True)")
    return mode.put(gradient, replace(rows, indices=rows.indices[:, :0], values=rows.values[:0]))


_RULES: Mapping[object, Callable[..., object]] = {
    aten.add.Tensor: _sum,
    aten.add_.Tensor: _sum_in_place,
    aten.mul.Tensor: _scaled(torch.mul),
    aten.mul.Scalar: _scaled(torch.mul),
    aten.div.Tensor: _scaled(torch.div),
    aten.div.Scalar: _scaled(torch.div),
    aten.neg.default: _scaled(torch.neg),
    aten.mul_.Tensor: _scaled_in_place(torch.mul),
    aten.mul_.Scalar: _scaled_in_place(torch.mul),
    aten.div_.Tensor: _scaled_in_place(torch.div),
    aten.div_.Scalar: _scaled_in_place(torch.div),
    aten.neg_.default: _scaled_in_place(torch.neg),
    aten.clone.default: _cloned,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.zero_.default: _cleared,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._indices.default: lambda mode, gradient: mode.rows_of(gradient).indices,
    aten._values.default: lambda mode, gradient: mode.rows_of(gradient).values,
    aten._nnz.default: lambda mode, gradient: mode.rows_of(gradient).values.shape[0],
    aten._to_dense.default: lambda mode, gradient, *_, **__: mode.rows_of(gradient).dense(),
}
"""By operation on a sparse tensor, what it does to its rows."""
