"""treadle's own operators in graphs: one ``CustomOp`` each."""
