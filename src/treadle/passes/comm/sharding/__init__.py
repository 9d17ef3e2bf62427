"""Rows of a value on each rank, instead of all rows on every rank."""
