"""What is measured of a device: its rates, and what library calls allocate and how long they take."""
