"""What a call asks of the process before it runs: words of memory, and which of them changed."""
