"""What can be said of a graph without changing it."""
