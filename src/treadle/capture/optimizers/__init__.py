"""Optimizers in functional form: plain tensor operations, hyper-parameters as tensors."""
