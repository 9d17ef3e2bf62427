"""``sum``, ``min``, ``statistics.fmean``, ``np.mean`` of a list that a step appends to: running
figures compile once."""

import collections
import copy
import math
import statistics
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

FIGURES = {
    "sum": lambda values: sum(values),
    "mean": lambda values: sum(values) / len(values),
    "best": lambda values: min(values),
    "worst": lambda values: max(values),
    "range": lambda values: max(values) - min(values),
}


def mean_of(values):
    total = sum(values)
    return total / len(values)


FIGURES["in a helper"] = mean_of
OF_ALL = {
    "np.mean": lambda values: np.mean(values),
    "float of np.mean": lambda values: float(np.mean(values)),
    "fsum": lambda values: math.fsum(values) / len(values),
    "fmean": lambda values: statistics.fmean(values),
    "by its own name": lambda values: fmean(values),
    "spread": lambda values: np.std(values) / np.max(values),
    "quantile": lambda values: np.quantile(values, 0.75),
    "median": lambda values: statistics.median(values),
    "text": lambda values: f"{statistics.fmean(values):.4f}",
}


class Trainer:
    """``figure_of`` of the losses so far is returned, and part of the next gradients."""

    def __init__(self, figure_of, kept, *, in_graph=False, bound=None):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.figure_of, self.losses, self.in_graph, self.bound = figure_of, kept, in_graph, bound

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        if self.in_graph and self.losses:
            loss = loss * self.figure_of(self.losses)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        figure = self.figure_of(self.losses)
        if self.bound is not None and figure > self.bound:
            return loss, figure, "above"
        return loss, figure


def compared(figure_of, kept, calls, between=lambda kept, at: None, **more):
    """The step after calls that are eager's."""
    eager, ours = (
        Trainer(figure_of, copy.copy(kept), **more),
        Trainer(figure_of, copy.copy(kept), **more),
    )
    step = treadle.compile(ours.step, model=ours.model, optimizer=ours.optimizer)
    for at in range(calls):
        for each in (eager, ours):
            between(each.losses, at)
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
        (loss, figure, *said), (true_loss, true_figure, *true_said) = step(x, y), eager.step(x, y)
        torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=0)
        assert type(figure) is type(true_figure)
        if type(figure) is not str:
            figure, true_figure = pytest.approx(figure, rel=1e-12, nan_ok=True), true_figure
        assert true_figure == figure
        assert said == true_said
        kept = list(map(float, ours.losses)), list(map(float, eager.losses))
        assert kept[0] == pytest.approx(kept[1], rel=1e-12, nan_ok=True)
    for mine, theirs in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
    return step


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("kind", [list, collections.deque], ids=["list", "deque"])
@pytest.mark.parametrize("figure_of", (FIGURES | OF_ALL).values(), ids=FIGURES | OF_ALL)
def test_a_running_figure_compiles_once(figure_of, kind):
    step = compared(figure_of, kind([0.5, 0.25]), 6)
    assert step.recompiles == []
    assert " 1 variant," in repr(step)  # nor captured again


@pytest.mark.parametrize("figure_of", (FIGURES | OF_ALL).values(), ids=FIGURES | OF_ALL)
def test_from_no_entries(figure_of):
    """The first call has none: of them no ``min`` is known."""
    assert len(compared(figure_of, [], 6).recompiles) <= 1


IN_GRAPH = [mean_of, FIGURES["best"], OF_ALL["fmean"], OF_ALL["np.mean"], OF_ALL["spread"]]


@pytest.mark.parametrize("figure_of", IN_GRAPH, ids=["mean", "best", "fmean", "np.mean", "spread"])
def test_in_the_graph(figure_of):
    step = compared(figure_of, [0.5, 1.5], 5, in_graph=True)
    assert step.recompiles == []


DECIDED = {
    "np.min": lambda values: np.min(values),
    "np.max": lambda values: np.max(values),
    "np.mean": lambda values: np.mean(values),
    "fmean": lambda values: statistics.fmean(values),
}
FIRST = {
    "floats": [0.5, 0.25],
    "none": [],
    "NaN": [0.5, math.nan],
    "whole": [1, 2],
    "NumPy's": [np.float64(0.5), True, 2.5],
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("figure_of", DECIDED.values(), ids=DECIDED)
def test_branches_on_figures(figure_of, first):
    """Of which the graph has a form: NaN is NaN for NumPy, and what was there before counts."""
    compared(figure_of, first, 6, bound=1.1)
    compared(figure_of, first, 4, bound=0.3)


TOTALS = {
    "sum": FIGURES["sum"],
    "fsum": lambda values: math.fsum(values),
    "np.sum": lambda values: np.sum(values),
}


@pytest.mark.parametrize("figure_of", TOTALS.values(), ids=TOTALS)
def test_a_branch_on_it_is_a_branch(figure_of):
    step = compared(figure_of, [0.5], 6, bound=4.0)
    assert " 2 variants," in repr(step)


def test_a_branch_on_a_figure_without_a_form_in_the_graph_is_refused():
    with pytest.raises(treadle.CaptureError, match="TR-102"):
        compared(lambda values: statistics.median(values), [0.5], 2, bound=4.0)


@pytest.mark.parametrize("figure_of", (FIGURES | OF_ALL).values(), ids=FIGURES | OF_ALL)
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_deque_that_drops_what_is_first(figure_of, most):
    step = compared(figure_of, collections.deque([0.5], maxlen=most), 7)
    assert step.recompiles == []
    assert " 1 variant," in repr(step) or most == 1  # which is full before the first call


def test_numbers_of_this_call_alone():
    def figure_of(values):
        latest = [values[-1], 0.5, values[-2]]
        return np.mean(latest), fmean(latest), math.fsum(latest), statistics.stdev(latest)

    assert compared(lambda values: sum(figure_of(values)), [0.25], 4).recompiles == []


def reordered(kept, at):
    """What others do to a list before some calls: more entries, fewer, another order."""
    if at == 2:
        kept.append(0.125)
    if at == 3:
        del kept[:2]
    if at == 4:
        kept.sort(reverse=True)


def test_a_spread_of_too_few_is_an_error_of_pythons():
    with pytest.raises(statistics.StatisticsError):
        compared(lambda values: statistics.stdev(values), [], 1)


@pytest.mark.parametrize("figure_of", (FIGURES | OF_ALL).values(), ids=FIGURES | OF_ALL)
def test_what_is_done_to_the_list_between_calls(figure_of):
    def between(kept, at):
        reordered(kept, at)
        if at == 5:
            kept[0] = math.nan
        if at == 6:
            kept[0], kept[-1] = math.inf, math.nan

    assert compared(figure_of, [0.5, 0.25], 8, between).recompiles == []


@pytest.mark.parametrize("figure_of", (FIGURES | OF_ALL).values(), ids=FIGURES | OF_ALL)
def test_entries_of_another_type(figure_of):
    def between(kept, at):
        if at in (2, 4, 6):
            kept[:] = [{2: 1, 4: True, 6: 0.5}[at], 0.25]

    compared(figure_of, [0.5, 0.25], 8, between)


def test_a_sum_of_whole_numbers_and_others():
    def between(kept, at):
        kept[:] = [[], [2**60, 1], [3, 0.5], [0.5]][at % 4]

    assert compared(FIGURES["mean"], [], 8, between).recompiles == []


class Counting(Trainer):
    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(len(y))
        return loss, sum(self.losses)


def test_whole_numbers_are_added_exactly():
    trainer = Counting(None, [2**60, 1])
    step = treadle.compile(trainer.step, model=trainer.model, optimizer=trainer.optimizer)
    for at in range(4):
        _, count = step(torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,)))
        assert count == 2**60 + 1 + 5 * (at + 1)
    assert step.recompiles == []


OF_PYTHON = FIGURES | {name: OF_ALL[name] for name in ("fsum", "fmean", "median", "text")}


@pytest.mark.parametrize("figure_of", OF_PYTHON.values(), ids=OF_PYTHON)
def test_a_second_step_is_not_traced(figure_of):
    """NumPy's functions read of NumPy what no data names."""
    first = compared(figure_of, [0.5, 0.25], 2)
    second = compared(figure_of, [0.5, 0.25, 0.75], 4)
    assert not first.compiled.untraced
    assert second.compiled.untraced
    assert second.recompiles == []


def smoothed(values):
    total = 0.0
    for value in values[-3:]:
        total = 0.9 * total + value
    return total


def put_later(values):
    window = values[-3:]
    values.append(7.0)
    return sum(window)


def changed(values):
    window = values[-2:]
    window.append(3.0)
    return sum(window) + len(window)


WINDOWS = {
    "mean": lambda values: sum(values[-3:]) / len(values[-3:]),
    "fmean": lambda values: statistics.fmean(values[-3:]),
    "np.mean": lambda values: np.mean(values[-3:]),
    "earlier and later": lambda values: sum(values[-4:-2]) - min(values[-2:]),
    "without the last": lambda values: sum(values[:-1]),
    "without the first": lambda values: sum(values[1:]),
    "more than there are": lambda values: sum(values[-1000:]) / 1000,
    "a copy": lambda values: max(values[:]),
    "in a helper": lambda values: mean_of(values[-2:]),
    "put later": put_later,
}
OPENED = {
    "loop": smoothed,
    "comprehension": lambda values: sum([value * 2 for value in values[-3:]]),
    "pairs": lambda values: sum(a - b for a, b in zip(values[-2:], values[-3:-1], strict=False)),
    "entries": lambda values: values[-3:][0] - values[-2:][-1],
    "added": lambda values: sum(values[-2:] + values[-3:-2]) - sum([0.5, 1.0] + values[-2:]),  # noqa: RUF005
    "changed": changed,
    "tensor": lambda values: float(torch.tensor(values[-3:]).double().mean()),
    "text": lambda values: ", ".join(f"{value:.3f}" for value in values[-3:]),
    "text of the list": lambda values: f"{values[-2:]}"[:3],
}


@pytest.mark.parametrize("count", [4, 0])
@pytest.mark.parametrize("figure_of", WINDOWS.values(), ids=WINDOWS)
def test_a_figure_of_a_slice(figure_of, count):
    step = compared(figure_of, [0.5, 0.25, 1.5, 0.75][:count], 7)
    assert step.recompiles == []
    assert " 1 variant," in repr(step) or count == 0


@pytest.mark.parametrize("count", [4, 0])
@pytest.mark.parametrize("figure_of", OPENED.values(), ids=OPENED)
def test_entries_of_a_slice_are_numbers_of_the_call(figure_of, count):
    """Each number of entries is a variant, until there are as many as the slice takes."""
    step = compared(figure_of, [0.5, 0.25, 1.5, 0.75][:count], 7)
    assert " 1 variant," in repr(step) or count == 0
    assert " 4 variants," not in repr(step)


def test_a_branch_on_figures_of_slices():
    """As plateaus are found."""

    def figure_of(values):
        return sum(values[-2:]) / 2 - sum(values[-4:-2]) / 2

    step = compared(figure_of, [0.5, 0.25, 1.5, 0.75], 10, bound=0.0)
    assert " 2 variants," in repr(step)


@pytest.mark.parametrize("figure_of", WINDOWS.values(), ids=WINDOWS)
def test_what_is_done_to_the_list_of_a_slice(figure_of):
    def between(kept, at):
        reordered(kept, at)
        if at == 5:
            kept[-1] = math.nan
        if at == 6:
            kept[:] = [1, 0.5]

    compared(figure_of, [0.5, 0.25, 1.0, 0.75], 8, between)


class Keeping(Trainer):
    def step(self, x, y):
        loss, _ = super().step(x, y)
        self.recent = self.losses[-3:]
        return loss, {"recent": self.losses[-2:], "pair": (self.losses[-4:-3], 1)}


def test_slices_that_leave_the_step_are_lists():
    eager, ours = (Keeping(FIGURES["sum"], [0.5, 0.25, 1.5, 0.75]) for _ in range(2))
    step = treadle.compile(ours.step, model=ours.model, optimizer=ours.optimizer)
    for _ in range(5):
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
        (_, told), (_, true) = step(x, y), eager.step(x, y)
        for mine, theirs in (
            (told["recent"], true["recent"]),
            (told["pair"][0], true["pair"][0]),
            (ours.recent, eager.recent),
        ):
            assert type(mine) is list
            assert mine == pytest.approx(theirs, rel=1e-12)
    assert " 1 variant," in repr(step)


def test_a_text_of_a_whole_list_is_the_text_of_the_call():
    compared(lambda values: f"{values}"[:5], [0.5], 3)


def test_a_long_slice_is_read_as_it_is():
    """Of which each entry would be a number of its own."""
    kept = [1.0 / (at + 1) for at in range(400)]
    compared(lambda values: sum([value * 2 for value in values[-300:]]), kept, 3)


def test_a_tensor_of_numbers_known_later():
    def figure_of(values):
        nested = torch.tensor([[values[-1], 1.0], [values[-2], 2.0]], dtype=torch.float64)
        return float(nested.prod())

    assert compared(figure_of, [0.5], 4).recompiles == []


class Holding:
    """Functions in attributes, dicts and lists."""

    function = staticmethod(statistics.fmean)
    functions = (np.mean, min)

    def __init__(self):
        self.fold = min
        self.lower = True

    def of(self, values):
        return self.fold(values) if self.fold is min and self.lower else None


HELD = Holding()
BY_NAME = {"min": min, "mean": np.mean, "count": len}


def local(values):
    function = max
    return function(values) - function(values[-2:])


def passed_on(function, values):
    return function(values)


OTHER_NAMES = {
    "attribute": HELD.of,
    "class attribute": lambda values: Holding.function(values),
    "list": lambda values: Holding.functions[0](values),
    "dict": lambda values: BY_NAME["min"](values) + BY_NAME["count"](values),
    "all of a dict": lambda values: sum(f(values) for f in BY_NAME.values()),
    "variable": local,
    "argument": lambda values: passed_on(math.fsum, values),
    "length": lambda values: passed_on(len, values),
}


@pytest.mark.parametrize("figure_of", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_a_function_by_another_name(figure_of):
    step = compared(figure_of, [0.5, 0.25, 1.5], 6)
    assert step.recompiles == []
    assert " 1 variant," in repr(step)


def test_an_extreme_by_another_name_is_no_branch():
    best = [math.inf]

    def figure_of(values):
        return HELD.fold(HELD.fold(values[-1], values[-2]), 0.9)

    assert compared(figure_of, [0.5, 0.25, *best], 6).recompiles == []


def test_what_a_list_is_asked_by_a_method_is_read():
    compared(lambda values: values.index(values[-1]) + values.count(0.5), [0.5, 0.25], 4)


class Stacking(Trainer):
    """Keeps tensors."""

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        return loss.detach(), torch.stack(list(self.losses)).mean()


def call(step, times):
    for _ in range(times):
        step(torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,)))


def test_what_depends_on_the_length_of_a_list_says_where():
    trainer = Stacking(None, [])
    step = treadle.compile(trainer.step, model=trainer.model, optimizer=trainer.optimizer)
    with pytest.warns(RuntimeWarning, match=r"torch\.stack\(list.*remedy") as told:
        call(step, 6)
    assert len(told) == 1  # and no second time
    assert "self.losses has other entries, all of which are read: " in step.recompiles[-1]
    assert __file__ in step.recompiles[-1]


def test_the_remedy_is_one():
    trainer = Stacking(None, collections.deque(maxlen=2))
    step = treadle.compile(trainer.step, model=trainer.model, optimizer=trainer.optimizer)
    call(step, 3)
    before = repr(step)
    call(step, 3)
    assert repr(step) == before
