"""What the values of tensors decide: ways through a step, sizes, and errors."""
