"""Numbers that a step reads from tensors (``item``, ``tolist``, ``float``, ``int``): one compile,
eager's numbers at every call, and nothing of them decides what runs."""

import builtins
import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


@dataclass
class Average:
    """Of a trainer's."""

    total: float = 0.0

    def update(self, value, count):
        self.total = 0.9 * float(value) + count


def accuracy(out, y):
    def rate():
        return float((out.argmax(1) == y).float().mean())

    return rate()


READS = {
    "item": lambda loss, out, y, log: loss.item(),
    "float": lambda loss, out, y, log: float(loss),
    "int": lambda loss, out, y, log: int((out * 10).sum()),
    "whole": lambda loss, out, y, log: (out.argmax(1) == y).sum().item(),
    "rate": lambda loss, out, y, log: int((out.argmax(1) == y).sum()) / len(y) * 100,
    "flag": lambda loss, out, y, log: (out > 0).any().item(),
    "tolist": lambda loss, out, y, log: out[:2].tolist(),
    "tolist of one": lambda loss, out, y, log: loss.tolist(),
    "nested": lambda loss, out, y, log: accuracy(out, y),
    "comprehension": lambda loss, out, y, log: [float(each) for each in out[0]],
    "rounded": lambda loss, out, y, log: (round(loss.item(), 3), round(float(loss))),
    "math": lambda loss, out, y, log: (math.exp(loss.item()), math.floor(out.sum().item())),
    "arithmetic": lambda loss, out, y, log: (1 - loss.item()) ** 2 // 0.01 % 7,
    "signed": lambda loss, out, y, log: [-abs(out.min().item()), divmod(loss.item(), 0.3)],
    "divided": lambda loss, out, y, log: 1 / loss.item(),
    "sum": lambda loss, out, y, log: sum(each.item() for each in out[0]) / len(out),
    "several": lambda loss, out, y, log: {"loss": loss.item(), "out": out.detach(), "n": len(y)},
    "compared": lambda loss, out, y, log: [loss.item() > 1, loss.item() == loss.item()],
    "in the graph": lambda loss, out, y, log: out * loss.item() + out.argmax(1).sum().item(),
    "filled": lambda loss, out, y, log: torch.full((3,), loss.item()) / torch.tensor(float(loss)),
    "object": lambda loss, out, y, log: log["average"].update(loss, 2),
}  # fmt: skip


def trained(read, compiled, dtype=torch.float32, calls=4):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = {"average": Average()}

    def step(x, y):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return read(loss.detach(), out.detach(), y, log)

    call = step
    if compiled:
        options = treadle.Options(codegen=False)
        call = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    found = []
    for _ in range(calls):
        x, y = torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))
        found.append((call(x, y), copy.deepcopy(log)))
    if compiled:
        assert not call.recompiles
    return found, list(model.parameters())


def assert_alike(actual, expected, rtol=1e-6):
    """Python's numbers of the same types, and tensors."""
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        tolerance = max(rtol, torch.finfo(actual.dtype).eps * 4)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(actual, dict):
        assert_alike(list(actual.items()), list(expected.items()), rtol)
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_alike(one, other, rtol)
    elif isinstance(actual, float):
        assert actual == pytest.approx(expected, rel=rtol, abs=rtol)
    elif isinstance(actual, Average):
        assert_alike(actual.total, expected.total, rtol)
    else:
        assert actual == expected


@pytest.mark.parametrize("name", READS)
def test_a_number_is_read_after_the_launch(name):
    assert_alike(trained(READS[name], True), trained(READS[name], False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_in_other_dtypes(dtype):
    def read(loss, out, y, log):
        return loss.item(), out[0].tolist(), out * float(loss.double())

    rtol = 1e-12 if dtype is torch.float64 else 1e-2
    assert_alike(trained(read, True, dtype), trained(read, False, dtype), rtol)


def test_the_number_is_that_of_the_line_that_reads_it():
    model = nn.BatchNorm1d(3)

    def step(x):
        before = model.running_mean[0].item()
        model(x)
        kept = model.running_mean[0]
        between = kept.item()
        model(x)
        return before, between, float(kept), int(model.num_batches_tracked)

    compiled = treadle.compile(step, model=model)
    twin = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(5, 3)
        actual = compiled(x)
        model, twin = twin, model
        expected = step(x)
        model, twin = twin, model
        assert actual == pytest.approx(expected, rel=1e-5)
    assert not compiled.recompiles


def test_a_check_of_a_number_that_only_raises():
    model = nn.Linear(3, 1)

    def step(x):
        loss = model(x).square().sum()
        if not math.isfinite(loss.item()):
            raise ValueError("not finite")
        if loss.item() > 1e6 or float(loss) < 0:
            raise ValueError("diverged")
        return loss.item()

    compiled = treadle.compile(step, model=model)
    for _ in range(3):
        x = torch.randn(2, 3)
        assert compiled(x) == pytest.approx(step(x), rel=1e-6)
    for bad in (1e8, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"not finite|diverged"):
            compiled(x * bad)
    assert compiled(x) == pytest.approx(step(x), rel=1e-6)


def test_an_error_of_pythons_arithmetic_comes_after_the_step():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = {}

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        held["x"] = x.detach() * 2
        return 1 / x.abs().sum().item(), held.get("y")

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    compiled(torch.ones(2, 3))
    before = model.bias.detach().clone()
    with pytest.raises(ZeroDivisionError):
        compiled(torch.zeros(2, 3))
    assert not torch.equal(before, model.bias)
    assert not held["x"].any()
    assert compiled(torch.ones(2, 3))[0] == pytest.approx(1 / 6)


def test_code_is_as_it_was():
    def inner(x):
        return float(x.sum())

    def step(x):
        return inner(model(x)), float(x.sum())

    model = nn.Linear(3, 1)
    codes = inner.__code__, step.__code__
    treadle.compile(step, model=model)(torch.ones(2, 3))
    assert (inner.__code__, step.__code__) == codes
    assert not [name for name in vars(builtins) if name.endswith("(deferred)")]


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (lambda x: x.sum().item().hex(), ".hex()"),
        (lambda x: "nan" in f"{x.sum().item():.2f}", ":.2f"),
        (lambda x: x.sum().mul(1j).item(), "item()"),
        (lambda x: {x.sum().item(): 1}, "item()"),
    ],
    ids=["method", "format", "complex", "hash"],
)
def test_what_needs_the_number_at_once_is_refused_with_its_line(read, line):
    model = nn.Linear(3, 1)
    compiled = treadle.compile(lambda x: (model(x), read(x)), model=model)
    with pytest.raises(treadle.CaptureError, match="TR-102") as caught:
        compiled(torch.ones(2, 3))
    assert line in caught.value.where


def caught(x):
    try:
        return "nan" in f"{x.sum().item():.2f}"
    except Exception:
        return "none"


def test_a_refusal_that_somebody_catches_is_one():
    model = nn.Linear(3, 1)
    compiled = treadle.compile(lambda x: (model(x), caught(x)), model=model)
    with pytest.raises(treadle.CaptureError, match="TR-102") as error:
        compiled(torch.ones(2, 3))
    assert ":.2f" in error.value.where


def test_elements_that_are_not_one_raise_as_in_eager():
    model = nn.Linear(3, 1)
    compiled = treadle.compile(lambda x: model(x).item(), model=model)
    with pytest.raises(RuntimeError, match="2 elements"):
        compiled(torch.ones(2, 3))


class Queue(nn.Module):
    """Of momentum contrast: a buffer says where to write, another one whether to begin."""

    def __init__(self, size):
        super().__init__()
        self.encoder, self.size = nn.Linear(4, 3), size
        self.register_buffer("queue", torch.randn(3, size))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("begun", torch.tensor(False))

    @torch.no_grad()
    def put(self, keys):
        start = int(self.pointer)
        self.queue[:, start : start + len(keys)] = keys.T
        start = (start + len(keys)) % self.size
        self.pointer[0] = start
        return start

    def forward(self, x):
        if not self.begun:
            self.queue.copy_(torch.ones_like(self.queue))
            self.begun.fill_(True)
        keys = self.encoder(x)
        loss = (keys @ self.queue.clone()).logsumexp(1).mean()
        return loss, self.put(keys.detach()), self.queue[:, int(self.pointer)].sum()


def queued(compiled, size, calls):
    torch.manual_seed(0)
    model = Queue(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss, place, there = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), place, there.detach()

    call = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
    for at in range(calls):
        torch.manual_seed(at)
        yield call(torch.randn(4, 4)), list(model.state_dict().values()), call


def test_buffers_that_are_pointers_and_flags():
    found = list(queued(True, 12, 8))
    expected = list(queued(False, 12, 8))
    torch.testing.assert_close([each[:2] for each in found], [each[:2] for each in expected])
    (why,) = found[-1][2].recompiles
    assert "if not self.begun:" in why


def test_a_slice_that_is_cut_off_is_eagers():
    found, expected = queued(True, 10, 3), queued(False, 10, 3)
    for _ in range(2):
        torch.testing.assert_close(next(found)[:2], next(expected)[:2])
    for each in (found, expected):
        with pytest.raises(RuntimeError, match="size"):
            next(each)


LISTED = {
    "nested": lambda best: torch.LongTensor([[best[i][0] for i in range(5)]]),
    "flat": lambda best: torch.LongTensor([best[i][0] for i in range(5)]),
    "read": lambda best: torch.LongTensor([[best[i][0].item()] for i in range(5)]),
    "mixed": lambda best: torch.IntTensor([best[0, 0], 3, best[1, 0]]),
    "rates": lambda best: torch.FloatTensor([best[0, 0] / 4, 0.5, best[1, 0]]),
}


@pytest.mark.parametrize("name", LISTED)
def test_classes_of_tensors_take_lists_of_tensors(name):
    """Decoders make their next input of what they have predicted."""
    model = nn.Linear(3, 4)

    def step(x):
        made = LISTED[name](model(x).topk(1)[1])
        return made, made * 2

    compiled = treadle.compile(step, model=model)
    for _ in range(3):
        x = torch.randn(5, 3)
        for ours, theirs in zip(compiled(x), step(x), strict=True):
            assert ours.dtype is theirs.dtype
            torch.testing.assert_close(ours, theirs)
    assert not compiled.recompiles


def test_whole_tensors_of_fractions_are_refused_as_in_eager():
    model = nn.Linear(3, 4)
    compiled = treadle.compile(lambda x: torch.LongTensor([model(x)[0, 0]]), model=model)
    with pytest.raises(TypeError, match="only integer tensors of a single element"):
        compiled(torch.randn(5, 3))
