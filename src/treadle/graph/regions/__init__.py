"""Parts of a graph that are compiled separately, and the bodies of loops."""
