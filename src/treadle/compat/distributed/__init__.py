"""Process groups, collectives, and the plans of PyTorch's wrappers."""
