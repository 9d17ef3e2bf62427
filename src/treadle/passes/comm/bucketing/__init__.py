"""Several collectives as one, and one instead of two."""
