"""What runs inside of the next call."""
