"""A captured step as data: another process serves calls with it, and traces nothing."""
