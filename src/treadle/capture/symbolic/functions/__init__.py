"""What is called in the places of functions of Python and PyTorch that take numbers and sizes."""
