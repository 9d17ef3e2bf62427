"""Kernels as Triton text."""
