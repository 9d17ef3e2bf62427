"""The objects that a run reaches outside the step, their contents before it, and what the run left
there."""
