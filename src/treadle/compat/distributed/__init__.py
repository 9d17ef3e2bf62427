"""Process groups, collectives, and what wrappers of PyTorch's are going to do."""
