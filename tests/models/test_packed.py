"""Packed sequences: PyTorch packs inside the call, and lengths are values of the batch."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import treadle
from treadle.graph.custom_ops.packed import packed_layer
from treadle.options import from_environment
from treadle.util.errors import CaptureError, RuntimeFailure

PLAIN = replace(from_environment(), codegen=False)


@pytest.mark.parametrize("name", ["lstm", "lstm, projected", "gru", "rnn_tanh"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_packed_layer_equals_eager(name, reverse):
    cell = name.partition(",")[0]
    kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[cell]
    width = 3 if "projected" in name else 7
    settings = {"proj_size": 3} if "projected" in name else {}
    layer = kind(5, 7, bidirectional=True, **settings).double()
    lengths = torch.tensor([6, 4, 1])
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    x[4:, 1] = float("nan")  # padding has no part in anything
    x[1:, 2] = float("inf")
    x.requires_grad_()
    h = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True) if cell == "lstm" else None
    packed, last = layer(pack_padded_sequence(x, lengths), h if c is None else (h, c))
    last = (last,) if c is None else last
    whole = pad_packed_sequence(packed)[0]
    columns = slice(width, None) if reverse else slice(0, width)
    want = [whole[..., columns], *(each[int(reverse)] for each in last)]
    half = len(layer._flat_weights) // 2
    weights = layer._flat_weights[half:] if reverse else layer._flat_weights[:half]
    own_c = None if c is None else c[int(reverse)]
    got = packed_layer(x, lengths, h[int(reverse)], own_c, weights, cell, reverse, None)
    inputs = [x, h, *([] if c is None else [c]), *weights]
    factors = [torch.randn_like(each) for each in want]
    sums = [sum((a * b).sum() for a, b in zip(each, factors, strict=True)) for each in (got, want)]
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
    mine, other = (torch.autograd.grad(each, inputs) for each in sums)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.GRU(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x, lengths, total):
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        rows, last = self.body(rows)
        y, lengths = pad_packed_sequence(
            rows, batch_first=True, padding_value=0.5, total_length=total
        )
        return self.head(y), last, lengths


def make_step(model, optimizer):
    def step(x, lengths, total):
        y, last, lengths = model(x, lengths, total)
        loss = y.square().mean() + last.sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), y.detach(), last.detach(), lengths

    return step


def test_steps_equal_eager_whatever_the_lengths():
    torch.manual_seed(0)
    model = Tagger()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = treadle.compile(make_step(model, ours), model=model, optimizer=ours, options=PLAIN)
    eager = make_step(twin, theirs)
    for lengths in ([2, 5, 3], [5, 1, 4]):
        given = torch.randn(3, 5, 4), torch.tensor(lengths), None
        torch.testing.assert_close(step(*given), eager(*given), rtol=1e-4, atol=1e-5)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeFailure, match=r"has 4 steps[\s\S]*total_length=5"):
        step(torch.randn(3, 5, 4), torch.tensor([2, 4, 3]), None)


USES = {
    "rows": lambda packed: packed.data.sum(),
    "how many rows": lambda packed: torch.ones(3).sum() * packed.data.size(0),
    "sizes": lambda packed: packed.batch_sizes.float().sum(),
}


@pytest.mark.parametrize("use", USES)
def test_other_uses_of_packed_rows_are_refused(use):
    model = nn.GRU(4, 6)

    def step(x, lengths):
        packed, last = model(pack_padded_sequence(x, lengths))
        loss = last.sum() * USES[use](packed)
        loss.backward()
        return loss.detach()

    compiled = treadle.compile(step, model=model, options=PLAIN)
    with pytest.raises(CaptureError, match="TR-141"):
        compiled(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))


def test_a_packed_result_is_refused():
    model = nn.GRU(4, 6)

    def step(x, lengths):
        return model(pack_padded_sequence(x, lengths))[0]

    compiled = treadle.compile(step, model=model, options=PLAIN)
    with pytest.raises(CaptureError, match="TR-141"):
        compiled(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))
