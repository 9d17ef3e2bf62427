"""One small call of every operation people train with, forward and backward.

``docs/operators.md`` is made from this table, and ``test_operators.py`` runs it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten
Make = Callable[[], Tensor]


@dataclass(frozen=True)
class Sample:
    """``fn`` of fresh ``inputs``, and the gradients of every floating result to every floating
    input unless ``grad`` is false."""

    family: str
    name: str
    fn: Callable[..., Any]
    inputs: tuple[Make, ...]
    grad: bool = True
    rtol: float = 1e-4
    atol: float = 1e-5

    def program(self) -> Callable[..., list[Tensor]]:
        """A function of the inputs alone that returns results and gradients."""
        return _with_gradients(self.fn) if self.grad else lambda *x: _tensors(self.fn(*x))

    def make(self) -> list[Tensor]:
        return [make() for make in self.inputs]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    def run(*inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = _tensors(fn(*leaves))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        slopes = [out for out in outputs if out.requires_grad]
        weights = [out.detach() * 0.37 + 0.5 for out in slopes]
        grads = torch.autograd.grad(slopes, wanted, weights, allow_unused=True) if slopes else ()
        return [*(out.detach() for out in outputs), *(g for g in grads if g is not None)]

    return run


def normal(*shape: int) -> Make:
    return lambda: torch.randn(shape)


def away(*shape: int) -> Make:
    """Between 0.1 and 0.9 of either sign: away from kinks and poles."""
    return lambda: (torch.rand(shape) * 0.8 + 0.1) * (torch.randint(2, shape) * 2 - 1)


def positive(*shape: int) -> Make:
    return lambda: torch.rand(shape) * 0.8 + 0.1


def whole(high: int, *shape: int, low: int = 0) -> Make:
    return lambda: torch.randint(low, high, shape)


def distinct(*shape: int) -> Make:
    """All elements different, so that an order has one answer."""
    count = math.prod(shape)
    return lambda: torch.randperm(count).reshape(shape).to(torch.float32) / max(count, 1)


def truth(*shape: int) -> Make:
    return lambda: torch.rand(shape) > 0.5


@dataclass
class _Table:
    samples: list[Sample] = field(default_factory=list)
    family: str = ""

    def __call__(self, name: str, fn: Callable[..., Any], *inputs: Make, **options: Any) -> None:
        self.samples.append(Sample(self.family, name, fn, inputs, **options))


_add = _Table()


def _pointwise() -> None:
    _add.family = "pointwise"
    anywhere = [
        "abs",
        "neg",
        "exp",
        "expm1",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sinh",
        "cosh",
        "sigmoid",
        "erf",
        "erfc",
        "square",
        "atan",
        "asinh",
        "exp2",
        "sgn",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "frac",
        "sinc",
        "deg2rad",
        "rad2deg",
        "logit_",
        "softplus",
        "nan_to_num",
        "isnan",
        "isinf",
        "isfinite",
        "isposinf",
        "isneginf",
        "logical_not",
        "signbit",
        "relu",
        "erfinv",
        "lgamma",
        "digamma",
        "asin",
        "acos",
        "atanh",
        "log1p",
        "i0",
    ]
    for name in anywhere:
        if hasattr(torch, name):
            _add(name, getattr(torch, name), away(3, 7))
    for name in ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "logit"):
        _add(name, getattr(torch, name), positive(3, 7))
    _add("acosh", torch.acosh, lambda: torch.rand(3, 7) + 1.5)
    for name in (
        "silu", "mish", "hardswish", "hardsigmoid", "leaky_relu", "elu", "selu", "celu",
        "softplus", "logsigmoid", "hardtanh", "gelu", "relu6", "softsign", "tanhshrink",
        "softshrink", "hardshrink", "glu",
    ):  # fmt: skip
        _add(name, getattr(F, name), normal(3, 8))
    _add("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), normal(3, 7))
    _add("threshold", lambda x: F.threshold(x, 0.1, 20.0), normal(3, 7))
    _add("prelu", F.prelu, normal(3, 5, 4), normal(5))
    _add("prelu, one slope", F.prelu, normal(3, 5), normal(1))
    _add("rrelu in evaluation", lambda x: F.rrelu(x, training=False), normal(3, 5))
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "fmax", "atan2",
                 "hypot", "copysign", "logaddexp", "logaddexp2", "remainder", "fmod", "xlogy",
                 "fmin"):  # fmt: skip
        _add(name, getattr(torch, name), away(3, 1, 5), positive(4, 1))
    for name in ("floor_divide", "heaviside"):
        _add(name, getattr(torch, name), away(3, 1, 5), positive(4, 1), grad=False)
    _add("pow", torch.pow, positive(3, 4), normal(4))
    _add("pow of a number", lambda x: [x**3, x**2.5, 2.0**x, x**-2, x**0], positive(3, 4))
    _add("float_power", lambda x: torch.float_power(x, 2.5), positive(3, 4))
    _add("addcmul, addcdiv, lerp", lambda x, y: [
        torch.addcmul(x, x, y, value=0.5), torch.addcdiv(x, x, y, value=0.5), x.lerp(y, 0.3),
        torch.lerp(x, y, y),
    ], positive(3, 4), positive(4))  # fmt: skip
    _add("comparisons", lambda x, y: [x > y, x >= y, x < y, x <= y, x == y, x != y, x > 0],
         normal(3, 4), normal(4))  # fmt: skip
    _add("isclose", lambda x, y: torch.isclose(x, y), normal(3, 4), normal(4))
    _add("clamp", lambda x, y: [x.clamp(-0.5, 0.5), x.clamp(min=y), x.clamp(y, y + 1)],
         normal(3, 4), normal(4))  # fmt: skip
    _add("where", lambda c, x, y: [torch.where(c, x, y), torch.where(c, x, 0.0)],
         truth(3, 4), normal(3, 4), normal(4))  # fmt: skip
    _add("masked_fill", lambda x, m, v: [x.masked_fill(m, -1.0), x.masked_fill(m, v)],
         normal(3, 4), truth(4), normal())  # fmt: skip
    _add("logical", lambda a, b: [a & b, a | b, a ^ b, ~a, torch.logical_xor(a, b)],
         truth(3, 4), truth(4))  # fmt: skip
    _add("whole numbers", lambda x, y: [
        x + y, x - y, x * y, x // y, x % y, x / y, x & y, x | y, x ^ y, ~x, x**2, -x, abs(x),
        torch.div(x, y, rounding_mode="trunc"), x << 2, x >> 1, torch.gcd(x, y), torch.sign(x),
        x.clamp(-2, 2), torch.bitwise_left_shift(y, 1), x.float(), x > y,
    ], whole(9, 3, 4, low=-9), whole(9, 4, low=1))  # fmt: skip
    _add("conversions", lambda x: [
        x.double(), x.half(), x.bfloat16(), x.int(), x.long(), x.to(torch.int8), x.bool(),
        x.to(torch.uint8),
    ], lambda: torch.rand(3, 5) * 9)  # fmt: skip
    _add("nextafter", torch.nextafter, normal(3), normal(3), grad=False)


def _reductions() -> None:
    _add.family = "reductions"
    for name in ("sum", "mean", "amax", "amin", "prod", "logsumexp", "var", "std", "norm",
                 "nansum", "nanmean", "softmax", "log_softmax"):  # fmt: skip
        _add(f"{name} of a dim", lambda x, f=getattr(torch, name): f(x, dim=1), distinct(3, 5, 4))  # noqa: B008
    for name in ("sum", "mean", "prod", "var", "std", "norm", "max", "min", "median"):
        _add(f"{name} of all", lambda x, f=getattr(torch, name): f(x), distinct(3, 5, 4))  # noqa: B008
    for name in ("max", "min", "median", "mode", "kthvalue", "cummax", "cummin"):
        extra = (2, 1) if name == "kthvalue" else (1,)
        _add(f"{name} with indices", lambda x, f=getattr(torch, name), e=extra: f(x, *e),  # noqa: B008
             distinct(3, 5, 4))  # fmt: skip
    _add("amax, amin of all", lambda x: [x.amax(), x.amin((0, 2))], distinct(3, 5, 4))
    _add("aminmax", lambda x: torch.aminmax(x, dim=1), distinct(3, 5))
    _add("argmax, argmin", lambda x: [x.argmax(), x.argmin(1), x.argmax(0, True)], distinct(3, 5))
    _add("any, all", lambda x: [x.any(), x.any(1), x.all(0), x.all(), x.any((0, 1))], truth(3, 5))
    _add("any, all of numbers", lambda x: [x.any(1), x.all(0), (x > 0).sum(1)], whole(3, 3, 5))
    _add("count_nonzero", lambda x: [x.count_nonzero(), x.count_nonzero(1)], whole(2, 3, 5))
    _add("prod with a zero", lambda x: (x * (x > 0.3)).prod(1), positive(3, 5))
    _add("var_mean, std_mean", lambda x: [*torch.var_mean(x, 1), *torch.std_mean(x, 0)],
         normal(5, 4))  # fmt: skip
    _add("vector norms", lambda x: [
        torch.linalg.vector_norm(x, order, 1) for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf)
    ], away(3, 5))  # fmt: skip
    _add("matrix norm", lambda x: torch.linalg.matrix_norm(x), normal(3, 5))
    _add("normalize", lambda x: [F.normalize(x), F.normalize(x, 1.0)], away(3, 5))
    _add("cosine_similarity", F.cosine_similarity, normal(3, 5), normal(3, 5))
    _add("pairwise_distance", F.pairwise_distance, normal(3, 5), normal(3, 5))
    _add("cdist", torch.cdist, normal(3, 5), normal(4, 5))
    _add("cumsum", lambda x: x.cumsum(1), normal(3, 5))
    _add("cumprod", lambda x: x.cumprod(1), away(3, 5))
    _add("logcumsumexp", lambda x: x.logcumsumexp(1), normal(3, 5))
    _add("softmin, gumbel-free", lambda x: F.softmin(x, 1), normal(3, 5))
    _add("trace", torch.trace, normal(4, 4))
    _add("sort", lambda x: x.sort(1), distinct(3, 5))
    _add(
        "stable sort", lambda x: torch.sort(x, dim=1, stable=True, descending=True), distinct(3, 5)
    )
    _add("topk", lambda x: x.topk(2, 1), distinct(3, 5))
    _add("argsort", lambda x: x.argsort(1), distinct(3, 5))
    _add("quantile", lambda x: x.quantile(0.3, 1), distinct(3, 5))
    _add("searchsorted, bucketize", lambda x, y: [
        torch.searchsorted(x.cumsum(0), y), torch.bucketize(y, x.cumsum(0))
    ], positive(5), positive(3), grad=False)  # fmt: skip
    _add("histc", lambda x: torch.histc(x, 4, 0, 1), positive(9), grad=False)
    _add("bincount weights", lambda x: torch.zeros(5).scatter_add(0, x, torch.ones(7)), whole(5, 7))


def _shapes() -> None:
    _add.family = "shapes and indexing"
    _add("views", lambda x: [
        x.view(5, 6), x.t() if x.ndim == 2 else x.mT, x.permute(2, 0, 1), x[:, 1:, ::2], x[1],
        x.unsqueeze(1), x.squeeze(), x.expand(2, 3, 5, 2), x.flatten(1), x.unflatten(1, (5, 1)),
        *x.split(2, 1), *x.chunk(2, 0), *x.unbind(2), x.diagonal(0, 0, 2), x.movedim(0, 2),
        x.unfold(1, 3, 1), x.narrow(1, 1, 2), x.transpose(0, 1).reshape(-1),
        x.as_strided((2, 3), (1, 2), 1), *x.tensor_split(2, 1), x.swapaxes(0, 2),
    ], normal(3, 5, 2))  # fmt: skip
    _add("joins", lambda x, y: [
        torch.cat([x, y], 1), torch.stack([x, x], 1), torch.hstack([x, y]), torch.vstack([x, x]),
        torch.block_diag(x, y), torch.cat([x.double(), y], 1),
    ], normal(3, 4), normal(3, 2))  # fmt: skip
    _add("repeat, tile", lambda x: [x.repeat(2, 3), x.tile(2, 1), x.repeat_interleave(3, 1)],
         normal(3, 4))  # fmt: skip
    _add("repeat_interleave by a tensor", lambda x, n: x.repeat_interleave(n, 0, output_size=6),
         normal(3, 4), lambda: torch.tensor([1, 2, 3]))  # fmt: skip
    _add("flip, roll, rot90", lambda x: [
        x.flip(0, 1), x.roll(1, 0), x.roll(2), x.roll((1, 2), (0, 1)), x.rot90(),
    ], normal(3, 4))  # fmt: skip
    _add("tril, triu", lambda x: [x.tril(), x.triu(1), x.tril(-1)], normal(3, 4))
    _add("tril_indices", lambda x: x[tuple(torch.tril_indices(3, 3))], normal(3, 3))
    _add("diag, diag_embed", lambda x: [x.diag(), x.diag_embed(), torch.diagflat(x)], normal(4))
    _add("meshgrid, outer, kron", lambda x, y: [
        *torch.meshgrid(x, y, indexing="ij"), torch.outer(x, y), torch.kron(x, y),
    ], normal(3), normal(4))  # fmt: skip
    _add("pad constant", lambda x: [F.pad(x, (1, 2)), F.pad(x, (0, -1, 2, 0), value=3.0)],
         normal(2, 3, 5))  # fmt: skip
    for mode in ("reflect", "replicate", "circular"):
        _add(f"pad {mode} 1d", lambda x, m=mode: F.pad(x, (1, 2), m), normal(2, 3, 5))
        _add(f"pad {mode} 2d", lambda x, m=mode: F.pad(x, (1, 2, 2, 0), m), normal(2, 3, 5, 4))
        _add(f"pad {mode} 3d", lambda x, m=mode: F.pad(x, (1, 1, 1, 0, 0, 1), m),
             normal(1, 2, 3, 4, 3))  # fmt: skip
    _add("gather", lambda x, i: x.gather(1, i), normal(3, 5), whole(5, 3, 4))
    _add("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), normal(3, 5), whole(5, 3, 4))
    _add("take", torch.take, normal(3, 5), whole(15, 4))
    _add("index_select", lambda x, i: x.index_select(1, i), normal(3, 5), whole(5, 4))
    _add("indexing", lambda x, i: [x[i], x[:, i], x[i, i], x[i[:, None], i], x[-1, i]],
         normal(5, 5, 2), whole(5, 3))  # fmt: skip
    _add("indexing by a mask, in place", _mask_assign, normal(3, 5), truth(3, 5))
    _add(
        "index_put", lambda x, i, v: x.index_put((i,), v), normal(5, 3), _places(4, 5), normal(4, 3)
    )
    _add("index_put, accumulate", lambda x, i, v: x.index_put((i,), v, accumulate=True),
         normal(5, 3), whole(5, 4), normal(4, 3))  # fmt: skip
    _add("index_add", lambda x, i, v: x.index_add(0, i, v, alpha=0.5), normal(5, 3), whole(5, 4),
         normal(4, 3))  # fmt: skip
    _add("index_copy", lambda x, i, v: x.index_copy(0, i, v), normal(5, 3), _places(4, 5),
         normal(4, 3))  # fmt: skip
    _add("index_fill", lambda x, i: x.index_fill(0, i, 2.0), normal(5, 3), whole(5, 2))
    _add("index_reduce", lambda x, i, v: x.index_reduce(0, i, v, "amax"), normal(5, 3),
         whole(5, 4), normal(4, 3), grad=False)  # fmt: skip
    _add("scatter", lambda x, i, v: [x.scatter(1, i, v), x.scatter(1, i, 2.0)], normal(3, 5),
         lambda: torch.stack([torch.randperm(5)[:2] for _ in range(3)]), normal(3, 2))  # fmt: skip
    _add("scatter_add", lambda x, i, v: x.scatter_add(1, i, v), normal(3, 5), whole(5, 3, 4),
         normal(3, 4))  # fmt: skip
    for how in ("sum", "prod", "mean", "amax", "amin"):
        _add(f"scatter_reduce {how}", lambda x, i, v, h=how: x.scatter_reduce(1, i, v, h),
             distinct(3, 5), whole(5, 3, 4), positive(3, 4))  # fmt: skip
    _add("slice_scatter, select_scatter, diagonal_scatter", lambda x, y: [
        torch.slice_scatter(x, y[:2], 0, 1, 3), torch.select_scatter(x, y[0], 0, 2),
        torch.diagonal_scatter(x, y[0]), torch.as_strided_scatter(x, y[0], (4,), (1,), 2),
    ], normal(4, 4), normal(4, 4))  # fmt: skip
    _add("masked_scatter", lambda x, m, v: x.masked_scatter(m, v), normal(3, 5), truth(3, 5),
         normal(3, 5))  # fmt: skip
    _add("one_hot", lambda x: F.one_hot(x, 5), whole(5, 3, 2))
    _add("embedding", lambda i, w: F.embedding(i, w), whole(7, 2, 3), normal(7, 4))
    _add("embedding, padding", lambda i, w: F.embedding(i, w, padding_idx=1), whole(7, 2, 3),
         normal(7, 4))  # fmt: skip
    for mode in ("sum", "mean", "max"):
        _add(f"embedding_bag {mode}", lambda i, w, m=mode: F.embedding_bag(i, w, mode=m),
             whole(7, 2, 3), distinct(7, 4))  # fmt: skip
    _add("unfold, fold", lambda x: F.fold(F.unfold(x, 2, padding=1), (5, 4), 3, padding=1, stride=1)
         if False else [F.unfold(x, 2, padding=1), F.fold(F.unfold(x, 2), (5, 4), 2)],
         normal(2, 3, 5, 4))  # fmt: skip
    _add("pixel_shuffle", lambda x: [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)],
         normal(1, 4, 4, 6))  # fmt: skip
    _add("channel_shuffle", lambda x: F.channel_shuffle(x, 2), normal(1, 4, 3, 2))
    _add("creation", lambda x: [
        torch.arange(7), torch.arange(1.0, 3.0, 0.5), torch.linspace(0, 1, 5), torch.eye(3, 4),
        torch.full((2, 3), 1.5), torch.zeros(3), torch.ones_like(x), x.new_zeros(2),
        torch.logspace(0, 1, 4), torch.linspace(0, 9, 4, dtype=torch.int64),
    ], normal(3))  # fmt: skip
    _add("broadcast_to, expand_as", lambda x, y: [x.broadcast_to(3, 4), x.expand_as(y)],
         normal(4), normal(3, 4))  # fmt: skip


def _mask_assign(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask] = 0.0
    return torch.index_put(y, (mask,), torch.tensor(2.0)) * x


def _places(count: int, extent: int) -> Make:
    return lambda: torch.randperm(extent)[:count]


def _networks() -> None:
    _add.family = "layers"
    _add("linear", F.linear, normal(3, 5), normal(4, 5), normal(4))
    _add("linear of 3 dims", F.linear, normal(2, 3, 5), normal(4, 5), normal(4))
    _add("matmul, bmm, mv, dot", lambda x, y, v: [x @ y, x[None] @ y[None], x @ v, v @ v],
         normal(3, 5), normal(5, 4), normal(5))  # fmt: skip
    _add("addmm, baddbmm, addmv, addbmm", lambda b, x, y: [
        torch.addmm(b, x, y, beta=0.5, alpha=2), torch.baddbmm(b[None], x[None], y[None]),
        torch.addmv(b[:, 0], x, y[:, 0]), torch.addbmm(b, x[None], y[None]),
    ], normal(3, 4), normal(3, 5), normal(5, 4))  # fmt: skip
    _add("einsum, tensordot", lambda x, y: [
        torch.einsum("bij,bkj->bik", x, y), torch.tensordot(x, y, ([2], [2])),
    ], normal(2, 3, 5), normal(2, 4, 5))  # fmt: skip
    _add("bilinear", F.bilinear, normal(3, 5), normal(3, 4), normal(2, 5, 4), normal(2))
    _add("conv1d", lambda x, w, b: F.conv1d(x, w, b, 2, 1), normal(2, 3, 9), normal(4, 3, 3),
         normal(4))  # fmt: skip
    _add("conv2d", lambda x, w, b: F.conv2d(x, w, b, 2, 1), normal(2, 3, 9, 7),
         normal(4, 3, 3, 3), normal(4))  # fmt: skip
    _add("conv2d, grouped", lambda x, w: F.conv2d(x, w, groups=2), normal(2, 4, 6, 5),
         normal(4, 2, 3, 3))  # fmt: skip
    _add("conv3d", lambda x, w, b: F.conv3d(x, w, b), normal(1, 2, 4, 5, 4), normal(3, 2, 2, 2, 2),
         normal(3))  # fmt: skip
    _add("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, 2), normal(2, 3, 5),
         normal(3, 4, 3), normal(4))  # fmt: skip
    _add("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), normal(2, 3, 5, 4),
         normal(3, 4, 3, 3), normal(4))  # fmt: skip
    _add("conv_transpose3d", lambda x, w: F.conv_transpose3d(x, w), normal(1, 2, 3, 3, 3),
         normal(2, 3, 2, 2, 2))  # fmt: skip
    for rank, size in ((1, (9,)), (2, (9, 7)), (3, (5, 6, 7))):
        shape = (2, 3, *size)
        for name in ("max_pool", "avg_pool"):
            pool = getattr(F, f"{name}{rank}d")
            _add(f"{name}{rank}d", lambda x, p=pool: p(x, 3, 2, 1), distinct(*shape))
            _add(f"{name}{rank}d, ceil mode", lambda x, p=pool: p(x, 2, 2, 0, ceil_mode=True),
                 distinct(*shape))  # fmt: skip
        for name in ("adaptive_avg_pool", "adaptive_max_pool"):
            pool = getattr(F, f"{name}{rank}d")
            for out in (1, 3):
                _add(f"{name}{rank}d to {out}", lambda x, p=pool, n=out: p(x, n), distinct(*shape))
    _add("avg_pool2d, no padding counted", lambda x: F.avg_pool2d(
        x, 3, 2, 1, count_include_pad=False), normal(2, 3, 9, 7))  # fmt: skip
    _add("avg_pool2d, divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3),
         normal(2, 3, 6, 4))  # fmt: skip
    _add("max_pool2d, dilated", lambda x: F.max_pool2d(x, 2, 1, dilation=2), distinct(2, 3, 9, 7))
    _add("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), positive(2, 3, 6, 4))
    _add("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
         distinct(1, 2, 4, 6))  # fmt: skip
    for mode, rank in (
        ("nearest", 1),
        ("nearest", 2),
        ("nearest", 3),
        ("nearest-exact", 2),
        ("linear", 1),
        ("bilinear", 2),
        ("bicubic", 2),
        ("trilinear", 3),
    ):
        shape = (1, 2, *(4, 5, 3)[:rank])
        _add(f"interpolate {mode} {rank}d", lambda x, m=mode: F.interpolate(
            x, scale_factor=2, mode=m), normal(*shape))  # fmt: skip
    _add("interpolate to a size", lambda x: [
        F.interpolate(x, (3, 7)), F.interpolate(x, (3, 7), mode="bilinear", align_corners=True),
    ], normal(1, 2, 4, 5))  # fmt: skip
    _add("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), normal(1, 2, 4, 5),
         away(1, 3, 3, 2))  # fmt: skip
    _add("affine_grid", lambda t: F.affine_grid(t, [1, 2, 3, 4], align_corners=False),
         normal(1, 2, 3))  # fmt: skip
    _add("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), normal(2, 3, 5), normal(5),
         normal(5))  # fmt: skip
    _add("rms_norm", lambda x, w: F.rms_norm(x, (5,), w), normal(2, 3, 5), normal(5))
    _add("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), normal(2, 6, 3, 4), normal(6),
         normal(6))  # fmt: skip
    _add("group_norm, no weights", lambda x: F.group_norm(x, 3), normal(2, 6, 5))
    _add("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
         normal(2, 3, 4, 5), normal(3), normal(3))  # fmt: skip
    _add("batch_norm, training", lambda x, m, v, w, b: F.batch_norm(
        x, m.detach(), v.detach(), w, b, training=True), normal(4, 3, 5), normal(3), positive(3),
        normal(3), normal(3))  # fmt: skip
    _add("batch_norm, evaluation", lambda x, m, v, w, b: F.batch_norm(
        x, m.detach(), v.detach(), w, b), normal(4, 3, 5), normal(3), positive(3), normal(3),
        normal(3))  # fmt: skip
    _add("batch_norm, no statistics kept", lambda x: F.batch_norm(x, None, None, training=True),
         normal(4, 3, 5))  # fmt: skip
    _add("local_response_norm", lambda x: F.local_response_norm(x, 2), normal(2, 4, 5))
    _add("weight_norm", lambda v, g: torch._weight_norm(v, g), normal(3, 5), positive(3, 1))
    for name, layer in (("rnn", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)):
        _add(name, _recurrent(layer), normal(3, 2, 4), normal(3))
    _add("rnn cells", _cells(), normal(2, 4))
    _add("multi-head attention", _attention(), normal(3, 2, 8))
    _add("scaled_dot_product_attention", lambda q, k, v: [
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v),
    ], normal(2, 2, 5, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8))  # fmt: skip
    _add(
        "attention with a mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
        truth(5, 5),
        atol=1e-4,
    )
    _add(
        "attention with grouped heads",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        normal(2, 4, 5, 8),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
    )
    _add("fft", lambda x: torch.fft.irfft(torch.fft.rfft(x)), normal(3, 8))
    _add("linalg solve", lambda a, b: torch.linalg.solve(a + 5 * torch.eye(3), b), normal(3, 3),
         normal(3, 2), grad=False)  # fmt: skip


def _recurrent(layer: Any) -> Callable[..., Any]:
    module = layer(4, 3, num_layers=2, bidirectional=True)

    def run(x: Tensor, scale: Tensor) -> list[Tensor]:
        weights = {name: each.detach() * scale.mean() for name, each in module.named_parameters()}
        outputs, _ = torch.func.functional_call(module, weights, (x,))
        return [outputs]

    return run


def _cells() -> Callable[..., Any]:
    cells = (nn.RNNCell(4, 3), nn.GRUCell(4, 3), nn.LSTMCell(4, 3))
    for cell in cells:
        cell.requires_grad_(False)
    return lambda x: [cells[0](x), cells[1](x), *cells[2](x)]


def _attention() -> Callable[..., Any]:
    module = nn.MultiheadAttention(8, 2).requires_grad_(False)
    return lambda x: module(x, x, x)[0]


def _losses() -> None:
    _add.family = "losses"
    for reduction in ("mean", "sum", "none"):
        _add(f"cross_entropy {reduction}", lambda x, t, r=reduction: F.cross_entropy(
            x, t, reduction=r), normal(4, 5), whole(5, 4))  # fmt: skip
        _add(f"cross_entropy weighted {reduction}", lambda x, t, w, r=reduction: F.cross_entropy(
            x, t, w.detach(), reduction=r, ignore_index=1), normal(4, 5), whole(5, 4),
            positive(5))  # fmt: skip
        _add(f"cross_entropy smoothed {reduction}", lambda x, t, w, r=reduction: [F.cross_entropy(
            x, t, label_smoothing=0.1, reduction=r), F.cross_entropy(
            x, t, w.detach(), label_smoothing=0.1, reduction=r, ignore_index=2)],
            normal(4, 5), whole(5, 4), positive(5))  # fmt: skip
    _add("cross_entropy of images", lambda x, t, w: [F.cross_entropy(x, t), F.cross_entropy(
        x, t, w.detach(), ignore_index=0)], normal(2, 5, 3, 4), whole(5, 2, 3, 4),
        positive(5))  # fmt: skip
    _add("cross_entropy of probabilities", lambda x, t: F.cross_entropy(
        x, t.detach().softmax(1)), normal(4, 5), normal(4, 5))  # fmt: skip
    _add("nll_loss of one", lambda x, t: F.nll_loss(x, t), normal(5), whole(5))
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                 "poisson_nll_loss"):  # fmt: skip
        for reduction in ("mean", "sum", "none"):
            _add(f"{name} {reduction}", lambda x, y, f=getattr(F, name), r=reduction: f(  # noqa: B008
                x, y.detach(), reduction=r), normal(3, 5), normal(3, 5))  # fmt: skip
    _add("binary_cross_entropy", lambda x, y, w: [
        F.binary_cross_entropy(x, y.detach()),
        F.binary_cross_entropy(x, y.detach(), w.detach(), reduction="sum"),
    ], positive(3, 5), positive(3, 5), positive(5))  # fmt: skip
    _add("binary_cross_entropy_with_logits", lambda x, y, w: [
        F.binary_cross_entropy_with_logits(x, y.detach()),
        F.binary_cross_entropy_with_logits(x, y.detach(), w.detach(), pos_weight=w.detach()),
    ], normal(3, 5), positive(3, 5), positive(5))  # fmt: skip
    _add("kl_div", lambda x, y: [
        F.kl_div(x, y.detach(), reduction="batchmean"),
        F.kl_div(x, y.detach().log(), log_target=True, reduction="sum"),
    ], normal(3, 5), positive(3, 5))  # fmt: skip
    _add("cosine_embedding_loss", lambda x, y, t: F.cosine_embedding_loss(
        x, y, t * 2 - 1), normal(3, 5), normal(3, 5), whole(2, 3))  # fmt: skip
    _add("margin losses", lambda x, y, t: [
        F.margin_ranking_loss(x, y, t * 2 - 1, margin=0.3), F.hinge_embedding_loss(x, t * 2 - 1),
        F.triplet_margin_loss(x[:, None], y[:, None], x[:, None] * y[:, None]),
    ], normal(4), normal(4), whole(2, 4))  # fmt: skip
    _add("multi_margin_loss", F.multi_margin_loss, normal(3, 5), whole(5, 3))
    _add("multilabel losses", lambda x, t: [
        F.multilabel_soft_margin_loss(x, (t > 1).float()), F.multilabel_margin_loss(x, t)
    ], normal(3, 5), whole(5, 3, 5))  # fmt: skip
    _add("gaussian_nll_loss", lambda x, y, v: F.gaussian_nll_loss(x, y.detach(), v), normal(3, 5),
         normal(3, 5), positive(3, 5))  # fmt: skip
    _add("ctc_loss", lambda x, t: F.ctc_loss(
        x.log_softmax(2), t, [6, 6], [3, 2]), normal(6, 2, 5), whole(5, 2, 3, low=1))  # fmt: skip


def _random() -> None:
    _add.family = "random numbers"
    _add("rand, randn, randint, randperm", lambda x: [
        torch.rand(3), torch.randn(3), torch.randint(9, (4,)), torch.randperm(5),
        torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 7),
        torch.randint_like(x, 2, 7), torch.randint(2, 9, (4,)),
    ], normal(3, 4))  # fmt: skip
    _add("bernoulli", lambda x: [torch.bernoulli(x), torch.bernoulli(x, 0.3)], positive(3, 4),
         grad=False)  # fmt: skip
    _add("multinomial", lambda x: torch.multinomial(x, 2), positive(3, 4))
    _add("normal, uniform, exponential", lambda x: [
        torch.normal(x, x.abs()), torch.normal(0.0, 1.0, (3,)),
        torch.empty(3).uniform_(), torch.empty(3).normal_(), torch.empty(3).exponential_(),
    ], positive(3, 4), grad=False)  # fmt: skip
    _add("dropout", lambda x: F.dropout(x, 0.3), normal(5, 4))
    _add("dropout of channels", lambda x: [F.dropout1d(x, 0.3), F.alpha_dropout(x, 0.3, True)],
         normal(5, 4, 3))  # fmt: skip
    _add("native_dropout", lambda x: torch.native_dropout(x, 0.3, True), normal(5, 4))
    _add("rrelu", lambda x: F.rrelu(x, training=True), normal(5, 4))
    _add("gumbel_softmax", lambda x: F.gumbel_softmax(x), normal(5, 4))
    _add("poisson", torch.poisson, positive(5, 4), grad=False)
    _add("attention with dropout", lambda q: F.scaled_dot_product_attention(
        q, q, q, dropout_p=0.2), normal(2, 2, 5, 8))  # fmt: skip


def _lists() -> None:
    _add.family = "lists (foreach)"
    _add("arithmetic", lambda x, y: [
        *torch._foreach_add([x, y], 2.0), *torch._foreach_mul([x, y], [2.0, 3.0]),
        *torch._foreach_sub([x, y], [x, y], alpha=0.5), *torch._foreach_div([x, y], 3.0),
        *torch._foreach_sqrt([x, y]), *torch._foreach_lerp([x, y], [y, x], 0.1),
        *torch._foreach_addcmul([x, y], [x, y], [x, y], 0.5), *torch._foreach_norm([x, y]),
        *torch._foreach_maximum([x, y], 0.3), *torch._foreach_pow([x, y], 2.0),
        *torch._foreach_reciprocal([x, y]), *torch._foreach_neg([x, y]),
        *torch._foreach_clamp_min([x, y], 0.2), *torch._foreach_sign([x, y]),
        *torch._foreach_max([x, y]),
    ], positive(3), positive(3), grad=False)  # fmt: skip


for _fill in (_pointwise, _reductions, _shapes, _networks, _losses, _random, _lists):
    _fill()

SAMPLES: tuple[Sample, ...] = tuple(_add.samples)
