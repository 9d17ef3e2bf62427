"""Numbers of a schedule in an array of NumPy's, looked up by a counter that decides as well."""

import subprocess
import sys

ALONE = """
import numpy as np
import torch
from torch import nn

import treadle

SCHEDULE = np.concatenate((np.linspace(0, 0.1, 4), np.linspace(0.1, 0.05, 6)))
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(x, it, epoch):
    for group in optimizer.param_groups:
        group["lr"] = SCHEDULE[it]
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if epoch < 1:
        pass
    optimizer.step()
    return loss.detach()


step = treadle.compile(
    step, model=model, optimizer=optimizer, options=treadle.Options(codegen=False)
)
for it in range(8):
    step(torch.randn(4, 3), it, it // 4)
print(len(step.recompiles) + len(step.recaptures))
"""


def test_a_schedule_in_an_array_is_looked_up_at_each_call(tmp_path):
    """A fresh interpreter: what a capture looks up in Python's ``dis`` for the first time there is
    none of the step's reads."""
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=300
    )
    # the type of the first learning rate, and the second path
    assert int(run.stdout.splitlines()[-1]) == 2, run.stdout + run.stderr
