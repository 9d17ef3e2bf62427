"""Graphs of AOTAutograd's as the backend of ``torch.compile`` compiles them: a forward and its
backward as one, or one of them."""
