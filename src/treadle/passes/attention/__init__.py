"""Attention that is written out, found and replaced by a kernel; masks, kernels and heads."""
