"""What a run reaches outside of the step, what that held before, and what the run left there."""
