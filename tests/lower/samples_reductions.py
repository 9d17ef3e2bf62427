"""Samples: reductions."""

import math

import torch
import torch.nn.functional as F

from lower.operator_table import Family, away, distinct, normal, positive, truth, whole

REDUCTIONS = Family("reductions")


def _reductions() -> None:
    for name in (
        "sum",
        "mean",
        "amax",
        "amin",
        "prod",
        "logsumexp",
        "var",
        "std",
        "norm",
        "nansum",
        "nanmean",
        "softmax",
        "log_softmax",
    ):
        fn = getattr(torch, name)
        REDUCTIONS.add(f"{name} of a dim", lambda x, f=fn: f(x, dim=1), distinct(3, 5, 4))
    for name in ("sum", "mean", "prod", "var", "std", "norm", "max", "min", "median"):
        fn = getattr(torch, name)
        REDUCTIONS.add(f"{name} of all", lambda x, f=fn: f(x), distinct(3, 5, 4))
    for name in ("max", "min", "median", "mode", "kthvalue", "cummax", "cummin"):
        fn = getattr(torch, name)
        extra = (2, 1) if name == "kthvalue" else (1,)
        REDUCTIONS.add(
            f"{name} with indices",
            lambda x, f=fn, e=extra: f(x, *e),
            distinct(3, 5, 4),
        )
    REDUCTIONS.add("amax, amin of all", lambda x: [x.amax(), x.amin((0, 2))], distinct(3, 5, 4))
    differentiable = torch.__version__ >= "2.12"  # before, aminmax has no derivative
    REDUCTIONS.add(
        "aminmax", lambda x: torch.aminmax(x, dim=1), distinct(3, 5), grad=differentiable
    )
    REDUCTIONS.add(
        "argmax, argmin", lambda x: [x.argmax(), x.argmin(1), x.argmax(0, True)], distinct(3, 5)
    )
    REDUCTIONS.add(
        "any, all", lambda x: [x.any(), x.any(1), x.all(0), x.all(), x.any((0, 1))], truth(3, 5)
    )
    REDUCTIONS.add(
        "any, all of numbers", lambda x: [x.any(1), x.all(0), (x > 0).sum(1)], whole(3, 3, 5)
    )
    REDUCTIONS.add(
        "count_nonzero", lambda x: [x.count_nonzero(), x.count_nonzero(1)], whole(2, 3, 5)
    )
    REDUCTIONS.add("prod with a zero", lambda x: (x * (x > 0.3)).prod(1), positive(3, 5))
    REDUCTIONS.add(
        "var_mean, std_mean", lambda x: [*torch.var_mean(x, 1), *torch.std_mean(x, 0)], normal(5, 4)
    )
    REDUCTIONS.add(
        "vector norms",
        lambda x: [
            torch.linalg.vector_norm(x, order, 1)
            for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf)
        ],
        away(3, 5),
    )
    REDUCTIONS.add("matrix norm", lambda x: torch.linalg.matrix_norm(x), normal(3, 5))
    REDUCTIONS.add("normalize", lambda x: [F.normalize(x), F.normalize(x, 1.0)], away(3, 5))
    REDUCTIONS.add("cosine_similarity", F.cosine_similarity, normal(3, 5), normal(3, 5))
    REDUCTIONS.add("pairwise_distance", F.pairwise_distance, normal(3, 5), normal(3, 5))
    REDUCTIONS.add("cdist", torch.cdist, normal(3, 5), normal(4, 5))
    REDUCTIONS.add("cumsum", lambda x: x.cumsum(1), normal(3, 5))
    REDUCTIONS.add("cumprod", lambda x: x.cumprod(1), away(3, 5))
    REDUCTIONS.add("logcumsumexp", lambda x: x.logcumsumexp(1), normal(3, 5))
    REDUCTIONS.add("softmin, gumbel-free", lambda x: F.softmin(x, 1), normal(3, 5))
    REDUCTIONS.add("trace", torch.trace, normal(4, 4))
    REDUCTIONS.add("sort", lambda x: x.sort(1), distinct(3, 5))
    REDUCTIONS.add(
        "stable sort", lambda x: torch.sort(x, dim=1, stable=True, descending=True), distinct(3, 5)
    )
    REDUCTIONS.add("topk", lambda x: x.topk(2, 1), distinct(3, 5))
    REDUCTIONS.add("argsort", lambda x: x.argsort(1), distinct(3, 5))
    if torch.__version__ >= "2.12":  # before, it compares values, which PyTorch cannot trace
        REDUCTIONS.add("quantile", lambda x: x.quantile(0.3, 1), distinct(3, 5))
    REDUCTIONS.add(
        "searchsorted, bucketize",
        lambda x, y: [torch.searchsorted(x.cumsum(0), y), torch.bucketize(y, x.cumsum(0))],
        positive(5),
        positive(3),
        grad=False,
    )
    REDUCTIONS.add("histc", lambda x: torch.histc(x, 4, 0, 1), positive(9), grad=False)
    REDUCTIONS.add(
        "bincount weights",
        lambda x: torch.zeros(5).scatter_add(0, x, torch.ones(7)),
        whole(5, 7),
    )


_reductions()
