"""What a step does to tensors, and which of them are the user's own."""
