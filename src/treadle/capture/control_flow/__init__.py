"""Functions of PyTorch's whose bodies are graphs of their own."""
