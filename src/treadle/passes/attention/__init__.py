"""Attention written out, found and handed to a kernel; masks, kernels and heads."""
