"""Collectives early, waits late, and products split into chunks between them."""
