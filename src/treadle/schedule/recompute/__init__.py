"""Recomputation of cheap values where they are read, by one definition of what is cheap."""
