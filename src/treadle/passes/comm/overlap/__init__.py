"""Collectives early, waits late, and products cut into pieces between them."""
