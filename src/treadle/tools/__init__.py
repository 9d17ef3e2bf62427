"""The command line, the demo, the benchmark."""
