"""Training loops of other libraries whose steps are compiled whole, a file a library."""
