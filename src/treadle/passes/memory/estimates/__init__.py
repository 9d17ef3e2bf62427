"""How long the operations of a step take, as plans are told."""
