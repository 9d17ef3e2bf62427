"""What lives between the calls of a step: its variants, their guards, the user's tensors."""
