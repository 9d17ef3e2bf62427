"""Work over many rows in chunks of rows: what is computed row by row, and how it is cut."""
