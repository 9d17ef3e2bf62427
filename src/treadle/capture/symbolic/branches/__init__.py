"""What depends on values of tensors: paths through a step, sizes, and errors."""
