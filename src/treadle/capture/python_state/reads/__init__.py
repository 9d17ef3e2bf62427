"""The reads of a run: a graph of objects, and whether a later call finds it unchanged."""
