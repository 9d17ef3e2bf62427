"""Compiled steps as data, and their storage."""
