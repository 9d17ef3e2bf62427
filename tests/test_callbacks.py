"""What happens to a step, told to callbacks and to TensorBoard."""

import sys

import pytest
import torch
from torch import nn

import treadle
from contract.contract_help import training
from treadle import Options


class Noted(treadle.Callback):
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def on_recompile(self, step, reason):
        self.heard.append(("recompile", reason))

    def on_compile(self, step):
        self.heard.append(("compile", step.summary().name))

    def on_call(self, step):
        self.heard.append(("call", step.__name__))


def step_with(*callbacks, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = training(lambda x: model(x).square().mean(), optimizer)
    chosen = Options(callbacks=callbacks, **options)
    return treadle.compile(step, model=model, optimizer=optimizer, options=chosen)


def test_callbacks_hear_in_order_what_happened():
    noted = Noted()
    step = step_with(noted, dynamic=False)
    step(torch.ones(4, 3))
    step(torch.ones(4, 3))
    step(torch.ones(5, 3))
    kinds = [kind for kind, _ in noted.heard]
    assert kinds == ["compile", "call", "call", "recompile", "compile", "call"]
    assert [words for kind, words in noted.heard if kind == "recompile"] == step.recompiles
    assert {words for kind, words in noted.heard if kind != "recompile"} == {"step"}


def test_what_compiles_without_a_call_is_heard_without_one():
    noted = Noted()
    step = step_with(noted)
    step.prepare(torch.ones(4, 3))
    assert [kind for kind, _ in noted.heard] == ["compile"]
    step.profile(torch.ones(4, 3))
    step.measure(torch.ones(4, 3))
    assert [kind for kind, _ in noted.heard] == ["compile", "call", "call"]


def test_all_of_several_callbacks_hear():
    first, second = Noted(), Noted()
    step_with(first, second)(torch.ones(2, 3))
    assert first.heard == second.heard != []


def test_one_callback_needs_no_list():
    noted = Noted()
    assert Options(callbacks=noted).told == Options(callbacks=[noted]).told == (noted,)
    assert Options().told == ()


def test_a_failed_call_is_not_told_and_later_ones_are():
    noted = Noted()
    step = step_with(noted)
    step(torch.ones(2, 3))
    with pytest.raises(RuntimeError):
        step(torch.ones(2, 4))
    assert [kind for kind, _ in noted.heard] == ["compile", "call"]
    step(torch.ones(2, 3))
    assert noted.heard[-1] == ("call", "step")


def test_what_a_callback_raises_comes_out_of_the_call_that_ran():
    class Fails(treadle.Callback):
        def on_call(self, step):
            raise KeyError("mine")

    failing, other = step_with(Fails()), step_with()
    first = other(torch.ones(2, 3))
    with pytest.raises(KeyError, match="mine"):
        failing(torch.ones(2, 3))
    failing._callbacks = ()
    second = failing(torch.ones(2, 3))
    assert second == other(torch.ones(2, 3)) < first


def test_callbacks_decide_nothing_of_what_is_compiled(tmp_path):
    step_with(cache_dir=tmp_path)(torch.ones(2, 3))
    step = step_with(Noted(), cache_dir=tmp_path)
    step(torch.ones(2, 3))
    assert step.summary().from_cache


@pytest.mark.parametrize("wrong", [print, [print], "all"])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(treadle.TreadleError, match=r"TR-001.*treadle\.Callback"):
        Options(callbacks=wrong)


class Board:
    """In the place of a ``SummaryWriter``."""

    def __init__(self):
        self.scalars, self.texts = {}, {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars[tag] = scalar_value, global_step

    def add_text(self, tag, text_string, global_step=None):
        self.texts[tag] = text_string, global_step


def test_a_writer_gets_the_numbers_and_the_texts():
    step, board = step_with(dynamic=False), Board()
    step(torch.ones(2, 3))
    step(torch.ones(3, 3))
    step.to_tensorboard(board, 7)
    summary = step.summary()
    promised = board.scalars["step/peak_predicted_bytes"]
    assert promised == (summary.peak_predicted_bytes, 7)
    assert board.scalars["step/recompiles"] == (1, 7)
    assert "step/peak_measured_bytes" not in board.scalars
    assert "step/seconds" not in board.scalars
    assert step.recompiles[0] in board.texts["step/recompiles"][0]
    told = [line.removeprefix("    ") for line in board.texts["step/explain"][0].split("\n")]
    assert told == step.explain().splitlines()
    step.profile(torch.ones(3, 3))
    step.measure(torch.ones(3, 3))
    step.to_tensorboard(board, 8)
    measured = step.summary().peak_measured_bytes
    assert board.scalars["step/peak_measured_bytes"] == (measured, 8)
    assert board.scalars["step/seconds"][0] > 0


def test_a_folder_is_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    step = step_with()
    step(torch.ones(2, 3))
    step.to_tensorboard(tmp_path / "runs", 3)
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    (event,) = events.Scalars("step/peak_predicted_bytes")
    assert (event.step, event.value) == (3, step.summary().peak_predicted_bytes)
    assert "step/explain/text_summary" in events.Tags()["tensors"]


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    pytest.importorskip("tensorboard")
    step = step_with()
    step(torch.ones(2, 3))
    (tmp_path / "file").write_text("")
    with pytest.raises(treadle.TreadleError, match="TR-004"):
        step.to_tensorboard(tmp_path / "file")


def test_without_tensorboard_a_folder_is_refused(tmp_path, monkeypatch):
    step = step_with()
    step(torch.ones(2, 3))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delitem(sys.modules, "tensorboard.compat", raising=False)
    with pytest.raises(ImportError, match=r"TR-010\] tensorboard is not installed"):
        step.to_tensorboard(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_before_a_call_there_is_nothing_to_write():
    with pytest.raises(treadle.TreadleError, match="TR-003"):
        step_with().to_tensorboard(Board())


def test_what_is_no_writer_is_named():
    step = step_with()
    step(torch.ones(4, 3))
    with pytest.raises(treadle.TreadleError, match=r"TR-001.*3 is neither a folder nor a Summary"):
        step.to_tensorboard(3)
