"""Parts of a graph that are compiled apart, and the bodies of loops."""
