"""Frames and code objects of CPython, as data."""
