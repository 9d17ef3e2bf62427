"""What the functions of formulas cost: one table, which every decision about computing one twice
asks."""

EXPENSIVE = frozenset({
    "exp", "expm1", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "erfc", "sigmoid", "pow",
    "fmod", "mod",
})  # fmt: skip
"""Functions of some tens of instructions: a formula with one of them is not computed again for
each of its readers."""

DIVIDES = frozenset(["div", "floordiv", "sqrt", "rsqrt"])
"""Functions of one instruction that takes as long as ten others."""

WORTH_KEEPING = EXPENSIVE | DIVIDES
"""Functions whose result a loop keeps for a second pass over a row, instead of computing it
again."""
