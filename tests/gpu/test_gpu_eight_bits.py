"""Optimizer state in 8 bits on a GPU: the codes, a run beside eager, what the device holds, and
kernels that store where they read."""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import treadle
from treadle.capture.optimizers.eight_bits import EightBitState
from treadle.graph.custom_ops.eight_bits import FROM_EIGHT_BITS, TO_EIGHT_BITS

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
from test_updates_in_rows import COLS, ROWS, Updated

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_are_those_of_the_operator(dtype):
    def run(x):
        scale = x.abs().amax(1, keepdim=True)
        codes = TO_EIGHT_BITS.op(x, scale, dtype)
        return codes, FROM_EIGHT_BITS.op(codes, scale)

    x = torch.randn(4099, 256, device=DEVICE)
    x = x * 10 ** torch.empty_like(x).uniform_(-9, 2)
    x[0], x[1, 3], x[2, 5] = 0.0, torch.inf, torch.nan
    x = x if dtype is torch.int8 else x.abs()
    step = treadle.compile(run, model=nn.Linear(1, 1, device=DEVICE), strict=True)
    (codes, numbers), (theirs, known) = step(x), run(x)
    apart = (codes.int() - theirs.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3
    assert torch.equal(numbers.isnan(), known.isnan())


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024), nn.LayerNorm(1024)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).to(DEVICE)


def trainer(model, optimizer):
    def step(x, y):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_a_run_learns_as_eagers_does_in_less_memory():
    truth = torch.randn(1024, 10, device=DEVICE)
    last, peaks = {}, {}
    for kept in ("eager", "default", "8bit"):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = trainer(model, optimizer)
        if kept != "eager":
            step = treadle.compile(
                step, model=model, optimizer=optimizer, optimizer_state=kept, strict=True
            )
        losses = []
        for _ in range(60):
            x = torch.randn(256, 1024, device=DEVICE)
            losses.append(step(x, (x @ truth).argmax(1)).item())
        last[kept] = sum(losses[-20:])
        assert last[kept] < 0.8 * sum(losses[:20])
        if kept != "eager":
            peaks[kept] = step.measure(x, (x @ truth).argmax(1)).peak_bytes
        del model, optimizer, step
        gc.collect()  # what is alive on the device counts
    assert last["8bit"] == pytest.approx(last["eager"], rel=0.02)
    model = network()
    large = sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    assert peaks["default"] - peaks["8bit"] > 5.5 * large


def test_a_checkpoint_goes_on_in_eager(tmp_path):
    batches = torch.randn(6, 64, 1024, device=DEVICE)
    labels = torch.randint(10, (64,), device=DEVICE)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = treadle.compile(
        trainer(model, optimizer), model=model, optimizer=optimizer, optimizer_state="8bit"
    )
    for batch in batches[:3]:
        step(batch, labels)
    state = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert isinstance(state, EightBitState)
    assert state.codes.device.type == DEVICE
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = copy.deepcopy(model)
    eager = torch.optim.AdamW(other.parameters(), lr=1e-3)
    eager.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert eager.state[other[0].weight]["exp_avg"].is_cuda
    plain = trainer(other, eager)
    for batch in batches[3:]:
        torch.testing.assert_close(step(batch, labels), plain(batch, labels), rtol=0.03, atol=0.01)
    trainer(model, optimizer)(batches[0], labels)  # PyTorch's own update, on codes


@pytest.mark.parametrize("cols", [COLS, 5000])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_pass_reads_what_an_earlier_one_has_stored(first, cols):
    for seed in range(first, first + 10):
        model = Updated(seed, cols).to(DEVICE)
        eager = copy.deepcopy(model)
        step = treadle.compile(lambda x, model=model: model(x).detach(), model=model, strict=True)
        for _ in range(2):
            x = torch.randn(ROWS, cols, device=DEVICE)
            torch.testing.assert_close(step(x), eager(x).detach(), rtol=1e-3, atol=1e-2)
            for name, ours in model.named_buffers():
                theirs = eager.get_buffer(name)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3, msg=f"{seed} {name}")
