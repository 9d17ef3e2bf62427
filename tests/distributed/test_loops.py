"""The four loops of ``examples/`` on two ranks: losses are those of one rank on the joint batch."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

GPT2 = "transformers.models.gpt2.modeling_gpt2"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(eager):
    return load("plain_loop").train(0, 5, eager=eager, dropout=0.0)[0]


def of_a_framework(name, batch, folder):
    """As torchrun starts it: the framework makes the process group."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    port = str(29400 + int(folder) % 2000)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    try:
        return load(name).train(4, batch=batch)
    finally:
        if not dist.is_initialized():  # the harness closes it
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def alone(name, batch):
    torch._dynamo.reset()
    return load(name).train(4, eager=True, batch=batch)


def test_the_plain_loop(launch):
    joint = load("plain_loop").train(0, 5, eager=True, dropout=0.0)[0]
    for rank in launch(2, plain, False):
        assert rank.value == pytest.approx(joint, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "imports", "batch"),
    [
        ("hf_trainer", ("accelerate", "transformers.trainer", GPT2), 4),
        ("lightning_loop", ("lightning",), 16),
        ("accelerate_loop", ("accelerate",), 16),
    ],
)
def test_loops_of_frameworks(launch, name, imports, batch):
    pytest.importorskip(imports[0])
    joint = alone(name, 2 * batch)
    for rank in launch(2, of_a_framework, name, batch, os.getpid(), timeout=120, imports=imports):
        assert rank.value == pytest.approx(joint, rel=1e-3)
