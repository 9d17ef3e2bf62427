"""Training steps of several ranks, beside eager's: what each of them runs in a process of its own.

::

    torchrun --nproc-per-node 1 tests/gpu/ranks_on_one_gpu.py nccl
    torchrun --nproc-per-node 2 tests/gpu/ranks_on_one_gpu.py gloo      one GPU for both

NCCL wants a GPU for each rank; Gloo goes through the host, and needs none of its own. Prints a line
a case, and fails at the first that differs.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import treadle

STEPS = 6


def model():
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)).cuda()


def training(net, optimizer, *, clips):
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batches(rank):
    torch.manual_seed(100 + rank)
    return [(torch.randn(32, 64).cuda(), torch.randint(10, (32,)).cuda()) for _ in range(STEPS)]


def wrapped(net):
    return DistributedDataParallel(net, device_ids=[0])


def sharded(net):
    for each in net:
        if isinstance(each, nn.Linear):
            fully_shard(each)
    fully_shard(net)
    return net


def whole(net):
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in net.state_dict().items()
    }


CASES = {
    "DistributedDataParallel": (wrapped, wrapped, {}),
    "DataParallel": (wrapped, lambda net: net, {"parallel": treadle.DataParallel()}),
    'shard="optimizer"': (
        wrapped,
        lambda net: net,
        {"parallel": treadle.DataParallel(shard="optimizer")},
    ),
    "fully_shard": (sharded, sharded, {}),
}
ON_GLOO = ("DistributedDataParallel", "DataParallel")
"""Gloo has no reduce-scatter of tensors on a GPU."""


def compared(name, *, clips):
    by_eager, by_treadle, options = CASES[name]
    first = model()
    eager, ours = by_eager(copy.deepcopy(first)), by_treadle(first)
    makers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (eager, ours)]
    plain = training(eager, makers[0], clips=clips)
    step = treadle.compile(
        training(ours, makers[1], clips=clips), model=ours, optimizer=makers[1], **options
    )
    for x, y in batches(dist.get_rank()):
        torch.testing.assert_close(step(x, y), plain(x, y), rtol=1e-4, atol=1e-5)
    theirs = {name.removeprefix("module."): each for name, each in whole(eager).items()}
    for key, each in whole(ours).items():
        best = theirs[key.removeprefix("module.")]
        torch.testing.assert_close(each, best, rtol=2e-3, atol=2e-4)
    sent = [line for line in step.graph("clean").splitlines() if "c10d" in line]
    assert sent or dist.get_world_size() == 1
    print(f"rank {dist.get_rank()}: {name}, clipping {clips}: equal", flush=True)


def main():
    backend = sys.argv[1]
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    for name in CASES if backend == "nccl" else ON_GLOO:
        for clips in (False, True):
            compared(name, clips=clips)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ.get("WORLD_SIZE"), __doc__
    main()
