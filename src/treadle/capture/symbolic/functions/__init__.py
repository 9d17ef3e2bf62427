"""Replacements of functions of Python and PyTorch that take numbers and sizes."""
