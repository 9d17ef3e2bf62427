"""Sizes, indices, bounds and proofs: one affine form over axes and named sizes."""
