"""Every pass that puts a kernel in the place of others, with awkward values of each argument."""

import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import treadle.passes
from testing import trace
from treadle.compiler.cleaning import CLEAN, rewritten
from treadle.graph.analysis.execute import run_step
from treadle.graph.rewrite.passes import GraphPass
from treadle.lower.elements import Elements
from treadle.passes.attention.fuse import FuseAttention
from treadle.passes.attention.proved_masks import ProveAttentionMasks
from treadle.passes.chunks import chunked_loss
from treadle.passes.chunks.chunked_loss import ChunkLoss
from treadle.passes.convolutions.bias import SplitConvolutionBias
from treadle.passes.convolutions.channels_last import ConvolveChannelsLast
from treadle.passes.convolutions.depthwise import ConvolveDepthwiseGradient
from treadle.passes.convolutions.statistics import NormaliseFromStatistics
from treadle.passes.dropout import ExpandDropout
from treadle.passes.products.batching import BatchProducts
from treadle.passes.products.joined_products import JoinProducts
from treadle.passes.products.narrow_weights import FoldWeightCast, ScaleInProduct
from treadle.passes.products.sums import AccumulateProducts, AddBiasInProduct, SplitBias
from treadle.passes.products.written_out import MULTIPLY_WRITTEN_OUT

aten = torch.ops.aten
PROVE = ProveAttentionMasks(Elements)
INF, NAN = math.inf, math.nan
NUMBERS = (1.0, 0.0, -0.0, 2.0, -0.5, 1e-46, 1e30, INF, -INF, NAN)
"""For a factor; the first one lets the exchange happen."""
MODERATE = tuple(each for each in NUMBERS if each != 1e30)
"""For scores: of huge ones the kernels' gradients are rough, for they keep a sum's logarithm."""


@dataclass(frozen=True)
class Exchange:
    """A pass with programs of one argument's values; ``ordinary`` is one that it replaces."""

    each: GraphPass
    program: Callable[..., Callable[..., Any]]
    inputs: Callable[..., tuple[Tensor, ...]]
    ordinary: dict[str, Any]
    awkward: dict[str, tuple[Any, ...]]
    rtol: float = 1e-4
    cleans: bool = False

    def cases(self) -> Iterator[dict[str, Any]]:
        yield self.ordinary
        for name, values in self.awkward.items():
            for value in values:
                yield self.ordinary | {name: value}


def attention_inputs(dtype=torch.float32, rows=6, columns=6, heads=2, **_: Any):
    shapes = [(2, 2, rows, 8), (2, heads, columns, 8), (2, heads, columns, 8)]
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def gradients(run: Callable[..., Tensor]) -> Callable[..., Any]:
    """The result of ``run`` with the gradients of all its inputs."""

    def program(q, k, v):
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        result = run(*leaves)
        return (result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result)))

    return program


def masked_call(scale=0.5, dropout_p=0.0, heads=2, never=-INF, window=99, **_: Any):
    def run(q, k, v):
        rows, columns = (torch.arange(each.shape[2]) for each in (q, k))
        apart = rows[:, None] - columns[None]
        zero, below = (torch.full((), each, dtype=q.dtype) for each in (0.0, never))
        bias = torch.where((apart >= 0) & (apart < window), zero, below)
        return F.scaled_dot_product_attention(
            q, k, v, bias, dropout_p, scale=scale, enable_gqa=heads != 2
        )

    return gradients(run)


def written_out(factor=0.5, division=1.0, alpha=1.0, fill=-INF, **_: Any):
    def run(q, k, v):
        scores = q @ k.transpose(-2, -1) * factor / division
        below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~below, fill)
        scores = torch.add(scores, torch.zeros_like(below, dtype=q.dtype), alpha=alpha)
        return scores.softmax(-1) @ v

    return gradients(run)


def products_inputs(value=0.5, dtype=torch.float32, rows=4, **_: Any):
    a, b, c, d = (torch.randn(s) for s in ((rows, 6), (6, 5), (rows, 3), (3, 5)))
    a[0, 0] = value
    return tuple(each.to(dtype) for each in (a, b, c, d, torch.randn(5), torch.randn(rows, 5)))


def sum_of_products(alpha=1, **_: Any):
    return lambda a, b, c, d, row, m: torch.add(a @ b, c @ d, alpha=alpha)


def biased_product(alpha=1, **_: Any):
    return lambda a, b, c, d, row, m: torch.add(a @ b, row, alpha=alpha)


def product_with_bias(alpha=1, beta=1, **_: Any):
    return lambda a, b, c, d, row, m: torch.addmm(row, a, b, alpha=alpha, beta=beta).sin()


def joined(**_: Any):
    return lambda a, b, c, d, row, m: torch.cat([a @ b, a @ (b * 2), a @ b.sin()], 1)


def batched(alpha=1, beta=1, **_: Any):
    def program(a, b, c, d, row, m):
        left = torch.addmm(m, a, b, alpha=alpha, beta=beta)
        return left.sin() * torch.addmm(m, a, b * 2, alpha=alpha, beta=beta)

    def plain(a, b, c, d, row, m):
        return (a @ b).sin() * (a @ (b * 2))

    return plain if (alpha, beta) == (1, 1) else program


def narrow_inputs(value=0.25, dtype=torch.float32, rows=1, scale=0.01, **_: Any):
    x, weight = torch.randn(rows, 64) / 64, torch.randint(-128, 128, (64, 32)).to(torch.int8)
    x[0, 0] = value
    return x.to(dtype), weight, (torch.rand(32) * scale).to(dtype)


def cast_weight(alpha=1, beta=1, **_: Any):
    if (alpha, beta) == (1, 1):
        return lambda x, w, s: x @ w.to(x.dtype)
    return lambda x, w, s: torch.addmm(s, x, w.to(x.dtype), alpha=alpha, beta=beta)


def scaled_weight(**_: Any):
    return lambda x, w, s: F.linear(x, w.to(x.dtype)) * s


def turned_inputs(**case: Any):
    x, weight, scale = narrow_inputs(**case)
    return x, weight.t().contiguous(), scale


def loss_inputs(dtype=torch.float32, target=3, weight=1.0, value=0.5, **_: Any):
    h, w = torch.randn(12, 8), torch.randn(8, 97)
    h[0, 0] = value
    targets, weights = torch.randint(97, (12,)), torch.rand(97) + 0.1
    targets[1], targets[2] = target, 5
    weights[5] = weight
    return h.to(dtype), w.to(dtype), targets, weights.to(dtype)


def loss(reduction="mean", ignore_index=-100, label_smoothing=0.0, weighted=False, **_: Any):
    def program(h, w, targets, weights):
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        kept = targets if ignore_index != "all" else torch.full_like(targets, 7)
        found = F.cross_entropy(
            h @ w, kept, weights if weighted else None, reduction=reduction,
            ignore_index=7 if ignore_index == "all" else ignore_index,
            label_smoothing=label_smoothing,
        )  # fmt: skip
        return (found.detach(), *torch.autograd.grad(found, (h, w), torch.ones_like(found)))

    return program


def dropped(p=0.5, train: bool | None = True, **_: Any):
    def program(x):
        y, mask = aten.native_dropout.default(x, p, train)
        return y, mask, aten.native_dropout_backward.default(y.sin(), mask, 1 / (1 - p or 1))

    return program


HALF = (torch.bfloat16, torch.float16, torch.float64)


def image_inputs(value=0.5, channels=16, rows=9, **_: Any):
    x, w, v = (torch.randn(s) for s in ((2, channels, rows, 7), (8, channels, 3, 3), (8, 8, 1, 1)))
    x[0, 0, 0, 0] = value
    return x.bfloat16(), (w / 12).bfloat16(), (v / 3).bfloat16()


def two_convolutions(stride=1, padding=1, dilation=1, **_: Any):
    def run(x, w, v):
        sizes = [stride, 1], [padding, 1], [1, dilation]
        y = aten.convolution(x, w, None, *sizes, False, [0, 0], 1).relu()
        return aten.convolution(y, v, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    return run


def depthwise_inputs(channels=8, rows=5, value=1.0, dtype=torch.bfloat16, size=3, **_: Any):
    x, w = torch.randn(2, channels, rows, 7), torch.randn(channels, 1, size, size) / size
    x[0, 0, 0, 0] = value
    return x.to(dtype), w.to(dtype), torch.randn(channels).to(dtype)


def depthwise(stride=1, padding=1, dilation=1, **_: Any):
    def run(x, w, b):
        y = F.conv2d(x, w, b, stride, padding, dilation, groups=x.shape[1])
        return y * y

    return gradients(run)


def norm_inputs(channels=8, size=5, value=0.5, dtype=torch.float32, **_: Any):
    x = torch.randn(2, channels, size, size)
    x[0, 0, 0, 0] = value
    return x.to(dtype), torch.randn(channels).to(dtype), torch.randn(channels).to(dtype)


def group_norm(groups=4, affine=True, **_: Any):
    return lambda x, w, b: F.group_norm(x, groups, *((w, b) if affine else ()))


def rows_and_rows(value=1.0, columns=256, inner=64, dtype=torch.float32, **_: Any):
    x, y = torch.randn(128, 1, inner), torch.randn(columns, inner)
    x[0, 0, :1] = value
    return x.to(dtype), y.to(dtype)


def pairs_of_rows(keepdim=False, **_: Any):
    return lambda x, y: (x * y).sum(-1, keepdim)


EXCHANGES = {
    "a product that is written out": Exchange(
        MULTIPLY_WRITTEN_OUT, pairs_of_rows, rows_and_rows, {},
        {"value": (INF, NAN, 1e38), "keepdim": (True,), "columns": (257,), "inner": (0, 1, 61),
         "dtype": (torch.float16, torch.float64)},
    ),
    "a depthwise derivative": Exchange(
        ConvolveDepthwiseGradient(everywhere=True), depthwise, depthwise_inputs, {"padding": 1},
        {"stride": (2,), "padding": (0, 2, 3), "dilation": (2,), "channels": (1, 3),
         "rows": (3, 4), "size": (5, 7), "value": (INF, NAN, 1e30), "dtype": HALF},
    ),
    "a convolution's bias": Exchange(
        SplitConvolutionBias(everywhere=True), depthwise, depthwise_inputs,
        {"dtype": torch.float32},
        {"stride": (2,), "padding": (0, 2), "channels": (1, 3), "value": (INF, NAN, 1e30)},
    ),
    "a norm": Exchange(
        NormaliseFromStatistics(everywhere=True), group_norm, norm_inputs, {},
        {"groups": (1, 8), "affine": (False,), "size": (1, 7), "dtype": HALF,
         "value": (INF, NAN, 1e20)},
    ),
    "convolutions": Exchange(
        ConvolveChannelsLast(everywhere=True), two_convolutions, image_inputs, {"stride": 1},
        {"stride": (2, 3), "padding": (0, 2), "dilation": (2,), "channels": (3, 8, 24),
         "rows": (3, 1), "value": (INF, NAN, 1e38)},
    ),
    "a mask that is proved": Exchange(
        PROVE, masked_call, attention_inputs, {"scale": 0.5},
        {"scale": (None, *NUMBERS), "dropout_p": (0.3, 1.0), "heads": (1,), "dtype": HALF,
         "rows": (1, 5), "columns": (1, 7), "never": (-1e4, 0.0, NAN, INF), "window": (1, 3)},
    ),
    "attention that is written out": Exchange(
        FuseAttention(everywhere=True), written_out, attention_inputs, {"factor": 0.5},
        {"factor": MODERATE, "division": MODERATE, "alpha": (2, 0), "dtype": HALF,
         "fill": (-1e4, 0.0, INF, NAN, -3e38), "rows": (1, 5), "columns": (1, 7)},
        cleans=True,
    ),
    "a sum of products": Exchange(
        AccumulateProducts(), sum_of_products, products_inputs, {},
        {"alpha": (2, 0, -1, NAN), "value": (INF, NAN, 1e38), "dtype": HALF},
    ),
    "a bias": Exchange(
        AddBiasInProduct(), biased_product, products_inputs, {},
        {"alpha": (2, 0, -1, NAN), "value": (INF, NAN, 1e38), "dtype": HALF},
    ),
    "a bias that is split off": Exchange(
        SplitBias(), product_with_bias, products_inputs, {},
        {"alpha": (2, 0, NAN), "beta": (2, 0, NAN), "value": (INF, NAN), "dtype": HALF},
    ),
    "products that are joined": Exchange(
        JoinProducts(), joined, products_inputs, {"rows": 40}, {"value": (INF, NAN), "dtype": HALF}
    ),
    "a batch of products": Exchange(
        BatchProducts(), batched, products_inputs, {},
        {"alpha": (2, 0, NAN), "beta": (2, 0, NAN), "value": (INF, NAN), "dtype": HALF},
    ),
    "a weight of few bits": Exchange(
        FoldWeightCast(), cast_weight, narrow_inputs, {},
        {"alpha": (2, 0, NAN), "beta": (2, 0, NAN), "value": (INF, NAN), "rows": (2, 7)},
    ),
    "a weight that is scaled": Exchange(
        ScaleInProduct(), scaled_weight, turned_inputs, {"dtype": torch.bfloat16},
        {"value": (INF, NAN), "scale": (0.0, -0.0, 1e-38, 1e30, NAN), "rows": (2, 7)},
        rtol=4e-2,
    ),
    "a loss in chunks": Exchange(
        ChunkLoss(most=4 * 97 * 4), loss, loss_inputs, {},
        {"reduction": ("sum", "none"), "ignore_index": (3, "all", 0, 96, 97, 10**9, -1),
         "label_smoothing": (0.1, 1.0), "weighted": (True,), "value": (INF, NAN, 1e38),
         "dtype": (torch.float64,)},
    ),
    "a loss in chunks with weights": Exchange(
        ChunkLoss(most=4 * 97 * 4), loss, loss_inputs, {"weighted": True},
        {"weight": (0.0, -1.0, INF, NAN), "reduction": ("sum", "none"), "ignore_index": (3, "all"),
         "label_smoothing": (0.1,)},
    ),
    "dropout": Exchange(
        ExpandDropout(), dropped, lambda **_: (torch.randn(40),), {},
        {"p": (0.0, 1.0, 1e-9), "train": (False, None)},
    ),
}  # fmt: skip

CASES = [
    pytest.param(exchange, case, id=f"{name}, {case}")
    for name, exchange in EXCHANGES.items()
    for case in exchange.cases()
]


def _results(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


@pytest.mark.parametrize(("exchange", "case"), CASES)
def test_awkward_values_are_as_in_eager(exchange, case, monkeypatch):
    monkeypatch.setattr(chunked_loss, "SMALLEST_VOCABULARY", 64)
    torch.manual_seed(0)
    program, inputs = exchange.program(**case), exchange.inputs(**case)
    step = trace(program, *inputs)
    if exchange.cleans:
        step = rewritten(step, CLEAN)
    count = exchange.each.run(step)
    assert count or case is not exchange.ordinary, "the ordinary one is to be replaced"
    torch.manual_seed(1)
    expected = _results(program(*(each.clone() for each in inputs)))
    torch.manual_seed(1)
    wide = torch.finfo(inputs[0].dtype).eps > 1e-5
    rtol, atol = (4e-2, 4e-2) if wide else (exchange.rtol, 1e-5)
    for new, old in zip(run_step(step, inputs), expected, strict=True):
        torch.testing.assert_close(new, old, rtol=rtol, atol=atol, equal_nan=True)


OTHERS = {
    "CallFastestAttention": "on GPUs; its refusals are in test_attention_kernels.py",
    "GroupHeads": "on GPUs: the same kernel, of fewer heads",
    "MultiplyInFloat8": "by an option that rounds; its awkward values are in test_float8.py",
}
"""Exchanges of kernels that no CPU has, or that are not eager's on purpose."""
KEEP_KERNELS = frozenset({
    "Rewrite", "RemoveDeadCode", "RemoveNoOps", "RemoveCommonSubexpressions", "SettleCheckpoints",
    "RecomputeMarked", "HoistCollectives", "MergeEqualCollectives", "SinkWaits",
    "BucketCollectives", "GatherAgain", "ScatterReductions", "CountConstants", "DrawInMemoryOrder",
    "UseCounterBasedRng", "SimplifySplitCat", "ExpandRegistered", "OverlapCommunication",
    "PipelineProducts", "ReadMasksAsBytes", "Recompute", "UpdateEarly", "RunEagerly",
    "ContractRegions", "SplitUpdates", "FoldConstants", "RunTakenBranches", "MicroBatch", "Offload",
})  # fmt: skip
"""Passes that move, join or drop operations, or pieces of one, and put no other kernel there."""


def _kinds(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def test_no_exchange_is_left_out():
    for module in pkgutil.walk_packages(treadle.passes.__path__, "treadle.passes."):
        importlib.import_module(module.name)
    kinds = [each for each in _kinds(GraphPass) if not each.__subclasses__()]
    own = {each.__name__ for each in kinds if each.__module__.startswith("treadle.")}
    walked = {type(each.each).__name__ for each in EXCHANGES.values()}
    assert own == walked | OTHERS.keys() | KEEP_KERNELS


@pytest.mark.parametrize("scale", [0.0, -0.5, NAN, INF])
@pytest.mark.parametrize(("rows", "window"), itertools.product([6], [99, 3]))
def test_a_mask_that_is_scaled_before_it_is_added_stays(scale, rows, window):
    step = trace(masked_call(scale=scale, window=window), *attention_inputs(rows=rows))
    assert PROVE.run(step) == 0
