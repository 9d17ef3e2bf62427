"""What is measured of a device: its rates, and the bytes and seconds of library calls."""
