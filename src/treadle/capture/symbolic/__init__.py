"""Python values that change from call to call: numbers, and computations with them."""
