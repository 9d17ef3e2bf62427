"""Products of matrices: summed, joined, batched, of weights in few bits."""
