"""The four loops of ``examples/``: losses equal to the same loop in eager, and resuming."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("hf_trainer", "accelerate"),
        ("lightning_loop", "lightning"),
        ("accelerate_loop", "accelerate"),
    ],
)
def test_losses_equal_eagers(name, needs):
    pytest.importorskip(needs)
    torch._dynamo.reset()
    example = load(name)
    ours, theirs = example.train(6), example.train(6, eager=True)
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_the_plain_loop_equals_eager():
    example = load("plain_loop")
    ours, theirs = example.train(0, 30)[0], example.train(0, 30, eager=True)[0]
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("first", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("then", [False, True], ids=["compiled", "eager"])
def test_a_resumed_run_goes_on_as_if_uninterrupted(first, then, tmp_path):
    example = load("plain_loop")
    whole, _ = example.train(0, 40, eager=then)
    _, state = example.train(0, 20, eager=first)
    torch.save(state, tmp_path / "checkpoint")
    state = torch.load(tmp_path / "checkpoint", weights_only=True)
    rest, _ = example.train(20, 40, state, eager=then)
    if first == then:
        assert rest == whole[20:], "the same path: bit for bit"
    else:
        assert rest == pytest.approx(whole[20:], rel=1e-4)
