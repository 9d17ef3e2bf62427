"""Integer index algebra: affine sums over loop axes, floor-divisions and remainders, with ranges.

STUB OF THE CONTRACT: constructors simplify; equality is structural; ``Index`` is immutable.
"""
