"""Rows of a value on each rank instead of all of them on every one."""
