"""Checkpoints: a run that is resumed, here or there, is the run that was never interrupted."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

BEFORE, AFTER = 7, 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5)

    def forward(self, x):
        return self.b(F.dropout(F.gelu(self.norm(self.a(x))), 0.2, self.training))


def make_step(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=3e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
}


class Run:
    """A training run: a loop as anyone writes it, with a scheduler, dropout and noise on the batch
    from PyTorch's generator, and data from a generator of its own."""

    def __init__(self, kind: str, path: str) -> None:
        torch.manual_seed(5)
        self.model = Net()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 4)
        self.data = torch.Generator().manual_seed(11)
        step = make_step(self.model, self.optimizer)
        if path == "compiled":
            step = treadle.compile(step, model=self.model, optimizer=self.optimizer)
        self.step = step

    def train(self, count: int) -> list[float]:
        losses: list[float] = []
        for _ in range(count):
            x = torch.randn(11, 7, generator=self.data)
            y = torch.randint(5, (11,), generator=self.data)
            losses.append(self.step(x + 0.01 * torch.randn(11, 7), y).item())
            self.scheduler.step()
        return losses

    def checkpoint(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "data": self.data.get_state(),
        }

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])
        self.data.set_state(saved["data"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", ["eager", "compiled"])
@pytest.mark.parametrize("after", ["eager", "compiled"])
def test_the_next_losses_are_those_of_an_uninterrupted_run(tmp_path, kind, before, after):
    first = Run(kind, before)
    first.train(BEFORE)
    torch.save(first.checkpoint(), tmp_path / "checkpoint.pt")
    uninterrupted = first.train(AFTER)
    second = Run(kind, after)
    second.load(tmp_path / "checkpoint.pt")
    resumed = second.train(AFTER)
    if before == after:
        assert resumed == uninterrupted
    else:
        assert resumed == pytest.approx(uninterrupted, rel=1e-5, abs=1e-5)


@pytest.mark.users_flags
def test_a_run_resumes_in_another_process(tmp_path, forks):
    """Bitwise, and through the objects a step has run with before as well."""
    here = Path(__file__)
    program = f"""
import sys, torch
from pathlib import Path
sys.path.insert(0, {str(here.parent)!r})
from {here.stem} import AFTER, Run
run = Run("adamw", "compiled")
run.train(3)
run.load(Path({str(tmp_path)!r}) / "checkpoint.pt")
torch.save(run.train(AFTER), Path({str(tmp_path)!r}) / "losses.pt")
"""
    run = Run("adamw", "compiled")
    run.train(BEFORE)
    torch.save(run.checkpoint(), tmp_path / "checkpoint.pt")
    uninterrupted = run.train(AFTER)
    done = forks.run(program, seconds=120)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "losses.pt") == uninterrupted


def test_a_checkpoint_goes_back_into_the_objects_of_a_running_step(tmp_path):
    """``load_state_dict`` of an optimizer puts other tensors into its state."""
    run = Run("amsgrad", "compiled")
    run.train(2)
    torch.save(run.checkpoint(), tmp_path / "checkpoint.pt")
    once = run.train(AFTER)
    run.load(tmp_path / "checkpoint.pt")
    assert run.train(AFTER) == once
    assert run.step.recompiles == []


def test_keys_and_layouts_are_eagers():
    states = []
    for path in ("eager", "compiled"):
        run = Run("amsgrad", path)
        run.train(2)
        states.append(run.checkpoint())
    eager, compiled = states
    assert list(eager["model"]) == list(compiled["model"])
    assert eager["scheduler"] == compiled["scheduler"]
    old, new = eager["optimizer"], compiled["optimizer"]
    assert old["param_groups"] == new["param_groups"]
    assert list(old["state"]) == list(new["state"])
    for at, entry in old["state"].items():
        assert list(entry) == list(new["state"][at])
        for key, value in entry.items():
            found = new["state"][at][key]
            assert (found.shape, found.dtype, found.stride(), found.device) == (
                value.shape, value.dtype, value.stride(), value.device,
            )  # fmt: skip


def test_a_copied_model_is_a_model_of_its_own():
    run = Run("adamw", "compiled")
    run.train(2)
    copied = copy.deepcopy(run.model)
    kept = copy.deepcopy(copied.state_dict())
    run.train(2)
    assert all(torch.equal(value, kept[key]) for key, value in copied.state_dict().items())
    optimizer = OPTIMIZERS["adamw"](copied.parameters())
    step = treadle.compile(make_step(copied, optimizer), model=copied, optimizer=optimizer)
    twin = copy.deepcopy(copied)
    other = OPTIMIZERS["adamw"](twin.parameters())
    x, y = torch.randn(11, 7), torch.randint(5, (11,))
    for seed in range(3):
        torch.manual_seed(seed)
        ours = step(x, y)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, make_step(twin, other)(x, y))


def test_assigned_parameters_need_an_optimizer_of_theirs():
    """``assign=True`` gives the model other parameters; the old ones are no longer trained."""
    run = Run("adamw", "compiled")
    run.train(2)
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()), assign=True)
    with pytest.raises(treadle.CaptureError, match="TR-103"):
        run.train(1)
    assert run.step.recompiles == ["parameters were replaced by other objects"]


def test_assigned_parameters_in_model_and_optimizer_compile_again():
    run = Run("momentum", "compiled")
    run.train(2)
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()), assign=True)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
    twin = copy.deepcopy(run.model)
    other = OPTIMIZERS["momentum"](twin.parameters())
    other.param_groups[0]["lr"] = run.optimizer.param_groups[0]["lr"]
    x, y = torch.randn(11, 7), torch.randint(5, (11,))
    torch.manual_seed(0)
    ours = run.step(x, y)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, make_step(twin, other)(x, y))
    for mine, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert run.step.recompiles == ["parameters were replaced by other objects"]


def test_a_model_moved_to_another_dtype_compiles_again():
    """Parameters keep their identity, and state is what eager would have there."""
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = treadle.compile(make_step(model, optimizer), model=model, optimizer=optimizer)
    y = torch.randint(5, (11,))
    step(torch.randn(11, 7), y)
    model.double()
    twin = copy.deepcopy(model)
    eager = make_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    for _ in range(3):
        x = torch.randn(11, 7).double()
        torch.testing.assert_close(step(x, y), eager(x, y))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(step.recompiles) == 1


def test_one_tensor_twice_is_not_two_tensors():
    """``step(x, x)`` is traced as a step of one tensor, which ``step(x, y)`` must not run."""

    def pair(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, make_step(model, optimizer)

    model = nn.Sequential(nn.Embedding(23, 6), nn.Linear(6, 23))
    twin = copy.deepcopy(model)
    optimizer, function = pair(model)
    _, eager = pair(twin)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    x, y = torch.randint(23, (9,)), torch.randint(23, (9,))
    for given in ((x, x), (x, y), (y, y), (y, x)):
        torch.testing.assert_close(step(*given), eager(*given))
    assert step.recompiles == [
        "arguments that were one tensor are now several, or several are now one"
    ]
