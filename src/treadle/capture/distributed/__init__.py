"""Gradients, rows and buffers that several ranks share."""
