"""What a run read: a graph of objects, and whether a later call finds it as it was."""
