"""Compiled steps as data, and where they are kept."""
