"""How far sums are from the exact ones (float64), compiled and in eager.

::

    python benchmarks/sums.py [cuda]

Mean distance over ten batches of normal numbers, relative, in units of 1e-8.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import treadle

SUMS: dict[str, Callable[[int], tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]] = {
    "rows": lambda n: ((48, n), lambda x: x.sum(1)),
    "columns": lambda n: ((n, 48), lambda x: x.sum(0)),
    "three columns": lambda n: ((n, 3), lambda x: x.sum(0)),
    "squares": lambda n: ((48, n), lambda x: x.square().sum(1)),
    "everything": lambda n: ((48, n), lambda x: x.abs().sum()),
    "layer norm": lambda n: ((48, n), lambda x: nn.functional.layer_norm(x, (n,))),
    "softmax": lambda n: ((48, n), lambda x: x.softmax(-1)),
}


def distance(found: Tensor, exact: Tensor) -> float:
    return 1e8 * float((found.double() - exact).norm() / exact.norm())


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    model = nn.Linear(1, 1).to(device)
    print("| sum of | 76 terms | 1024 | 16384 | 131072 |")
    print("|---|---|---|---|---|")
    for name, make in SUMS.items():
        cells: list[str] = []
        for count in (76, 1024, 16384, 131072):
            shape, function = make(count)
            step = treadle.compile(function, model=model)
            ours = theirs = 0.0
            for seed in range(10):
                torch.manual_seed(seed)
                x = torch.randn(shape, device=device)
                exact = function(x.double())
                ours += distance(step(x), exact) / 10
                theirs += distance(function(x), exact) / 10
            cells.append(f"{ours:.1f} ({theirs:.1f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
