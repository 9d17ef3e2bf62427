"""PyTorch's kernels of causal attention on one GPU, forward and backward, in milliseconds.

::

    python benchmarks/attention_kernels.py [--windows]

bf16, laid out as language models have them. ``biased`` is cuDNN's kernel with the causal mask as a
tensor, which PyTorch picks where a model hands it one. ``--windows``: of queries that see as many
keys as the table says, the flash kernel with bounds beside cuDNN's with a mask and, at one window
of each shape since each is compiled by itself, FlexAttention.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

aten = torch.ops.aten
SHAPES = {
    "GPT-2": (16, 12, 1024, 64),
    "Llama 271M": (8, 16, 2048, 64),
    "Llama 1.2B": (8, 32, 4096, 64),
    "Qwen3": (4, 16, 2048, 128),
}
"""Batch, heads, time, width of a head."""
WINDOWS = {
    (4, 32, 8, 4096, 128): (512, 1024, 2048, 3072),
    (8, 16, 16, 2048, 64): (256, 512, 1024),
    (4, 8, 4, 4096, 256): (512, 1024),
    (16, 12, 12, 1024, 64): (64, 256, 512),
}
"""Batch, heads of queries and of keys, time, width of a head; how many keys a query sees."""


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def flash(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], object], ...]:
    def forward() -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)

    out, lse, cq, ck, mq, mk, seed, offset, *_ = forward()
    backward = aten._scaled_dot_product_flash_attention_backward
    return forward, lambda: backward(g, q, k, v, out, lse, cq, ck, mq, mk, 0.0, True, seed, offset)


def efficient(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], object], ...]:
    def forward() -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)

    out, lse, seed, offset = forward()
    backward = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return forward, lambda: backward(g, q, k, v, None, out, lse, seed, offset, 0.0, wanted, True)


def cudnn(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> tuple[Callable[[], object], ...]:
    causal = bias is None

    def forward() -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False)

    out, lse, cq, ck, mq, mk, seed, offset, *_ = forward()
    backward = aten._scaled_dot_product_cudnn_attention_backward
    return forward, lambda: backward(
        g, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, 0.0, causal
    )


def biased(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], object], ...]:
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    bias = torch.zeros(q.shape[0], 1, *hidden.shape, dtype=q.dtype, device=q.device)
    return cudnn(g, q, k, v, bias.masked_fill_(hidden, float("-inf")))


def windowed(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[Callable[[], object], ...]:
    turned = [each.transpose(1, 2) for each in (g, q, k, v)]
    time = q.shape[2]
    sizes = (None, None, time, time, 0.0, False)
    sides = {"window_size_left": window - 1, "window_size_right": 0}

    def forward() -> tuple[Tensor, ...]:
        return aten._flash_attention_forward(*turned[1:], *sizes, False, **sides)

    out, lse, seed, unused, _ = forward()
    backward = aten._flash_attention_backward
    return forward, lambda: backward(*turned, out, lse, *sizes, seed, unused, **sides)


def masked(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[Callable[[], object], ...]:
    apart = torch.arange(q.shape[2], device=q.device)
    apart = apart[None] - apart[:, None]
    bias = torch.zeros(q.shape[0], 1, *apart.shape, dtype=q.dtype, device=q.device)
    return cudnn(g, q, k, v, bias.masked_fill_((apart > 0) | (apart <= -window), -math.inf))


def flexible(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[Callable[[], object], ...]:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - window)

    time = q.shape[2]
    blocks = create_block_mask(seen, None, None, time, time, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    shared = q.shape[1] != k.shape[1]

    def forward() -> Tensor:
        return compiled(*leaves, block_mask=blocks, enable_gqa=shared)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


def show_windows() -> None:
    print("| shape | window | flash with bounds | cuDNN with a mask | FlexAttention |")
    print("|---|---|---|---|---|")
    for (batch, heads, groups, time, width), windows in WINDOWS.items():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        counts = (heads, heads, groups, groups)
        tensors = [torch.randn(batch, time, n, width, **options).transpose(1, 2) for n in counts]
        shape = f"{batch} x {heads} / {groups} x {time} x {width}"
        for window in windows:
            kernels = (windowed, masked, flexible) if window == windows[1] else (windowed, masked)
            found = [
                ", ".join(f"{milliseconds(run):.2f}" for run in kernel(*tensors, window))
                for kernel in kernels
            ]
            print(f"| {shape} | {window} | {' | '.join(found)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", action="store_true")
    if parser.parse_args().windows:
        show_windows()
        return
    for name, (batch, heads, time, width) in SHAPES.items():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        laid = [torch.randn(batch, time, heads, width, **options) for _ in range(4)]
        tensors = [each.transpose(1, 2) for each in laid]
        for kernel in (flash, efficient, cudnn, biased):
            forward, backward = map(milliseconds, kernel(*tensors))
            print(f"{name:<12} {kernel.__name__:<10} {forward:7.3f} {backward:7.3f}", flush=True)


if __name__ == "__main__":
    main()
