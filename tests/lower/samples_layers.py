"""Samples: layers."""

import torch
import torch.nn.functional as F
from torch import nn

from lower.operator_table import Family, away, distinct, normal, positive, truth

LAYERS = Family("layers")


def _networks() -> None:
    LAYERS.add("linear", F.linear, normal(3, 5), normal(4, 5), normal(4))
    LAYERS.add("linear of 3 dims", F.linear, normal(2, 3, 5), normal(4, 5), normal(4))
    LAYERS.add(
        "matmul, bmm, mv, dot",
        lambda x, y, v: [x @ y, x[None] @ y[None], x @ v, v @ v],
        normal(3, 5),
        normal(5, 4),
        normal(5),
    )
    LAYERS.add(
        "addmm, baddbmm, addmv, addbmm",
        lambda b, x, y: [
            torch.addmm(b, x, y, beta=0.5, alpha=2),
            torch.baddbmm(b[None], x[None], y[None]),
            torch.addmv(b[:, 0], x, y[:, 0]),
            torch.addbmm(b, x[None], y[None]),
        ],
        normal(3, 4),
        normal(3, 5),
        normal(5, 4),
    )
    LAYERS.add(
        "einsum, tensordot",
        lambda x, y: [
            torch.einsum("bij,bkj->bik", x, y),
            torch.tensordot(x, y, ([2], [2])),
        ],
        normal(2, 3, 5),
        normal(2, 4, 5),
    )
    LAYERS.add("bilinear", F.bilinear, normal(3, 5), normal(3, 4), normal(2, 5, 4), normal(2))
    LAYERS.add(
        "conv1d",
        lambda x, w, b: F.conv1d(x, w, b, 2, 1),
        normal(2, 3, 9),
        normal(4, 3, 3),
        normal(4),
    )
    LAYERS.add(
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, 2, 1),
        normal(2, 3, 9, 7),
        normal(4, 3, 3, 3),
        normal(4),
    )
    LAYERS.add(
        "conv2d, grouped",
        lambda x, w: F.conv2d(x, w, groups=2),
        normal(2, 4, 6, 5),
        normal(4, 2, 3, 3),
    )
    LAYERS.add(
        "conv3d",
        lambda x, w, b: F.conv3d(x, w, b),
        normal(1, 2, 4, 5, 4),
        normal(3, 2, 2, 2, 2),
        normal(3),
    )
    LAYERS.add(
        "conv_transpose1d",
        lambda x, w, b: F.conv_transpose1d(x, w, b, 2),
        normal(2, 3, 5),
        normal(3, 4, 3),
        normal(4),
    )
    LAYERS.add(
        "conv_transpose2d",
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1),
        normal(2, 3, 5, 4),
        normal(3, 4, 3, 3),
        normal(4),
    )
    LAYERS.add(
        "conv_transpose3d",
        lambda x, w: F.conv_transpose3d(x, w),
        normal(1, 2, 3, 3, 3),
        normal(2, 3, 2, 2, 2),
    )
    for rank, size in ((1, (9,)), (2, (9, 7)), (3, (5, 6, 7))):
        shape = (2, 3, *size)
        for name in ("max_pool", "avg_pool"):
            pool = getattr(F, f"{name}{rank}d")
            LAYERS.add(f"{name}{rank}d", lambda x, p=pool: p(x, 3, 2, 1), distinct(*shape))
            LAYERS.add(
                f"{name}{rank}d, ceil mode",
                lambda x, p=pool: p(x, 2, 2, 0, ceil_mode=True),
                distinct(*shape),
            )
        for name in ("adaptive_avg_pool", "adaptive_max_pool"):
            pool = getattr(F, f"{name}{rank}d")
            for out in (1, 3):
                LAYERS.add(
                    f"{name}{rank}d to {out}", lambda x, p=pool, n=out: p(x, n), distinct(*shape)
                )
    LAYERS.add(
        "avg_pool2d, no padding counted",
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        normal(2, 3, 9, 7),
    )
    LAYERS.add(
        "avg_pool2d, divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), normal(2, 3, 6, 4)
    )
    LAYERS.add(
        "max_pool2d, dilated", lambda x: F.max_pool2d(x, 2, 1, dilation=2), distinct(2, 3, 9, 7)
    )
    LAYERS.add("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), positive(2, 3, 6, 4))
    LAYERS.add(
        "max_unpool2d",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        distinct(1, 2, 4, 6),
    )
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
        LAYERS.add(
            f"interpolate {mode} {rank}d",
            lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m),
            normal(*shape),
        )
    LAYERS.add(
        "interpolate to a size",
        lambda x: [
            F.interpolate(x, (3, 7)),
            F.interpolate(x, (3, 7), mode="bilinear", align_corners=True),
        ],
        normal(1, 2, 4, 5),
    )
    LAYERS.add(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        normal(1, 2, 4, 5),
        away(1, 3, 3, 2),
    )
    LAYERS.add(
        "affine_grid",
        lambda t: F.affine_grid(t, [1, 2, 3, 4], align_corners=False),
        normal(1, 2, 3),
    )
    LAYERS.add(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (5,), w, b),
        normal(2, 3, 5),
        normal(5),
        normal(5),
    )
    LAYERS.add("rms_norm", lambda x, w: F.rms_norm(x, (5,), w), normal(2, 3, 5), normal(5))
    LAYERS.add(
        "group_norm",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        normal(2, 6, 3, 4),
        normal(6),
        normal(6),
    )
    LAYERS.add(
        "group_norm, channels last",
        lambda x, w, b: F.group_norm(x.contiguous(memory_format=torch.channels_last), 3, w, b),
        normal(2, 6, 3, 4),
        normal(6),
        normal(6),
    )
    LAYERS.add(
        "group_norm, channels last, a group of each channel",
        lambda x: F.group_norm(x.contiguous(memory_format=torch.channels_last), 6),
        normal(2, 6, 3, 4),
    )
    LAYERS.add("group_norm, no weights", lambda x: F.group_norm(x, 3), normal(2, 6, 5))
    LAYERS.add(
        "instance_norm",
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        normal(2, 3, 4, 5),
        normal(3),
        normal(3),
    )
    LAYERS.add(
        "batch_norm, training",
        lambda x, m, v, w, b: F.batch_norm(
            x, m.detach().clone(), v.detach().clone(), w, b, training=True
        ),
        normal(4, 3, 5),
        normal(3),
        positive(3),
        normal(3),
        normal(3),
    )
    LAYERS.add(
        "batch_norm, evaluation",
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b),
        normal(4, 3, 5),
        normal(3),
        positive(3),
        normal(3),
        normal(3),
    )
    LAYERS.add(
        "batch_norm, no statistics kept",
        lambda x: F.batch_norm(x, None, None, training=True),
        normal(4, 3, 5),
    )
    LAYERS.add("local_response_norm", lambda x: F.local_response_norm(x, 2), normal(2, 4, 5))
    LAYERS.add("weight_norm", lambda v, g: torch._weight_norm(v, g), normal(3, 5), positive(3, 1))
    for name, layer in (("rnn", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)):
        module = layer(4, 3, num_layers=2, bidirectional=True)
        LAYERS.add_module(name, module, lambda m, x: m(x)[0], normal(3, 2, 4))
    for name, cell in (("rnn", nn.RNNCell), ("gru", nn.GRUCell), ("lstm", nn.LSTMCell)):
        LAYERS.add_module(f"{name} cell", cell(4, 3), lambda m, x: m(x), normal(2, 4))
    LAYERS.add_module(
        "multi-head attention",
        nn.MultiheadAttention(8, 2),
        lambda m, x: m(x, x, x)[0],
        normal(3, 2, 8),
    )
    LAYERS.add(
        "scaled_dot_product_attention",
        lambda q, k, v: [
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v),
        ],
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
    )
    LAYERS.add(
        "attention with a mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
        truth(5, 5),
        atol=1e-4,
    )
    LAYERS.add(
        "attention with grouped heads",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        normal(2, 4, 5, 8),
        normal(2, 2, 5, 8),
        normal(2, 2, 5, 8),
    )
    LAYERS.add("fft", lambda x: torch.fft.irfft(torch.fft.rfft(x)), normal(3, 8))
    LAYERS.add(
        "linalg solve",
        lambda a, b: torch.linalg.solve(a + 5 * torch.eye(3), b),
        normal(3, 3),
        normal(3, 2),
        grad=False,
    )


_networks()
