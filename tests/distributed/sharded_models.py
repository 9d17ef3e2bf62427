"""Models whose parameters are DTensors, and how each of them is trained.

A case is a function that gives a ``Case``: on every rank it is made twice, once to train in eager
mode and once compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOKENS = 33


def sgd(parameters):
    """A short update with state of its own, of fewer operations than AdamW's."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@dataclass
class Case:
    """``batch`` makes the arguments of a call. ``step`` makes the step of a model and its optimizer
    (by default one that clears gradients, and steps at the end), whose update is a short one where
    the case is not about it. ``shared``: how many ranks in a row get the same batches. ``close``:
    how far results and parameters may be apart."""

    model: nn.Module
    batch: Callable[[], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    step: Callable[..., Callable[..., object]] | None = None
    shared: int = 1
    close: float = 4e-6


class Block(nn.Module):
    """A transformer block of width 16 with two heads."""

    def __init__(self, again=False):
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.again = again

    def wide(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        y = self.first(x)
        heads = [f(y).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + (checkpoint(self.wide, y, use_reentrant=False) if self.again else self.wide(y))


class Language(nn.Module):
    """A block between an embedding and a head, which may be one weight."""

    def __init__(self, tied=False, again=False, tokens=TOKENS):
        super().__init__()
        self.embedding = nn.Embedding(tokens, 16)
        self.blocks = nn.ModuleList([Block(again)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, tokens, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def tokens():
    return (torch.randint(0, TOKENS, (2, 9)),)


def language_loss(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())


def pairs(ins=8, outs=4):
    return lambda: (torch.randn(4, ins), torch.randn(4, outs))


def squares(model, x, y):
    return (model(x) - y).square().mean()


def mlp(ins=8, width=16, outs=4, bias=True):
    first, last = nn.Linear(ins, width, bias=bias), nn.Linear(width, outs, bias=bias)
    return nn.Sequential(first, nn.ReLU(), last)


def line():
    """A mesh of all ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def plane(*names):
    """Four ranks, two by two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def fully(model, *modules, mesh=None, **options):
    """``fully_shard`` of each of the modules, and of the model."""
    from torch.distributed.fsdp import fully_shard  # takes seconds

    mesh = mesh or line()
    for each in (*modules, model):
        fully_shard(each, mesh=mesh, **options)
    return model


def policy(**options):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**options)


# -- fully_shard


def nested():
    model = mlp()
    return Case(fully(model, model[0], model[2]), pairs(), squares, adamw)


def around_the_whole():
    return Case(fully(mlp(), reshard_after_forward=True), pairs(), squares)


def uneven():
    model = mlp(7, 5, 3)
    return Case(fully(model, model[0]), pairs(7, 3), squares, adamw)


def nothing_on_a_rank():
    model = mlp(3, 1, 1)
    return Case(fully(model, model[0]), pairs(3, 1), squares, adamw)


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    return Case(fully(model, model[0]), pairs(), squares, adamw)


def momentum():
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    return Case(fully(mlp()), pairs(), squares, optimizer)


def muon():
    def optimizer(parameters):
        return torch.optim.Muon(parameters, lr=1e-2)

    model = mlp(bias=False)
    return Case(fully(model, model[0]), pairs(), squares, optimizer, close=1e-3)


def along_the_second_dim():
    model = mlp()
    placement = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    return Case(fully(model, model[0], **placement), pairs(), squares)


def half_precision():
    model = Language()
    options = {"mp_policy": policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    return Case(fully(model, *model.blocks, **options), tokens, language_loss, close=1e-3)


def inputs_and_outputs():
    options = policy(param_dtype=torch.float64, output_dtype=torch.float32)
    return Case(fully(mlp(), mp_policy=options), pairs(), squares, adamw)


def sums_of_float16():
    model = fully(mlp(), mp_policy=policy(reduce_dtype=torch.float16))
    return Case(model, pairs(), squares, close=5e-5)


def other_divisors():
    model = mlp()
    fully(model, model[0])
    for each, divisor in ((model, 4.0), (model[0], 8.0)):
        each.set_gradient_divide_factor(divisor)
        each.set_force_sum_reduction_for_comms(True)
    return Case(model, pairs(), squares)


def tied():
    model = Language(tied=True)
    return Case(fully(model, *model.blocks), tokens, language_loss)


def checkpointed():
    model = Language(again=True)
    return Case(fully(model, *model.blocks), tokens, language_loss)


def modules_in_a_group():
    from torch.distributed.fsdp import fully_shard

    model = Language()
    fully_shard([model.norm, model.head], mesh=line())
    return Case(fully(model, *model.blocks), tokens, language_loss)


def methods_as_forwards():
    from torch.distributed.fsdp import register_fsdp_forward_method

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def first(self, x):
            return self.a(x).relu()

        def forward(self, x):
            return self.b(self.first(x))

    def loss(model, x, y):
        return squares(model, x, y) + model.first(x).square().mean()

    model = fully(Two())
    register_fsdp_forward_method(model, "first")
    return Case(model, pairs(), loss)


def micro_batches(keeps):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            for at in range(2):
                if keeps:
                    model.set_requires_gradient_sync(at == 1)
                loss = squares(model, x[2 * at : 2 * at + 2], y[2 * at : 2 * at + 2])
                loss.backward()
            optimizer.step()
            return loss

        return step

    model = mlp()
    return Case(fully(model, model[0]), pairs(), squares, step=step_of)


def accumulated():
    return micro_batches(keeps=False)


def reduced_once():
    return micro_batches(keeps=True)


def clipped(returned):
    def step_of(model, optimizer):
        def step(x, y):
            squares(model, x, y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return returned(norm)

        return step

    model = mlp()
    return Case(fully(model, model[0]), pairs(), squares, step=step_of)


def norm_of_all():
    return clipped(DTensor.full_tensor)


def norm_as_it_is():
    return clipped(lambda norm: norm)


FULLY_SHARDED = (
    nested, around_the_whole, uneven, nothing_on_a_rank, frozen, momentum, muon,
    along_the_second_dim, half_precision, inputs_and_outputs, sums_of_float16, other_divisors, tied,
    checkpointed, modules_in_a_group, methods_as_forwards, accumulated, reduced_once, norm_of_all,
    norm_as_it_is,
)  # fmt: skip


# -- tensor parallelism


def split(model, mesh):
    """Every block's projections over the ranks of ``mesh``."""
    names = {**dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())}
    for block in model.blocks:
        parallelize_module(block, mesh, names | dict.fromkeys(("o", "down"), RowwiseParallel()))
    return model


def columns_and_rows(**options):
    model, mesh = mlp(**options), line()
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def layers():
    return Case(columns_and_rows(), pairs(), squares, adamw, shared=2)


def split_vocabulary():
    model, mesh = split(Language(), line()), line()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh, ends)
    return Case(model, tokens, language_loss, adamw, shared=2)


def split_loss():
    model, mesh = split(Language(tokens=34), line()), line()
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"head": head})

    def step_of(model, optimizer):
        def step(x):
            with loss_parallel():
                loss = language_loss(model, x)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return Case(model, tokens, language_loss, step=step_of, shared=2)


def sequences():
    """The gradients of the norm are summands, which the optimizer's update adds."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parts = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, line(), parts)

    def batch():
        return torch.randn(2, 4, 8), torch.randn(2, 4, 8)

    return Case(model, batch, squares, adamw, shared=2)


def batches_that_are_split():
    mesh = line()
    model = distribute_module(mlp(), mesh)

    def batch():
        return tuple([distribute_tensor(each, mesh, [Shard(0)]) for each in pairs()()])

    return Case(model, batch, squares, adamw, shared=2)


def statistics():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    ends = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    return Case(parallelize_module(model, line(), ends), pairs(), squares, shared=2)


def split_muon():
    def optimizer(parameters):
        return torch.optim.Muon(parameters, lr=1e-2)

    return Case(columns_and_rows(bias=False), pairs(), squares, optimizer, shared=2)


TENSOR_PARALLEL = (
    layers, split_vocabulary, split_loss, sequences, batches_that_are_split,
    statistics, split_muon,
)  # fmt: skip


# -- both, on four ranks


def parts_and_copies():
    model = Language(tied=True)
    return Case(fully(model, *model.blocks, mesh=plane("copy", "part")), tokens, language_loss)


def parts_of_parts():
    mesh = plane("data", "tensor")
    model = split(Language(), mesh["tensor"])
    fully(model, *model.blocks, mesh=mesh["data"])
    return Case(model, tokens, language_loss, shared=2)


ON_A_PLANE = (parts_and_copies, parts_of_parts)
