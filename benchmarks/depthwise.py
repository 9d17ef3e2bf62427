"""Depthwise convolutions of PyTorch's in 16 bits, in milliseconds, by the order of their images.

::

    python benchmarks/depthwise.py [--dtype bfloat16]

On one GPU: the forward, the gradient of the image and that of the filters, each from contiguous and
from channels-last images; and the gradient of the image as a convolution with flipped filters.
"""

import argparse

import torch
from attention_kernels import milliseconds

aten = torch.ops.aten
SHAPES = [
    (128, 96, 56, 7, 1),
    (128, 384, 14, 7, 1),
    (128, 144, 56, 3, 1),
    (128, 96, 112, 3, 2),
    (128, 240, 28, 5, 1),
    (128, 240, 28, 5, 2),
    (8, 96, 56, 7, 1),
    (32, 960, 7, 3, 1),
    (16, 256, 64, 9, 1),
]
"""Images, channels, rows (as many as columns), size of the filter, stride."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    print("images ch rows k s | forward | image | flipped | filters (contiguous, channels-last)")
    for images, channels, rows, size, stride in SHAPES:
        options = {"device": "cuda", "dtype": dtype}
        rest = ([stride] * 2, [size // 2] * 2, [1, 1], False, [0, 0], channels)
        x = torch.randn(images, channels, rows, rows, **options)
        w = torch.randn(channels, 1, size, size, **options)
        g = torch.randn_like(aten.convolution(x, w, None, *rest))
        parts: list[list[float]] = [[], [], [], []]
        for kind in (torch.contiguous_format, torch.channels_last):
            image, grad = (each.contiguous(memory_format=kind) for each in (x, g))

            def forward(image=image, w=w, rest=rest):
                return aten.convolution(image, w, None, *rest)

            def back(mask, grad=grad, image=image, w=w, rest=rest):
                return aten.convolution_backward(grad, image, w, None, *rest, mask)

            def flipped(grad=grad, w=w, rest=rest):
                return aten.convolution(grad, w.flip((2, 3)), None, *rest)

            parts[0].append(milliseconds(forward))
            parts[1].append(milliseconds(lambda back=back: back([True, False, False])))
            if stride == 1:
                parts[2].append(milliseconds(flipped))
            parts[3].append(milliseconds(lambda back=back: back([False, True, False])))
        shown = " | ".join(", ".join(f"{each:.3f}" for each in part) for part in parts)
        print(f"{images:4} {channels:4} {rows:4} {size:2} {stride} | {shown}", flush=True)


if __name__ == "__main__":
    main()
