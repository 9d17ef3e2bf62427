"""Computing many rows in chunks: what is computed row by row, and how it is split."""
