"""Libraries whose functions mean something else while a step is captured, a file each."""
