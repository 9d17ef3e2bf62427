"""What is known of operators, PyTorch's and ours."""
