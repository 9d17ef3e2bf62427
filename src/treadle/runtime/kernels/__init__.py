"""From sources to launchable functions, and treadle's own kernels."""
