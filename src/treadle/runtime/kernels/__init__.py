"""From sources to functions that are launched, and kernels of our own."""
