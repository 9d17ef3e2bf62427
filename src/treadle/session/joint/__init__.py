"""Graphs from AOTAutograd, as the ``torch.compile`` backend compiles them: a forward and its
backward as one graph, or one of them."""
