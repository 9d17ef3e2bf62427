"""Operators of treadle's own that stand in graphs: a ``CustomOp`` each."""
