"""Programs with collectives, for tests: by the operators that capture leaves in graphs."""

import random
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from treadle.compat.distributed.collectives import collective_op

WAIT = collective_op("wait_tensor")
GROUP = "0"
"""The name of the group of all ranks, which is the first that a process makes."""


def start_all_reduce(x: Tensor, group: str = GROUP) -> Tensor:
    """Sums over the ranks: started."""
    return collective_op("all_reduce")(x, "sum", group)


def all_reduced(x: Tensor, group: str = GROUP) -> Tensor:
    """The sum over the ranks, waited for at once."""
    return WAIT(start_all_reduce(x, group))


def gathered(x: Tensor, ranks: int = 1, group: str = GROUP) -> Tensor:
    """What all ranks have, along dim 0."""
    return WAIT(collective_op("all_gather_into_tensor")(x.contiguous(), ranks, group))


@contextmanager
def alone(folder):
    """This process as the only rank of its group."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def two_layers(x, a, b):
    """A forward and backward pass with the updates of two weights, as data-parallel capture leaves
    it: each gradient is reduced, waited for and used right where it is made."""
    h = x @ a
    y = h @ b
    b_new = b - all_reduced(h.t() @ y)
    g = y @ b.t()
    a_new = a - all_reduced(x.t() @ g)
    return a_new, b_new


def generated(seed: int, operations: int = 12):
    """A program of products, sums and collectives on square matrices, different for each seed, and
    how many inputs it takes."""

    def program(x, y):
        choose = random.Random(seed)
        values = [x, y]
        for _ in range(operations):
            left, right = choose.choice(values[-5:]), choose.choice(values)
            match choose.randrange(6):
                case 0 | 1:
                    values.append(torch.tanh(left @ right))
                case 2:
                    values.append(left - 0.5 * right)
                case 3:
                    values.append(left.t())
                case 4:
                    values.append(all_reduced(left))
                case _:
                    values.append(gathered(left)[: x.shape[0]] * 0.5)
        return tuple(values[-3:])

    return program
