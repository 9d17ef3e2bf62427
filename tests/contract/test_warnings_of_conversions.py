"""What PyTorch warns of when Python makes a number of a tensor that requires grad, beside eager."""

import pytest

PROGRAM = """
import math, sys, warnings
import torch
from torch import nn
import treadle

kind, how = sys.argv[1:]
model = nn.Linear(4, 1)
total = 0.0


def converted(loss):
    if kind == "float":
        return float(loss)
    if kind == "mapped":
        return sum(map(float, [loss, loss]))
    if kind == "math":
        return math.sqrt(loss)
    if kind == "text":
        return "%.3f" % loss
    if kind == "detached":
        return float(loss.detach())
    return loss.item() + int(loss)


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    return converted(loss)


compiled = treadle.compile(step, model=model) if how == "compiled" else step
for _ in range(2):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        compiled(torch.randn(3, 4))
    for each in heard:
        print(each.category.__name__, each.filename, each.lineno, each.message)
    print("--")
"""


@pytest.mark.parametrize("kind", ["float", "mapped", "math", "text", "detached", "item"])
def test_the_first_call_warns_as_eager(kind, tmp_path, forks):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    eager, compiled = (forks.run(path, kind, how, quick=True) for how in ("eager", "compiled"))
    assert eager.returncode == 0, eager.stderr
    assert (compiled.returncode, compiled.stdout) == (0, eager.stdout), compiled.stderr
    assert (kind in ("detached", "item")) == ("requires_grad=True" not in eager.stdout)
