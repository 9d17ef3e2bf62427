"""What a call checks in the process before it runs: memory words, and which of them changed."""
