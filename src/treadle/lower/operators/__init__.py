"""Rules, a family of operators per file."""
