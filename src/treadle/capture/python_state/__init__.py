"""What a run reads of the Python around it, and what it changes there."""
