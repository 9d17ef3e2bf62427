"""Update rules of optimizers: plain tensor operations, with hyper-parameters as tensors."""
