"""Names of layers and lists of operations, as reports, plans and profiles say them."""

import re
from collections import Counter
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


def layer_of(module: str) -> str:
    """``blocks.3.mlp`` -> ``blocks.*.mlp``: the same for equal layers."""
    return _NUMBER.sub("*", module)


def operation_counts(operations: Sequence[str], most: int = 1 << 30) -> str:
    """``mul, add, mul`` -> ``"mul ×2, add"``."""
    counts = Counter(operations)
    words = [name + (f" ×{n}" if n > 1 else "") for name, n in list(counts.items())[:most]]
    return ", ".join([*words, "..."] if len(counts) > most else words)
