"""On a real GPU: steps that check values, recorded in parts around the one look at them;
indices that are looked at by the device."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


def made():
    torch.manual_seed(0)
    parts = [nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*parts, *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x, y, var):
        optimizer.zero_grad()
        loss = F.gaussian_nll_loss(model(x), y, var)
        assert torch.isfinite(loss), "the loss is no number"
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def batch(number, bad):
    made = torch.Generator().manual_seed(number)
    x, y = torch.randn(32, 16, generator=made), torch.randn(32, 4, generator=made)
    var = torch.rand(32, 4, generator=made) + 0.1
    if bad:
        var[3, 1] = -1.0
    return x.cuda(), y.cuda(), var.cuda()


@pytest.mark.parametrize("bad", [(0,), (2,), (3,), (7, 8)], ids=str)
def test_a_check_that_fails_changes_nothing_and_raises_eagers_error(bad, tmp_path):
    (function, model, optimizer), (eager, twin, _) = made(), made()
    options = treadle.Options(cache_dir=tmp_path)
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    for number in range(12):
        given = batch(number, number in bad)
        weights = [each.detach().clone() for each in model.parameters()]
        torch.cuda.manual_seed(number)
        if number in bad:
            with pytest.raises(ValueError, match="negative entry"):
                step(*given)
            assert all(map(torch.equal, weights, model.parameters()))
        else:
            ours = step(*given)
        random = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(number)
        if number in bad:
            with pytest.raises(ValueError, match="negative entry"):
                eager(*given)
        else:
            torch.testing.assert_close(ours, eager(*given), rtol=1e-3, atol=1e-4)
        assert torch.equal(random, torch.cuda.get_rng_state())
        for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    replay = step.compiled.executable.replay
    assert replay is not None
    assert replay.is_recorded, replay.note


def test_an_index_that_the_step_checks_does_not_reach_the_device():
    model = nn.Embedding(10, 8).cuda()

    def look(tokens):
        if (tokens >= 10).any():
            raise KeyError("no such word")
        return model(tokens).sum()

    step = treadle.compile(look, model=model)
    for token in (3, 99, 4):
        tokens = torch.tensor([0, token]).cuda()
        if token == 99:
            with pytest.raises(KeyError, match="no such word"):
                step(tokens)
        else:
            torch.testing.assert_close(step(tokens), look(tokens))


BAD_LABEL = """
import copy, sys
import torch
from torch import nn
from torch.nn import functional as F
import treadle

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 5)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(x, y):
    loss = F.cross_entropy(model(x), F.pad(y, (1, 0), value=-100)[1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

step = treadle.compile(step, model=model, optimizer=optimizer)
good = [torch.randint(n, (6,), device="cuda") for n in (11, 5)]
for _ in range(int(sys.argv[1])):
    print(float(step(*good)), flush=True)
print("recorded" if "as one CUDA graph" in step.explain() else "launched", flush=True)
bad = [each.clone() for each in good]
bad[sys.argv[2] == "label"][3] = 12
step(*bad)
torch.cuda.synchronize()
print("went on")
"""


@pytest.mark.parametrize("which", ["token", "label"])
@pytest.mark.parametrize(("calls", "how"), [(1, "launched"), (7, "recorded")])
def test_a_bad_index_stops_the_device(calls, how, which):
    run = [sys.executable, "-c", BAD_LABEL, str(calls), which]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout.split()
    assert said[-1] == how, done.stderr
    assert "TR-407" in done.stderr, "the assertion of the device says so"
    assert done.returncode
