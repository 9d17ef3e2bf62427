"""A second process starts without a trace on a GPU too."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(101, 48), nn.LayerNorm(48), nn.Linear(48, 101)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(7 * 33, device="cuda").view(7, 33) % 101
if "eager" in sys.argv:
    model(tokens)

import treadle


def train(tokens):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


step = treadle.compile(train, model=model, optimizer=optimizer)
losses = [step(tokens).item() for _ in range(4)]
print(step.compiled.untraced, step.compiled.start.differs, losses)
"""


@pytest.mark.parametrize("before", [(), ("eager",)])
def test_a_second_process_traces_nothing_under_autocast(before, tmp_path):
    environment = {**os.environ, "TREADLE_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def process(*arguments):
        command = [sys.executable, str(tmp_path / "train.py"), *arguments]
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        return run.stdout.splitlines()[-1]

    first, second = process(*before), process(*before)
    assert first.startswith("False")
    assert second == first.replace("False", "True", 1)
