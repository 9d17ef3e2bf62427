"""Updates that run in the next call."""
