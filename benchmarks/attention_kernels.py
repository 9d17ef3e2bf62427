"""PyTorch's kernels of causal attention on one GPU, forward and backward, in milliseconds.

::

    python benchmarks/attention_kernels.py

bf16, laid out as language models have them. ``biased`` is cuDNN's kernel with the causal mask as a
tensor, which PyTorch picks where a model hands it one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
SHAPES = {
    "GPT-2": (16, 12, 1024, 64),
    "Llama 271M": (8, 16, 2048, 64),
    "Llama 1.2B": (8, 32, 4096, 64),
    "Qwen3": (4, 16, 2048, 128),
}
"""Batch, heads, time, width of a head."""


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


def main() -> None:
    for name, (batch, heads, time, width) in SHAPES.items():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        laid = [torch.randn(batch, time, heads, width, **options) for _ in range(4)]
        tensors = [each.transpose(1, 2) for each in laid]
        for kernel in (flash, efficient, cudnn, biased):
            forward, backward = map(milliseconds, kernel(*tensors))
            print(f"{name:<12} {kernel.__name__:<10} {forward:7.3f} {backward:7.3f}", flush=True)


if __name__ == "__main__":
    main()
