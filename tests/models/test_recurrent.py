"""Recurrent layers write gates in place through views; they train as in eager."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


class Reader(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(31, 8), kind(8, 12, 2, batch_first=True)
        self.out = nn.Linear(12, 31)

    def forward(self, ids):
        return self.out(self.body(self.embed(ids))[0])


def make_step(model, optimizer):
    def step(ids):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("memory", [None, 0.0])
def test_five_steps_equal_eager(kind, memory):
    torch.manual_seed(0)
    model = Reader(kind)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, twin))
    step = treadle.compile(make_step(model, ours), model=model, optimizer=ours, memory=memory)
    eager = make_step(twin, theirs)
    for _ in range(5):
        ids = torch.randint(31, (3, 6))
        torch.testing.assert_close(step(ids), eager(ids), rtol=1e-4, atol=1e-5)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    assert not step.compiled.artifact.fallbacks
    report = step.measure(ids)
    assert report.peak_bytes == pytest.approx(step.compiled.artifact.peak_bytes, rel=0.05)
