"""NumPy arrays, and lists from which tensors are made."""
