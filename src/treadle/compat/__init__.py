"""The only room that names private parts of torch; ``names`` says which versions have them."""
