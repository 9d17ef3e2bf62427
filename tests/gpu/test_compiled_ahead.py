"""A first call compiles no device code: workers have compiled what its launches ask for."""

import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.runtime.kernels import triton_ahead


def entries(folder):
    """Device code, and what Triton compiles on the host to launch it."""
    return {path.parent.name for kind in ("cubin", "so") for path in folder.glob(f"*/*.{kind}")}


def test_launches_find_what_workers_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton_ahead, "_FUNCTIONS_PER_WORKER", 1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(101, 48), nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 101)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(tokens):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    options = treadle.Options(cache_dir=str(tmp_path / "cache"))
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    tokens = torch.randint(0, 101, (7, 33), device="cuda")
    step.prepare(tokens)
    compiled = entries(tmp_path / "triton")
    assert len(compiled) > 3
    for _ in range(4):
        step(tokens)
    assert entries(tmp_path / "triton") == compiled
