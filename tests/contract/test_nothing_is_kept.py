"""A compiled step keeps nothing of a call alive: neither what the caller gave nor what it got."""

import gc
import logging
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def plain(model, x, y):
    return F.mse_loss(model(x), y)


def warned(model, x, y):
    warnings.warn("looks at the frames around", stacklevel=2)
    return F.mse_loss(model(x), y)


def logged(model, x, y):
    logging.getLogger("treadle.tests").info("so does this: %s", x.shape)
    return F.mse_loss(model(x), y)


def branching(model, x, y):
    loss = F.mse_loss(model(x), y)
    return loss * 2 if loss > 1e9 else loss


def augmented(model, x, y):
    x = F.dropout(x, 0.5) + torch.rand_like(x)
    return F.mse_loss(model(x), y)


def per_class(model, x, y):
    return sum(F.mse_loss(model(part), y[:2]) for part in x.split(2)[:2])


LOSSES = [plain, warned, logged, branching, augmented, per_class]


def step_of(loss_of, unpack=lambda *args: args):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(*args):
        optimizer.zero_grad()
        loss = loss_of(model, *unpack(*args))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return treadle.compile(step, model=model, optimizer=optimizer)


def tensors(rows=4):
    return torch.randn(rows, 3), torch.randn(rows, 2)


def check_gone(step, make, sizes=(4, 4, 4)):
    """Nothing that a call was given or gave is there once the next two calls are over."""
    watched = []
    for rows in (*sizes, sizes[-1], sizes[-1]):
        given = make(*tensors(rows))
        result = step(*given)
        flat = [value for each in given for value in parts(each)]
        watched.append([weakref.ref(value) for value in (*flat, result)])
        del given, result, flat
    gc.collect()
    for number, references in enumerate(watched[: len(sizes)]):
        alive = [at for at, reference in enumerate(references) if reference() is not None]
        assert not alive, f"of call {number} these are still there: {alive}"


def parts(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Batch):
        return [value, value.x, value.y]
    return list(value.values()) if isinstance(value, dict) else list(value)


@pytest.mark.filterwarnings("ignore:looks at")
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss: loss.__name__)
def test_tensors_of_a_call(loss_of, tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    check_gone(step_of(loss_of), lambda x, y: (x, y))


@pytest.mark.parametrize(
    ("make", "unpack"),
    [
        (lambda x, y: ({"x": x, "y": y},), lambda batch: (batch["x"], batch["y"])),
        (lambda x, y: ([x, y],), lambda batch: batch),
        (lambda x, y: (Batch(x, y),), lambda batch: (batch.x, batch.y)),
    ],
    ids=["dict", "list", "object"],
)
def test_what_tensors_come_in(make, unpack, tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    check_gone(step_of(plain, unpack), make)


def test_calls_of_several_sizes(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    check_gone(step_of(plain), lambda x, y: (x, y), sizes=(4, 7, 4, 7))


def test_a_step_that_another_process_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    step_of(plain)(*tensors())
    check_gone(step_of(plain), lambda x, y: (x, y))


def test_a_step_that_cannot_be_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    step = step_of(plain)
    with pytest.raises(treadle.TreadleError, match="TR-132"):
        step(torch.randn(4, 9), torch.randn(4, 2))
    check_gone(step, lambda x, y: (x, y))
