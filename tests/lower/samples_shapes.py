"""Samples: shapes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lower.operator_table import Family, Make, distinct, normal, positive, truth, whole

SHAPES = Family("shapes and indexing")


def _shapes() -> None:
    SHAPES.add(
        "views",
        lambda x: [
            x.view(5, 6),
            x.t() if x.ndim == 2 else x.mT,
            x.permute(2, 0, 1),
            x[:, 1:, ::2],
            x[1],
            x.unsqueeze(1),
            x.squeeze(),
            x.expand(2, 3, 5, 2),
            x.flatten(1),
            x.unflatten(1, (5, 1)),
            *x.split(2, 1),
            *x.chunk(2, 0),
            *x.unbind(2),
            x.diagonal(0, 0, 2),
            x.movedim(0, 2),
            x.unfold(1, 3, 1),
            x.narrow(1, 1, 2),
            x.transpose(0, 1).reshape(-1),
            x.as_strided((2, 3), (1, 2), 1),
            *x.tensor_split(2, 1),
            x.swapaxes(0, 2),
        ],
        normal(3, 5, 2),
    )
    SHAPES.add(
        "joins",
        lambda x, y: [
            torch.cat([x, y], 1),
            torch.stack([x, x], 1),
            torch.hstack([x, y]),
            torch.vstack([x, x]),
            torch.block_diag(x, y),
            torch.cat([x.double(), y], 1),
        ],
        normal(3, 4),
        normal(3, 2),
    )
    SHAPES.add(
        "repeat, tile",
        lambda x: [x.repeat(2, 3), x.tile(2, 1), x.repeat_interleave(3, 1)],
        normal(3, 4),
    )
    SHAPES.add(
        "repeat_interleave by a tensor",
        lambda x, n: x.repeat_interleave(n, 0, output_size=6),
        normal(3, 4),
        lambda: torch.tensor([1, 2, 3]),
    )
    SHAPES.add(
        "flip, roll, rot90",
        lambda x: [
            x.flip(0, 1),
            x.roll(1, 0),
            x.roll(2),
            x.roll((1, 2), (0, 1)),
            x.rot90(),
        ],
        normal(3, 4),
    )
    SHAPES.add("tril, triu", lambda x: [x.tril(), x.triu(1), x.tril(-1)], normal(3, 4))
    SHAPES.add("tril_indices", lambda x: x[tuple(torch.tril_indices(3, 3))], normal(3, 3))
    SHAPES.add(
        "diag, diag_embed", lambda x: [x.diag(), x.diag_embed(), torch.diagflat(x)], normal(4)
    )
    SHAPES.add(
        "meshgrid, outer, kron",
        lambda x, y: [
            *torch.meshgrid(x, y, indexing="ij"),
            torch.outer(x, y),
            torch.kron(x, y),
        ],
        normal(3),
        normal(4),
    )
    SHAPES.add(
        "pad constant",
        lambda x: [F.pad(x, (1, 2)), F.pad(x, (0, -1, 2, 0), value=3.0)],
        normal(2, 3, 5),
    )
    for mode in ("reflect", "replicate", "circular"):
        SHAPES.add(f"pad {mode} 1d", lambda x, m=mode: F.pad(x, (1, 2), m), normal(2, 3, 5))
        SHAPES.add(
            f"pad {mode} 2d", lambda x, m=mode: F.pad(x, (1, 2, 2, 0), m), normal(2, 3, 5, 4)
        )
        SHAPES.add(
            f"pad {mode} 3d",
            lambda x, m=mode: F.pad(x, (1, 1, 1, 0, 0, 1), m),
            normal(1, 2, 3, 4, 3),
        )
    SHAPES.add("gather", lambda x, i: x.gather(1, i), normal(3, 5), whole(5, 3, 4))
    SHAPES.add(
        "take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), normal(3, 5), whole(5, 3, 4)
    )
    SHAPES.add("take", torch.take, normal(3, 5), whole(15, 4))
    SHAPES.add("index_select", lambda x, i: x.index_select(1, i), normal(3, 5), whole(5, 4))
    SHAPES.add(
        "indexing",
        lambda x, i: [x[i], x[:, i], x[i, i], x[i[:, None], i], x[-1, i]],
        normal(5, 5, 2),
        whole(5, 3),
    )
    SHAPES.add("indexing by a mask, in place", _mask_assign, normal(3, 5), truth(3, 5))
    SHAPES.add(
        "index_put", lambda x, i, v: x.index_put((i,), v), normal(5, 3), _places(4, 5), normal(4, 3)
    )
    SHAPES.add(
        "index_put, accumulate",
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        normal(5, 3),
        whole(5, 4),
        normal(4, 3),
    )
    SHAPES.add(
        "index_add",
        lambda x, i, v: x.index_add(0, i, v, alpha=0.5),
        normal(5, 3),
        whole(5, 4),
        normal(4, 3),
    )
    SHAPES.add(
        "index_copy",
        lambda x, i, v: x.index_copy(0, i, v),
        normal(5, 3),
        _places(4, 5),
        normal(4, 3),
    )
    SHAPES.add("index_fill", lambda x, i: x.index_fill(0, i, 2.0), normal(5, 3), whole(5, 2))
    SHAPES.add(
        "index_reduce",
        lambda x, i, v: x.index_reduce(0, i, v, "amax"),
        normal(5, 3),
        whole(5, 4),
        normal(4, 3),
        grad=False,
    )
    SHAPES.add(
        "scatter",
        lambda x, i, v: [x.scatter(1, i, v), x.scatter(1, i, 2.0)],
        normal(3, 5),
        lambda: torch.stack([torch.randperm(5)[:2] for _ in range(3)]),
        normal(3, 2),
    )
    SHAPES.add(
        "scatter_add",
        lambda x, i, v: x.scatter_add(1, i, v),
        normal(3, 5),
        whole(5, 3, 4),
        normal(3, 4),
    )
    for how in ("sum", "prod", "mean", "amax", "amin"):
        SHAPES.add(
            f"scatter_reduce {how}",
            lambda x, i, v, h=how: x.scatter_reduce(1, i, v, h),
            distinct(3, 5),
            whole(5, 3, 4),
            positive(3, 4),
        )
    SHAPES.add(
        "slice_scatter, select_scatter, diagonal_scatter",
        lambda x, y: [
            torch.slice_scatter(x, y[:2], 0, 1, 3),
            torch.select_scatter(x, y[0], 0, 2),
            torch.diagonal_scatter(x, y[0]),
            torch.as_strided_scatter(x, y[0], (4,), (1,), 2),
        ],
        normal(4, 4),
        normal(4, 4),
    )
    SHAPES.add(
        "masked_scatter",
        lambda x, m, v: x.masked_scatter(m, v),
        normal(3, 5),
        truth(3, 5),
        normal(3, 5),
    )
    SHAPES.add("one_hot", lambda x: F.one_hot(x, 5), whole(5, 3, 2))
    SHAPES.add("embedding", lambda i, w: F.embedding(i, w), whole(7, 2, 3), normal(7, 4))
    SHAPES.add(
        "embedding, padding",
        lambda i, w: F.embedding(i, w, padding_idx=1),
        whole(7, 2, 3),
        normal(7, 4),
    )
    for mode in ("sum", "mean", "max"):
        SHAPES.add(
            f"embedding_bag {mode}",
            lambda i, w, m=mode: F.embedding_bag(i, w, mode=m),
            whole(7, 2, 3),
            distinct(7, 4),
        )
    SHAPES.add(
        "unfold, fold",
        lambda x: [F.unfold(x, 2, padding=1), F.fold(F.unfold(x, 2), (5, 4), 2)],
        normal(2, 3, 5, 4),
    )
    SHAPES.add(
        "pixel_shuffle",
        lambda x: [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)],
        normal(1, 4, 4, 6),
    )
    SHAPES.add("channel_shuffle", lambda x: F.channel_shuffle(x, 2), normal(1, 4, 3, 2))
    SHAPES.add(
        "creation",
        lambda x: [
            torch.arange(7),
            torch.arange(1.0, 3.0, 0.5),
            torch.linspace(0, 1, 5),
            torch.eye(3, 4),
            torch.full((2, 3), 1.5),
            torch.zeros(3),
            torch.ones_like(x),
            x.new_zeros(2),
            torch.logspace(0, 1, 4),
            torch.linspace(0, 9, 4, dtype=torch.int64),
        ],
        normal(3),
    )
    SHAPES.add(
        "broadcast_to, expand_as",
        lambda x, y: [x.broadcast_to(3, 4), x.expand_as(y)],
        normal(4),
        normal(3, 4),
    )


def _mask_assign(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask] = torch.full((), 0.0)
    return torch.index_put(y, (mask,), torch.full((), 2.0)) * x


def _places(count: int, extent: int) -> Make:
    return lambda: torch.randperm(extent)[:count]


_shapes()
