"""Steps as people write them, beside eager: models, modes, arguments, clipping, averages."""

import collections
import dataclasses
import enum
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import treadle
from contract.contract_help import assert_same_state, beside_eager, training


def mlp(*widths):
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def stepping(loss_of, model, optimizer):
    return training(functools.partial(loss_of, model), optimizer)


@pytest.mark.parametrize("kind", [list, dict])
def test_two_models_two_optimizers_two_backwards(kind):
    def make():
        g, d = mlp(4, 8, 3), mlp(3, 8, 1)
        og = torch.optim.Adam(g.parameters(), lr=0.01)
        od = torch.optim.AdamW(d.parameters(), lr=0.01)
        real_score = F.binary_cross_entropy_with_logits

        def step(real, z):
            fake = g(z)
            ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
            of_d = real_score(d(real), ones) + real_score(d(fake.detach()), zeros)
            od.zero_grad()
            of_d.backward()
            od.step()
            of_g = real_score(d(fake), ones)
            og.zero_grad()
            of_g.backward()
            og.step()
            return {"d": of_d.detach(), "g": of_g.detach()}

        if kind is list:
            return step, [g, d], [og, od]
        return step, {"g": g, "d": d}, {"g": og, "d": od}

    beside_eager(make, lambda _: (torch.randn(6, 3), torch.randn(6, 4)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.head(self.frozen(self.table(x)))


def test_tied_frozen_and_unused_parameters_in_groups():
    def make():
        model = Tied()
        groups = [
            {"params": [model.table.weight], "lr": 0.1},
            {"params": model.unused.parameters(), "weight_decay": 0.3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        step = stepping(lambda m, x, y: F.cross_entropy(m(x), y), model, optimizer)
        return step, model, optimizer

    beside_eager(make, lambda _: (torch.randint(11, (7,)), torch.randint(11, (7,))))


def test_train_and_eval_toggle_without_new_compiles():
    def make():
        model = nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return stepping(lambda m, x, y: F.mse_loss(m(x), y), model, optimizer), model, optimizer

    def between(number, model):
        model.eval()
        model(torch.zeros(2, 5))  # usable eagerly at any time
        model.train(number % 2 == 0)

    step = beside_eager(
        make, lambda _: (torch.randn(8, 5), torch.randn(8, 2)), steps=8, between=between
    )
    assert step.recompiles == ["1 and 1 more: switched to eval()"]


class Kind(enum.Enum):
    PLAIN = 1
    NEGATIVE = 2


@dataclasses.dataclass
class Whole:
    x: torch.Tensor
    times: int


Pair = collections.namedtuple("Pair", "first second")


def test_python_values_are_part_of_the_key_and_named():
    model = nn.Linear(3, 3)

    def step(x, scale, mode="plain", kind=Kind.PLAIN, flag=None, nested=None):
        y = model(x) * scale
        y = y.relu() if mode == "relu" else y
        y = -y if kind is Kind.NEGATIVE else y
        y = y + 1 if flag else y
        return (y if nested is None else y + nested["p"][0].first).sum()

    compiled = treadle.compile(step, model=model)
    x = torch.randn(2, 3)
    nested = {"p": [Pair(torch.ones(3), 5)]}
    calls = [
        ((x, 2), {}, None),
        ((x, 3), {}, "argument scale: 2 became 3"),
        ((x, 2.0), {}, None),  # any int became any float: captured again, and the same program
        ((x, 2), {"mode": "relu"}, "argument mode: 'plain' became 'relu'"),
        ((x, 2), {"kind": Kind.NEGATIVE}, "argument kind is new"),
        ((x, 2), {"flag": True}, "argument flag: None became True"),
        ((x, 2), {"nested": nested}, "argument nested['p'][0].first is new"),
    ]
    for _ in range(2):
        for args, kwargs, _ in calls:
            torch.testing.assert_close(compiled(*args, **kwargs), step(*args, **kwargs))
    assert compiled.recompiles == [why for *_, why in calls if why]
    assert compiled.recaptures == ["argument scale: any int became any float"]


def test_a_dataclass_that_pytorch_does_not_know():
    model = nn.Linear(3, 3)

    def step(whole):
        return (model(whole.x) * whole.times).sum()

    compiled = treadle.compile(step, model=model)
    for times in (2, 5):
        whole = Whole(torch.randn(2, 3), times)
        torch.testing.assert_close(compiled(whole), step(whole))


CLIPS = {
    "norm": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5),
    "largest": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, norm_type=float("inf")),
    "sum": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, norm_type=1),
    "foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, foreach=True),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping(name):
    def make():
        model = mlp(5, 7, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            norm = CLIPS[name](list(model.parameters()))
            optimizer.step()
            return loss.detach(), norm  # .grad stays, and is cleared by nobody

        return step, model, optimizer

    beside_eager(make, lambda _: (torch.randn(6, 5),))


@pytest.mark.parametrize("clear", ["none", "zero", "start", "never"])
def test_grad_is_what_the_step_leaves(clear):
    def make():
        model = mlp(5, 7, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            if clear == "start":
                optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            if clear in ("none", "zero"):
                optimizer.zero_grad(set_to_none=clear == "none")
            return loss.detach()

        return step, model, optimizer

    beside_eager(make, lambda _: (torch.randn(6, 5),), steps=3)


AVERAGES = {
    "mean": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "mean of all": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "one by one": {"avg_fn": lambda a, m, n: 0.8 * a + 0.2 * m},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models_under_autocast(name):
    def make():
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
        average = AveragedModel(model, **AVERAGES[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            return loss.detach()

        return step, [model, average], optimizer

    step = beside_eager(
        make, lambda _: (torch.randn(6, 5), torch.randint(3, (6,))), rtol=2e-2, atol=2e-2
    )
    assert step.recompiles == []


def test_an_average_is_exact_in_float32_and_goes_on_eagerly():
    def make():
        model = mlp(5, 7, 3)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            return loss.detach()

        return step, [model, average], optimizer

    torch.manual_seed(0)
    function, models, optimizer = make()
    torch.manual_seed(0)
    eager, twins, other = make()
    step = treadle.compile(function, model=models, optimizer=optimizer)
    for number in range(6):
        x = torch.randn(6, 5)
        (function if number % 2 else step)(x)
        eager(x)
        assert_same_state((models, optimizer), (twins, other), rtol=1e-5, atol=1e-6)
    assert int(models[1].n_averaged) == 6


def test_a_number_that_an_operation_asks_for_is_refused_with_its_line():
    """``_foreach_lerp_`` with a tensor as its weight wants a number behind the scenes."""
    model = nn.Linear(3, 3)
    average = AveragedModel(
        model,
        multi_avg_fn=lambda a, m, n: torch._foreach_lerp_(a, m, 1 / (n + 1)),
    )
    step = treadle.compile(lambda: average.update_parameters(model), model=[model, average])
    with pytest.raises(treadle.CaptureError, match="TR-102") as caught:
        step()
    assert "test_loops_of_users.py" in caught.value.where
