"""Arrays of NumPy's, and lists of which tensors are made."""
