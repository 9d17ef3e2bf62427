"""What a terminal needs: the command line, the demo, the benchmark."""
