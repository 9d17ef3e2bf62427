"""Libraries whose functions behave differently during capture, one file each."""
