"""Kernels as C++ text."""
