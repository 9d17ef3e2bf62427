"""What a run reaches outside the step, what that held before, and what the run left there."""
