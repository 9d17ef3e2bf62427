"""``logging`` under ``treadle``, and ``Options(logs=...)``."""

import logging

import pytest
import torch
from torch import nn

import treadle
from treadle.options import LOGS, from_environment


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    yield
    for name in LOGS:
        logger = logging.getLogger(f"treadle.{name}")
        logger.setLevel(logging.NOTSET)
        logger.handlers.clear()


@pytest.fixture
def heard():
    """Records of ``treadle``, as a handler of a user's gets them."""
    records = []

    class Heard(logging.Handler):
        def emit(self, record):
            records.append((record.name, record.levelname, record.getMessage()))

    logger, handler = logging.getLogger("treadle"), Heard()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def trained(**options):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, scale):
        loss = model(x).sort().values.square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return treadle.compile(train_step, model=model, optimizer=optimizer, **options)


@pytest.mark.filterwarnings("ignore:.*PyTorch kernel")
def test_a_logger_of_the_users_hears_of_compiles_recompiles_and_fallbacks(heard):
    logging.getLogger("treadle").setLevel(logging.INFO)
    step = trained()
    step(torch.randn(5, 4), 1.0)
    step(torch.randn(5, 4).requires_grad_(), 1.0)
    names = [name for name, _, _ in heard]
    assert names.count("treadle.compile") == 2
    assert names.count("treadle.recompiles") == len(step.recompiles) == 1
    texts = {name: text for name, _, text in heard}
    assert texts["treadle.recompiles"] == f"train_step: {step.recompiles[0]}"
    assert "launches" in texts["treadle.compile"]
    assert {level for _, level, _ in heard} == {"INFO"}
    assert ("treadle.fallbacks" in names) == bool(step.compiled.artifact.fallbacks)


@pytest.mark.filterwarnings("ignore:.*PyTorch kernel")
def test_nothing_is_said_where_nobody_asks(heard, capsys):
    trained()(torch.randn(5, 4), 1.0)
    assert heard == []
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:.*PyTorch kernel")
@pytest.mark.parametrize("logs", [("compile",), ("all",)])
def test_logs_are_shown_on_standard_error(logs, capsys):
    step = trained(options=treadle.Options(logs=logs))
    step(torch.randn(5, 4), 1.0)
    step(torch.randn(5, 4).requires_grad_(), 1.0)
    err = capsys.readouterr().err
    assert err.startswith("treadle.compile: train_step: ")
    assert ("treadle.recompiles: train_step: " in err) == ("all" in logs)


def test_the_environment_sets_it(monkeypatch):
    monkeypatch.setenv("TREADLE_LOGS", "recompiles,compile")
    assert from_environment().logs == ("recompiles", "compile")
    monkeypatch.setenv("TREADLE_LOGS", "all")
    assert from_environment().logs == LOGS


def test_an_unknown_log_is_refused():
    with pytest.raises(treadle.TreadleError, match=r"TR-001.*'dynamo'") as caught:
        treadle.Options(logs=("dynamo",))
    assert "recompiles" in caught.value.remedy
