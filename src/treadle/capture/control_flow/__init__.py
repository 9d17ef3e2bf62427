"""PyTorch functions whose bodies are separate graphs."""
