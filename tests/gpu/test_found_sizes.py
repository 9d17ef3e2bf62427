"""On a real GPU: sizes that nobody declared. Networks of several kinds, whose batches change in
rows or in length from call to call, against eager."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from sized_models import Images, autocast_training

WORDS = 211


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.cells, self.head = nn.LSTM(32, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, tokens):
        return self.head(self.cells(self.words(tokens))[0][:, -1])


class Encoder(nn.Module):
    """PyTorch's own layers, with padding that they are told of."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 64, padding_idx=0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens):
        hidden = self.layers(self.words(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden.mean(1))


class Rows(nn.Module):
    """Each row by itself, with what is dropped of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(24, 96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, 24), nn.LayerNorm(24)
        )
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.layers(x) + x)


def images(rows):
    return torch.randn(rows, 3, 16, 16, device="cuda")


def rows_of(rows):
    return torch.randn(rows, 24, device="cuda")


def tokens(length):
    return torch.randint(1, WORDS, (6, length), device="cuda")


def padded(length):
    drawn = tokens(length)
    drawn[1::2, (length + 1) // 2 :] = 0
    return drawn


def trained(model, autocast):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    dtype = torch.bfloat16 if autocast else None
    return optimizer, autocast_training(model, optimizer, F.cross_entropy, dtype)


@pytest.mark.parametrize(
    ("kind", "draw", "autocast"),
    [
        *((Images, images, False), (Images, images, True), (Recurrent, tokens, True)),
        *((Encoder, padded, True), (Rows, rows_of, False)),
    ],
    ids=["images-f32", "images-bf16", "recurrent-bf16", "encoder-bf16", "rows-f32"],
)
def test_any_size_is_eagers(kind, draw, autocast):
    """A step of each size starts from eager's parameters."""
    torch.manual_seed(0)
    model = kind().cuda()
    twin = copy.deepcopy(model)
    optimizer, train = trained(model, autocast)
    others, eager = trained(twin, autocast)
    step = treadle.compile(train, model=model, optimizer=optimizer)
    close = {"rtol": 0.03, "atol": 0.02} if autocast else {"rtol": 2e-3, "atol": 2e-4}
    for number, size in enumerate([24, 17, 16, 3, 17, 17, 40, 33]):
        x = draw(size)
        y = torch.randint(10, (len(x),), device="cuda")
        torch.manual_seed(number)
        loss = step(x, y)
        torch.manual_seed(number)
        torch.testing.assert_close(loss, eager(x, y), **close)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=3e-3)
        model.load_state_dict(twin.state_dict())
        optimizer.load_state_dict(copy.deepcopy(others.state_dict()))
    assert len(step.recompiles) <= 2, step.recompiles  # up to 24 and 64


def test_parts_of_longer_batches_and_numbers_of_their_sizes():
    """Tokens and the next ones, with a running average in Python."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 32), nn.LayerNorm(32), nn.Linear(32, WORDS)).cuda()
    twin = copy.deepcopy(model)

    def made(model, totals):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(tokens, labels):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            (loss * math.sqrt(tokens.shape[1])).backward()
            optimizer.step()
            optimizer.zero_grad()
            totals["loss"] += loss.item() * tokens.shape[1]
            totals["length"] += tokens.shape[1]
            return loss.detach()

        return train, optimizer

    totals, others = ({"loss": 0.0, "length": 0} for _ in range(2))
    train, optimizer = made(model, totals)
    eager, _ = made(twin, others)
    step = treadle.compile(train, model=model, optimizer=optimizer)
    for length in (33, 17, 9, 32, 2, 17, 17):
        text = torch.randint(WORDS, (6, length + 1), device="cuda")
        batch = text[:, :-1], text[:, 1:]
        torch.testing.assert_close(step(*batch), eager(*batch), rtol=2e-3, atol=2e-4)
        assert totals["length"] == others["length"]
        assert math.isclose(totals["loss"], others["loss"], rel_tol=2e-3)
    assert len(step.recompiles) == 1, step.recompiles
