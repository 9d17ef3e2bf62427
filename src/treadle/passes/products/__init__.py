"""Matrix products: summed, joined, batched, with weights in few bits."""
