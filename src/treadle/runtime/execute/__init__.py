"""Tensors in, launches and library calls in order, tensors out."""
