"""Which values are kept and which recomputed, so that the peak of a step fits a budget."""
