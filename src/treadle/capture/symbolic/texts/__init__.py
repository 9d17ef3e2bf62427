"""Texts of what stands in for something else."""
