"""Accelerate's loop with its step compiled, beside the same loop in eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import treadle

accelerate = pytest.importorskip("accelerate")
from treadle.integrations.accelerate import Accelerator  # noqa: E402


@pytest.fixture(autouse=True)
def _state():
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def run(
    compiled, *, accumulate=1, precision="no", folder=None, memory=None, inside=False, resume=None
):
    """Losses, parameters and recompiles of twelve batches, saved and loaded after six."""
    kind = Accelerator if compiled else accelerate.Accelerator
    own = {"memory": memory} if compiled else {}
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = kind(
        gradient_accumulation_steps=accumulate, mixed_precision=precision, cpu=True, **own
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    x = torch.randn(96, 8)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    def update(inputs, labels):
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def accumulated(inputs, labels):
        with accelerator.accumulate(model):
            loss = update(inputs, labels)
            scheduler.step()
        return loss

    train_step = accumulated if inside else update
    step = accelerator.compile_step(train_step) if compiled else train_step
    losses = []
    if resume is not None:
        accelerator.load_state(str(resume))
        data = accelerator.skip_first_batches(data, 6)
    for number, (inputs, labels) in enumerate(data):
        if inside:
            losses.append(step(inputs, labels).item())
        else:
            with accelerator.accumulate(model):
                losses.append(step(inputs, labels).item())
                scheduler.step()
        if number == 5 and folder is not None:
            accelerator.save_state(str(folder))
            accelerator.load_state(str(folder))
    reasons = step.recompiles if compiled else []
    return losses, [each.detach().clone() for each in model.parameters()], reasons


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate": 2},
        {"accumulate": 5},
        {"accumulate": 3, "inside": True},
        {"precision": "bf16"},
        {"memory": 0.0},
    ],
    ids=["plain", "accumulation", "a rest", "all of it", "bf16", "budget"],
)
def test_a_run_is_accelerates_own(arguments, tmp_path):
    ours, parameters, reasons = run(True, folder=tmp_path / "ours", **arguments)
    theirs, expected, _ = run(False, folder=tmp_path / "theirs", **arguments)
    rtol, atol = (2e-2, 2e-3) if "precision" in arguments else (1e-4, 1e-5)
    assert ours == pytest.approx(theirs, rel=rtol)
    for a, b in zip(parameters, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert len(reasons) <= 2, reasons


@pytest.mark.parametrize("first", [True, False], ids=["compiled", "eager"])
def test_the_other_way_resumes_what_was_saved(first, tmp_path):
    run(first, folder=tmp_path)
    resumed, parameters, _ = run(not first, resume=tmp_path)
    theirs, expected, _ = run(first, resume=tmp_path)
    assert len(resumed) == 6
    assert resumed == pytest.approx(theirs, rel=1e-4)
    for a, b in zip(parameters, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def refused(words):
    return pytest.raises(treadle.CaptureError, match=f"(?s)TR-142.*{words}.*remedy: ")


def test_nothing_prepared_is_refused():
    with refused("no model was prepared"):
        Accelerator(cpu=True).compile_step(lambda x: x)


def test_what_trains_in_a_way_of_its_own_is_refused():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with refused("fp16"):
        accelerator.compile_step(lambda x: x)
    accelerator.scaler = None
    accelerator.state.distributed_type = accelerate.utils.DistributedType.FSDP
    with refused("FSDP"):
        accelerator.compile_step(lambda x: x)
    accelerator.state.distributed_type = accelerate.utils.DistributedType.MULTI_CPU
    accelerator.gradient_accumulation_steps = 2
    with refused("accumulate"):
        accelerator.compile_step(lambda x: x)
