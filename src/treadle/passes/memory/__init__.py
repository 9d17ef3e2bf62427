"""What is kept and what is computed again, so that the peak of a step obeys a budget."""
