"""On a real GPU: steps with a part on the host, which are replayed in parts, beside eager."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

import treadle

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def averaged():
    """A counter on the host decides how an average goes on."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 16, bias=False)  # a bias before the norm has a gradient of rounding alone
    model = nn.Sequential(layer, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.detach()

    def batch(number):
        made = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 8, generator=made), torch.randint(3, (16,), generator=made)
        return x.cuda(), y.cuda()

    return [model, average], optimizer, step, batch


def speech(lengths_on: str):
    """The loss waits for lengths, or reads those on the host, and its backward does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 12, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x, y, lengths):
        odds = model(x).permute(2, 0, 1).log_softmax(-1)
        full = torch.full((x.shape[0],), odds.shape[0], device=lengths.device)
        loss = F.ctc_loss(odds, y, full, lengths, zero_infinity=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch(number):
        made = torch.Generator().manual_seed(number)
        x = torch.randn(4, 8, 24, generator=made)
        y = torch.randint(1, 12, (4, 6), generator=made)
        lengths = torch.randint(2, 6, (4,), generator=made)
        return x.cuda(), y.cuda(), lengths.to(lengths_on)

    return [model], optimizer, step, batch


def looked_at():
    """What goes to the host in the middle comes back, and some of it is returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        odds = model(x)
        weights = (odds.detach().square().mean(0).cpu() + 1).cuda()
        loss = F.cross_entropy(odds, y, weight=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), weights, odds.detach().cpu()

    def batch(number):
        made = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 8, generator=made), torch.randint(3, (16,), generator=made)
        return x.cuda(), y.cuda()

    return [model], optimizer, step, batch


CASES = {
    "a counter on the host": averaged,
    "lengths on the device": lambda: speech("cuda"),
    "lengths on the host": lambda: speech("cpu"),
    "there and back": looked_at,
}


@pytest.mark.parametrize("case", CASES)
def test_steps_with_a_part_on_the_host_are_replayed_in_parts(case, tmp_path):
    models, optimizer, function, batch = CASES[case]()
    twins, _, eager, _ = CASES[case]()
    step = treadle.compile(
        function, model=models, optimizer=optimizer, options=treadle.Options(cache_dir=tmp_path)
    )
    kept = []
    for number in range(12):
        ours, theirs = step(*batch(number)), eager(*batch(number))
        torch.testing.assert_close(ours, theirs, **CLOSE)
        kept.append((ours, copy.deepcopy(ours)))
    for mine, theirs in zip(models, twins, strict=True):
        pairs = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
        for a, b in pairs:
            assert a.device == b.device
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for found, copied in kept:  # no later call changed them
        torch.testing.assert_close(found, copied, rtol=0, atol=0)
    assert not step.recompiles
    replay = step.compiled.executable.replay
    assert replay is not None
    assert replay.is_recorded, replay.note
    assert "operations apart" in replay.note


def test_parts_follow_a_parameter_that_is_replaced(tmp_path):
    models, optimizer, function, batch = averaged()
    twins, _, eager, _ = averaged()
    step = treadle.compile(
        function, model=models, optimizer=optimizer, options=treadle.Options(cache_dir=tmp_path)
    )
    for number in range(14):
        if number == 7:
            for each in (models[0], twins[0]):
                for parameter in each.parameters():
                    parameter.data = parameter.data.clone() * 0.5
        torch.testing.assert_close(step(*batch(number)), eager(*batch(number)), **CLOSE)
    replay = step.compiled.executable.replay
    assert replay is not None
    assert replay.is_recorded, replay.note
