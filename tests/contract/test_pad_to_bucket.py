"""Batches padded to buckets: losses and gradients are those of the real tokens alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

WORDS, WIDTH = 13, 8
NAMED = {"tokens": ("batch", "time"), "labels": ("batch", "time")}


def shapes(**ranges):
    return treadle.dynamic(NAMED, **({"batch": (1, 64), "time": (1, 8, 16, 32)} | ranges))


def tokens(rows, time):
    return {name: torch.randint(1, WORDS, (rows, time)) for name in NAMED}


class Causal(nn.Module):
    """Places look at what comes before them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(40, WIDTH)
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, mask=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = (each[:, None] for each in self.qkv(self.norm(x)).chunk(3, -1))
        if mask is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.head(x + attended[:, 0])


def loss_of(model, tokens, labels, mask=None):
    return F.cross_entropy(model(tokens, mask).flatten(0, 1), labels.flatten())


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_dims_of_several_buckets_end_where_theirs_does():
    padded = treadle.pad_to_bucket(tokens(3, 11), shapes())
    assert {name: tuple(t.shape) for name, t in padded.items()} == {
        "tokens": (3, 16), "labels": (3, 16)
    }  # fmt: skip
    assert (padded["tokens"][:, 11:] == 0).all()
    assert (padded["labels"][:, 11:] == -100).all()


def test_a_batch_that_ends_with_its_bucket_is_the_same():
    batch = tokens(3, 16)
    padded = treadle.pad_to_bucket(batch, shapes())
    assert all(padded[name] is batch[name] for name in batch)


@pytest.mark.parametrize("time", [1, 2, 7, 8, 9, 31])
def test_the_loss_and_its_gradients_are_those_of_the_real_tokens(time):
    torch.manual_seed(0)
    model, batch = Causal().double(), tokens(3, time)
    padded = treadle.pad_to_bucket(batch, shapes(batch=(1, 4, 8)))
    assert padded["tokens"].shape == (4, next(n for n in (8, 16, 32) if n >= time))
    exact, other = loss_of(model, **batch), loss_of(model, **padded)
    close = {"rtol": 1e-13, "atol": 1e-15}
    torch.testing.assert_close(other, exact, **close)
    for mine, theirs in zip(gradients(model, other), gradients(model, exact), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-14)


def test_a_mask_hides_what_was_added():
    torch.manual_seed(0)
    model, batch = Causal().double(), tokens(3, 11)
    batch["mask"] = torch.rand(3, 11) > 0.2
    batch["mask"][:, 0] = True
    declared = treadle.dynamic(NAMED | {"mask": (None, "time")}, batch=(1, 8), time=(1, 16))
    padded = treadle.pad_to_bucket(batch, declared, sizes={"time": [16, 32]})
    assert padded["mask"].dtype is torch.bool
    assert not padded["mask"][:, 11:].any()
    torch.testing.assert_close(
        loss_of(model, **padded), loss_of(model, **batch), rtol=1e-13, atol=0
    )


def test_what_is_to_be_filled_in_is_said_by_name():
    batch = tokens(2, 3) | {"weights": torch.ones(2, 3), "name": torch.ones(5)}
    declared = treadle.dynamic(
        {"batch['tokens']": (None, "t"), "batch['weights']": (None, "t"), "x['labels']": {-1: "t"}},
        t=(1, 4, 8),
    )
    padded = treadle.pad_to_bucket(
        batch, declared, labels=("labels",), ignore_index=-1, fill={"tokens": 12}
    )
    assert padded["tokens"][:, 3].tolist() == [12, 12]
    assert padded["labels"][:, 3].tolist() == [-1, -1]
    assert padded["weights"][:, 3].tolist() == [0, 0]
    assert padded["name"] is batch["name"]


def test_refusals():
    with pytest.raises(treadle.TreadleError, match=r"TR-113.*time is 33"):
        treadle.pad_to_bucket(tokens(2, 33), shapes())
    with pytest.raises(treadle.TreadleError, match=r"TR-113.*time is 3 in tokens"):
        treadle.pad_to_bucket(tokens(2, 3) | {"labels": torch.zeros(2, 4)}, shapes())
    with pytest.raises(
        treadle.TreadleError, match=r"TR-001.*time is 31, larger than the last of 8, 16"
    ):
        treadle.pad_to_bucket(tokens(2, 31), shapes(), sizes={"time": (16, 8)})
    twice = treadle.dynamic({"a['x']": ("n",), "b['x']": ("n",)}, n=(1, 2, 4))
    with pytest.raises(treadle.TreadleError, match="x may be any of"):
        treadle.pad_to_bucket({"x": torch.ones(1)}, twice)


def test_a_step_runs_few_sizes_and_is_eager_on_the_real_tokens():
    torch.manual_seed(0)
    model = Causal()
    twin = copy.deepcopy(model)

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens, labels):
            loss = loss_of(model, tokens, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    function, optimizer = train(model)
    eager, _ = train(twin)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    for time in (5, 11, 7, 3, 15, 12):
        batch = tokens(2, time)
        loss = step(**treadle.pad_to_bucket(batch, shapes()))
        torch.testing.assert_close(loss, eager(**batch))
    assert len(step.recompiles) == 1
