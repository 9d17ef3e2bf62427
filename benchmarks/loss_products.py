"""The three products of a projection to a large vocabulary, whole and in pieces, in milliseconds.

::

    python benchmarks/loss_products.py [--pieces 1,4,8,16,32]

bf16 on one GPU: the logits, the gradient of what they are computed from, and that of the weights,
which is added up in float32.
"""

import argparse

import torch
from attention_kernels import milliseconds

SHAPES = {
    "GPT-2": (16384, 768, 50264),
    "Llama 1.2B": (32768, 2048, 128256),
    "Qwen3": (8192, 1024, 151936),
}
"""Rows, width, columns with the room that treadle gives them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", default="1,4,8,16,32")
    options = {"device": "cuda", "dtype": torch.bfloat16}
    pieces = [int(each) for each in parser.parse_args().pieces.split(",")]
    for name, (rows, width, columns) in SHAPES.items():
        weight = torch.randn(columns, width, **options)
        total = torch.zeros(columns, width, device="cuda")
        for count in pieces:
            x = torch.randn(rows // count, width, **options)
            logits = torch.empty(rows // count, columns, **options)

            def project(x=x, logits=logits, weight=weight):
                return torch.mm(x, weight.t(), out=logits)

            def back(logits=logits, weight=weight):
                return torch.mm(logits, weight)

            def add(x=x, logits=logits, total=total):
                wide = torch.float32
                return torch.ops.aten.addmm.dtype_out(total, logits.t(), x, wide, out=total)

            taken = [count * milliseconds(each, 5) for each in (project, back, add)]
            print(f"{name:<12} {count:3d} " + " ".join(f"{each:7.2f}" for each in taken))


if __name__ == "__main__":
    main()
