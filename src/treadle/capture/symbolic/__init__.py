"""Values of Python's that are others at the next call: numbers, and what is computed of them."""
