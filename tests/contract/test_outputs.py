"""What a step prints, logs and makes texts of, at every call: line by line what eager does."""

# ruff: noqa: UP031, UP032 (every way to make a text is what these are about)

import builtins
import contextlib
import io
import logging
import os
import random
import sys

import pytest
import torch
from torch import nn

import treadle

LOG = logging.getLogger("treadle.tests.outputs")


@pytest.mark.parametrize("codegen", [True, False])
def test_aliases_are_objects_of_their_own(codegen):
    """As in eager; one object that is in several places is one object."""
    model, kept, last = nn.Linear(2, 2), [], {}

    def step(x):
        loss = model(x).sum()
        kept.append(loss.detach())
        last["loss"] = loss.detach()
        one = loss.detach()
        return loss.detach(), one, one

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=codegen))
    for run in (step, compiled, compiled):
        first, second, third = run(torch.ones(2))
        others = [first, second, kept[-1], last["loss"]]
        assert second is third
        assert len({id(each) for each in others}) == 4
        assert not codegen or len({each.data_ptr() for each in others}) == 1


class Lines(logging.Handler):
    """The records that it got."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        told = f"{record.name} {record.levelname} {record.funcName} {record.getMessage()}"
        self.lines.append(f"{told} {getattr(record, 'loss', None)}")


class Trainer:
    def __init__(self, report):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.report = report
        self.n = 0
        self.history, self.entries, self.last = [], {}, ""
        self.file = io.StringIO()

    def step(self, x, y):
        self.n += 1
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        print(loss)
        return loss.detach(), self.report(self, loss.detach())


def trained(report, compiled, calls=4):
    """The results, what was printed and logged, what is left, and the step."""
    trainer = Trainer(report)
    call = trainer.step
    if compiled:
        call = treadle.compile(call, model=trainer.model, optimizer=trainer.optimizer)
    generator = torch.Generator().manual_seed(1)
    out, error, records = io.StringIO(), io.StringIO(), Lines()
    LOG.handlers, LOG.propagate, before = [records], False, LOG.level
    LOG.setLevel(logging.DEBUG)
    results = []
    random.seed(0)
    try:
        for _ in range(calls):
            batch = [torch.randn(8, size, generator=generator) for size in (4, 1)]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                results.append(call(*batch))
    finally:
        LOG.handlers = []
        LOG.setLevel(before)
    told = out.getvalue().splitlines(), error.getvalue().splitlines(), records.lines
    left = trainer.history, trainer.entries, trainer.last, trainer.file.getvalue(), trainer.n
    return (results, told, left), call


log = print


def printed(trainer, loss):
    print("a constant")
    print(loss.item())
    print("loss", loss.item(), 3, None, sep=": ", end="!\n")
    log(f"{loss.item()}", "by another name")
    print([loss.item(), 2], {"loss": loss.item()}, (float(loss),))
    print(loss, loss[None] * 2, file=sys.stderr)
    print("to a file", loss.item(), file=trainer.file)
    trainer.file.write(f"{loss:.3f}\n")
    print(round(loss.item(), 3), loss.item() > 0.5, max(1.0, 2.0))
    print()


def formatted(trainer, loss):
    value, width = loss.item(), 12
    print(f"loss {value:.3f}, {loss:.2f}, {value!r:>{width}}|{trainer.n:03d}|{loss}")
    print("{:.2f} {a} {}".format(value, 5, a=trainer.n), "%.3f %d %s" % (value, trainer.n, loss))
    print("%.2e" % value, "%(loss).1f %%" % {"loss": value}, format(value, "8.3f"))
    print("loss " + str(value) + "!" * 2, str(float(loss)).rjust(30), repr(value)[:4])
    print(", ".join(["a", f"{value:.1f}", *(f"{each:.2f}" for each in (value, 2.5))]))
    text = "begin"
    text += f" {value:.3f}"
    sys.stdout.write(text.upper() + "\n")


def logged(trainer, loss):
    LOG.info("a constant")
    LOG.info("loss %.3f of %s", loss.item(), trainer.n)
    LOG.warning(f"loss {loss.item():.3f}", extra={"loss": loss.item()})
    LOG.log(logging.ERROR, "{}".format(loss.item()))
    LOG.debug("%s %s", f"{loss:.2f}", [loss.item()])


def stored(trainer, loss):
    trainer.history.append(f"{loss.item():.2f}")
    trainer.history.extend([str(trainer.n), f"{loss}"])
    trainer.entries["loss"] = f"{loss:.3f} at {trainer.n}"
    trainer.last = "%.4f" % loss.item()
    return {"text": f"{loss.item():.5f}", "same": trainer.last, "n": str(trainer.n)}


def show(name, value):
    print(f"{name}: {value:.2f}")


def in_helpers(trainer, loss):
    show("loss", loss.item())
    show("n", trainer.n)
    for at, each in enumerate([loss.item(), 1.0]):
        print(f"{at}: {each}")
    show("drawn", random.random())
    trainer.last = float(f"{loss:.2f}"), len(f"{loss}"), f"{random.random():.3f}"


@pytest.mark.parametrize("report", [printed, formatted, logged, stored, in_helpers])
def test_eagers_lines_at_every_call_and_one_compile(report):
    found, call = trained(report, compiled=True)
    expected, _ = trained(report, compiled=False)
    (results, told, left), (theirs, lines, places) = found, expected
    torch.testing.assert_close([each[0] for each in results], [each[0] for each in theirs])
    assert [each[1] for each in results] == [each[1] for each in theirs]
    assert told == lines
    assert left == places
    assert not call.recompiles


def test_an_error_of_formatting_is_pythons():
    model = nn.Linear(4, 1)
    step = treadle.compile(lambda x: f"{model(x).sum().item():.2q}", model=model)
    with pytest.raises(ValueError, match="format") as error:
        step(torch.ones(2, 4))
    assert "2q" in str(error.value.__notes__)


@pytest.mark.parametrize(
    "read",
    [
        lambda text, trainer: range(len(text)),
        lambda text, trainer: text == "0.50",
        lambda text, trainer: "5" in text,
        lambda text, trainer: trainer.entries.update({text: 1}),
        lambda text, trainer: text[30],
        lambda text, trainer: text.split("."),
        lambda text, trainer: os.fspath(text),
    ],
    ids=["len", "equal", "contains", "key", "index", "split", "path"],
)
def test_what_needs_the_text_at_once_is_refused(read):
    def report(trainer, loss):
        return read(f"{loss:.2f}", trainer)

    with pytest.raises(treadle.CaptureError, match="TR-102") as error:
        trained(report, compiled=True)
    assert "lambda text" in error.value.where


def test_what_was_printed_before_an_error_is_there():
    def step(x):
        print("shape", x.shape)
        raise KeyError("mine")

    model, out = nn.Linear(4, 1), io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(KeyError, match="mine"):
        treadle.compile(step, model=model)(torch.ones(2, 4))
    assert out.getvalue() == "shape torch.Size([2, 4])\n"


FORMS = (
    lambda rng: "print('constant', {})".format(rng.randrange(9)),
    lambda rng: "print({}, loss.item(), sep='-')".format(rng.choice(["self.n", "'x'", "loss"])),
    lambda rng: "print(f'{{loss:.{}f}} {{self.n:>4}}')".format(rng.randrange(1, 6)),
    lambda rng: "LOG.info('%d %.3f', self.n, loss.item())",
    lambda rng: "LOG.warning(f'{loss.item():.2f}')",
    lambda rng: "self.history.append({})".format(
        rng.choice(["f'{loss:.3f}'", "loss.item()", "str(self.n)", "'a' + str(loss.item())"])
    ),
    lambda rng: "self.entries['k{}'] = '%.2f' % loss".format(rng.randrange(3)),
    lambda rng: "self.last = '{{:.{}e}}'.format(float(loss))".format(rng.randrange(4)),
    lambda rng: "self.n += {}".format(rng.randrange(1, 4)),
    lambda rng: "sys.stderr.write(str(loss.item() * {}) + '\\n')".format(rng.randrange(9)),
    lambda rng: "print(f'{random.random():.3f}', random.uniform(0, 2))",
    lambda rng: "loss = loss * {}".format(rng.randrange(1, 4)),
    lambda rng: "for i in range(2): print(i, f'{loss + i:.2f}')",
    lambda rng: "print(self.last, len(self.history))" if rng.random() < 0.2 else "print(self.n)",
)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed, tmp_path):
    rng = random.Random(seed)
    lines = [rng.choice(FORMS)(rng) for _ in range(8)]
    body = "".join(f"    {each}\n" for each in lines)
    file = tmp_path / "step.py"
    file.write_text(f"def report(self, loss):\n{body}    return f'{{loss:.4f}}', self.n\n")
    space = {"LOG": LOG, "sys": sys, "random": random}
    exec(compile(file.read_text(), str(file), "exec"), space)
    found, _ = trained(space["report"], compiled=True)
    expected, _ = trained(space["report"], compiled=False)
    assert [each[1] for each in found[0]] == [each[1] for each in expected[0]], lines
    assert found[1:] == expected[1:], lines


def test_what_users_put_in_the_place_of_print_and_of_handling_stays(monkeypatch):
    """Also after a run that fails."""
    printed, handled = builtins.print, logging.Logger.handle

    def own_print(*args, **named):
        printed("own", *args, **named)

    def own_handle(logger, record):
        handled(logger, record)

    monkeypatch.setattr(builtins, "print", own_print)
    monkeypatch.setattr(logging.Logger, "handle", own_handle)
    trainer = Trainer(lambda trainer, loss: 0)
    step = treadle.compile(trainer.step, model=trainer.model, optimizer=trainer.optimizer)
    for x in (torch.ones(2, 4), torch.ones(2, 5)):
        with contextlib.suppress(RuntimeError), contextlib.redirect_stdout(io.StringIO()):
            step(x, torch.ones(2, 1))
        assert builtins.print is own_print
        assert vars(logging.Logger)["handle"] is own_handle
