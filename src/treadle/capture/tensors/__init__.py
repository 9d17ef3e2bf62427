"""The effects of a step on tensors, and which tensors are the user's own."""
