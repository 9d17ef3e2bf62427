"""Checks that do nothing but raise are part of a step: eager's error at the call where one does not
hold, with nothing changed, and then the step goes on."""

import copy
import math
import sys
import textwrap
import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch.distributions as D
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from contract.contract_help import assert_same_state, state_of, training

PLAIN = treadle.Options(codegen=False)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def validation():
    """Dynamo turns it off for good."""
    was = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(was)


class Net(nn.Module):
    """A norm whose buffers change, and dropout that draws, before what is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.last(F.dropout(x, 0.5, self.training))


def outcome(function, batch, seed):
    """The result, or the error's kind and text and the line that raised it; the generator after."""
    torch.manual_seed(seed)
    try:
        found = function(*batch)
    except Exception as error:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        place = last.tb_frame.f_code.co_filename, last.tb_lineno
        found = type(error), str(error), place, error.__context__
    return found, torch.get_rng_state()


def values(models, optimizers):
    found = state_of(models, optimizers)
    return {name: None if each is None else each.clone() for name, each in found.items()}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        assert (value is None) == (other is None), name
        assert value is None or torch.equal(value, other), name


def pair(make, **options):
    """A compiled step, eager's function, and the model and optimizer of each, which begin alike."""
    torch.manual_seed(0)
    function, model, optimizer = make()
    torch.manual_seed(0)
    eager, twin, other = make()
    step = treadle.compile(function, model=model, optimizer=optimizer, **options)
    return step, eager, (model, optimizer), (twin, other)


def beside(make, batches, bad, **options):
    """Both ways through ``batches``; at the numbers in ``bad`` eager raises."""
    step, eager, ours, theirs = pair(make, **options)
    for number, batch in enumerate(batches):
        compare(step, eager, ours, theirs, number, batch, raises=number in bad)
    return step


def compare(step, eager, mine, others, number, batch, *, raises):
    """One call of both ways."""
    model, optimizer = mine
    before = values(model, optimizer)
    ours, random = outcome(step, batch, number)
    theirs, random_of_eager = outcome(eager, batch, number)
    assert torch.equal(random, random_of_eager), number
    assert isinstance(theirs, tuple) == raises, theirs
    if raises:
        assert ours == theirs
        after = values(model, optimizer)
        weights = [name for name, _ in model.named_parameters()]
        assert all(torch.equal(before[f"0.{n}"], after[f"0.{n}"]) for n in weights)
    else:
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert_same_state(mine, others, **CLOSE)


def gaussian(clears="after", **kind):
    def make():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss_of = nn.GaussianNLLLoss(**kind)

        def step(x, y, var):
            if clears == "before":
                optimizer.zero_grad()
            loss = loss_of(model(x), y, var)
            if clears == "between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clears == "after":
                optimizer.zero_grad()
            return loss.detach()

        return step, model, optimizer

    return make


def gaussian_batches(bad, count=8):
    found = []
    for number in range(count):
        made = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 4, generator=made), torch.randn(16, 3, generator=made)
        var = torch.rand(16, 3, generator=made) + 0.1
        if number in bad:
            var[3, 1] = -1.0
        found.append((x, y, var))
    return found


@pytest.mark.parametrize("clears", ["before", "between", "after", "never"])
@pytest.mark.parametrize("bad", [(5,), (0, 1, 4)], ids=str)
def test_a_loss_that_checks_its_argument(bad, clears):
    step = beside(gaussian(clears), gaussian_batches(bad), bad, options=PLAIN)
    assert not [each for each in step.recompiles if "eagerly" in each]
    assert "1 check evaluated in each call" in step.explain()


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": 0.0}, {"memory": "1MiB"}, {"numerics": "eager"}, {"rng": "counter"}],
    ids=str,
)
def test_however_it_is_compiled(options):
    if options.get("rng") == "counter":  # other masks than eager's: without dropout
        options, kind = {**options}, gaussian()

        def make():
            function, model, optimizer = kind()
            return function, model.eval(), optimizer

        beside(make, gaussian_batches((0, 5)), (0, 5), **options)
        return
    beside(gaussian(), gaussian_batches((0, 5)), (0, 5), **options)


def test_of_each_size_and_of_declared_ones():
    batches = [
        tuple(each[: 6 + number] for each in batch)
        for number, batch in enumerate(gaussian_batches((0, 4)))
    ]
    beside(gaussian(), batches[:3], (0,), options=PLAIN)
    names = {"x": ("rows", None), "y": ("rows", None), "var": ("rows", None)}
    rows = treadle.dynamic(names, rows=(4, 64))
    beside(gaussian(), batches[:3], (0,), shapes=rows)  # each size is compiled by itself here


def test_one_variant_of_many_sizes():
    def make():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            if not torch.isfinite(loss):
                raise ValueError("no number")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, model, optimizer

    batches = [(torch.randn(5 + at, 4), torch.randn(5 + at, 3)) for at in range(5)]
    for at in (1, 3):
        batches[at][0][0, 0] = float("nan")
    rows = treadle.dynamic({"x": ("rows", None), "y": ("rows", None)}, rows=(4, 64))
    step = beside(make, batches, (1, 3), shapes=rows)
    assert step.recompiles == ["compiled for rows in 4..64"]


def test_gradients_that_are_cleared_after_the_check_stay_when_it_fails():
    function, model, optimizer = gaussian("between")()
    step = treadle.compile(function, model=model, optimizer=optimizer, options=PLAIN)
    good, bad = gaussian_batches((1,), 2)
    for _ in range(3):
        step(*good)
    before = values(model, optimizer)
    assert before["0.first.weight.grad"] is not None
    with pytest.raises(ValueError, match="negative entry"):
        step(*bad)
    after = values(model, optimizer)
    kept = {name for name in before if "norm." not in name or name.endswith((".weight", ".bias"))}
    same({n: before[n] for n in kept}, {n: after[n] for n in kept})


def losses():
    """Distributions with their own checks, as a loss of what a layer gives, and a batch whose
    numbers are none of theirs."""
    one = torch.ones(3)
    return {
        "normal": lambda h, x: -D.Normal(h, one).log_prob(x).mean(),
        "normal drawn": lambda h, x: D.Normal(h, h.exp()).rsample().pow(2).mean(),
        "categorical": lambda h, x: -D.Categorical(logits=h).log_prob(x.argmax(1)).mean(),
        "entropy": lambda h, x: -D.Categorical(probs=h.softmax(1)).entropy().mean(),
        "beta": lambda h, x: -D.Beta(h.exp(), one).log_prob(x.sigmoid()).mean(),
        "beta drawn": lambda h, x: D.Beta(h.exp(), 1 + h.exp()).rsample().mean(),
        "bernoulli": lambda h, x: -D.Bernoulli(logits=h).log_prob((x > 0).float()).mean(),
        "gamma": lambda h, x: -D.Gamma(h.exp(), one).log_prob(x.exp()).mean(),
        "independent": lambda h, x: -D.Independent(D.Normal(h, one), 1).log_prob(x).mean(),
        "log-normal": lambda h, x: -D.LogNormal(h, one).log_prob(x.exp()).mean(),
        "dirichlet": lambda h, x: -D.Dirichlet(h.exp()).log_prob(x.softmax(1)).mean(),
        "tril": lambda h, x: -D.MultivariateNormal(
            h, scale_tril=torch.diag(h.exp().mean(0))
        ).log_prob(x).mean(),
        "covariance": lambda h, x: D.MultivariateNormal(
            h.mean(0), covariance_matrix=torch.eye(3) + h.T @ h
        ).rsample().mean(),
    }  # fmt: skip


@pytest.mark.parametrize("name", losses())
def test_a_distribution_that_checks_its_arguments(name):
    loss_of = losses()[name]

    def make():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return training(lambda x: loss_of(model(x), x.detach()), optimizer), model, optimizer

    torch.manual_seed(1)
    batches = [(torch.randn(6, 3),) for _ in range(6)]
    step, eager, ours, theirs = pair(make, options=PLAIN)
    for number, batch in enumerate(batches[:4]):
        compare(step, eager, ours, theirs, number, batch, raises=False)
    batches[4][0][1, 1] = float("nan")
    before = values(*ours)
    with pytest.raises(ValueError, match=r"to satisfy the constraint|within the support"):
        step(*batches[4])
    same(before, values(*ours))
    assert torch.isfinite(step(*batches[5]))


def in_autocast(h):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        if not (h @ h.T).isfinite().all():
            raise ValueError(f"{list(h.shape)} is not finite")
    return h


def in_a_region(h):
    def region(h):
        h = F.dropout(h, 0.5)
        if not h.isfinite().all():
            raise OverflowError("too large")
        return h.relu()

    return checkpoint(region, h, use_reentrant=False)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if grad.isnan().any():
            raise ArithmeticError("the gradient is no number")
        return grad * 2


def not_finite(h):
    return bool((h != h).any())


def in_a_caller(h):
    if not_finite(h):
        raise ValueError("no number")
    return h


def several(h):
    worst = h.abs().max()
    if worst > 1e6 or h.isnan().any():
        raise RuntimeError(f"{worst} is too large")
    ok = bool(torch.isfinite(h.sum()))
    if not ok:
        raise RuntimeError(f"the sum is {h.sum()}")
    if any([h.isnan().any(), h.isinf().any()]):
        raise RuntimeError("again")
    return h


@pytest.mark.parametrize(
    "body", [in_autocast, in_a_region, Backward.apply, in_a_caller, several],
    ids=["autocast", "checkpoint", "backward", "caller", "several"],
)  # fmt: skip
@pytest.mark.parametrize("options", [{"options": PLAIN}, {"memory": 0.0}], ids=["plain", "budget"])
def test_wherever_it_stands(body, options):
    def make():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return training(lambda x: body(model(x)).pow(2).mean(), optimizer), model, optimizer

    batches = [(torch.randn(6, 3),) for _ in range(4)]
    batches[2][0][1, 1] = float("nan")
    if body is in_a_region and torch.__version__ < "2.13":
        batches = batches[:2]  # such a region that raised is never left: its hooks stay set
    step, eager, (model, optimizer), (twin, other) = pair(make, **options)
    for number, batch in enumerate(batches):
        ours, random = outcome(step, batch, number)
        theirs, others = outcome(eager, batch, number)
        assert torch.equal(random, others)
        if number == 2:
            assert isinstance(theirs, tuple)
            assert ours == theirs
            model.zero_grad()
            twin.zero_grad()
        else:
            torch.testing.assert_close(ours, theirs, **CLOSE)
        assert_same_state((model, optimizer), (twin, other), **CLOSE)


@pytest.mark.parametrize("options", [{"options": PLAIN}, {"memory": 0.0}, {}], ids=str)
def test_gradients_are_checked_before_anything_is_written(options):
    def make():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            return loss.detach()

        return step, model, optimizer

    batches = [(torch.randn(8, 4),) for _ in range(5)]
    batches[3][0][0, 0] = float("inf")
    torch.manual_seed(0)
    function, model, optimizer = make()
    step = treadle.compile(function, model=model, optimizer=optimizer, **options)
    for number, batch in enumerate(batches):
        if number != 3:
            step(*batch)
            continue
        before = {name: each.clone() for name, each in model.named_parameters()}
        with pytest.raises(RuntimeError, match="non-finite"):
            step(*batch)
        for name, each in model.named_parameters():
            assert torch.equal(each, before[name])


def test_a_check_of_what_the_step_has_updated():
    def make():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.weight.abs().max() > 100:
                raise ValueError("it grew")
            return loss.detach()

        return step, model, optimizer

    batches = [(torch.randn(4, 3) * (1e3 if number == 2 else 1),) for number in range(3)]
    beside_updated(make, batches)


def beside_updated(make, batches):
    """The last call raises, after eager has changed what it changes."""
    torch.manual_seed(0)
    function, model, optimizer = make()
    torch.manual_seed(0)
    eager, twin, other = make()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    for number, batch in enumerate(batches):
        ours, theirs = outcome(step, batch, number)[0], outcome(eager, batch, number)[0]
        assert isinstance(theirs, tuple) == (number == len(batches) - 1)
        if isinstance(theirs, tuple):
            assert ours == theirs
        assert_same_state((model, optimizer), (twin, other), rtol=1e-4, atol=1e-4)


def test_where_an_error_is_caught_the_call_is_eagers_and_says_so():
    model = nn.Linear(3, 3)
    twin = copy.deepcopy(model)

    def required(h):
        if h.isnan().any():
            raise ValueError("no number")

    def evaluate(x, model):
        h = model(x)
        try:
            required(h)
        except ValueError:
            h = h.nan_to_num()
        return h.sum()

    step = treadle.compile(lambda x: evaluate(x, model), model=model, options=PLAIN)
    good, bad = torch.randn(4, 3), torch.full((4, 3), float("nan"))
    torch.testing.assert_close(step(good), evaluate(good, twin))
    with pytest.warns(RuntimeWarning, match="ran eagerly"):
        torch.testing.assert_close(step(bad), evaluate(bad, twin))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(step(bad), evaluate(bad, twin))
    torch.testing.assert_close(step(good), evaluate(good, twin))
    assert len([each for each in step.recompiles if "ran eagerly" in each]) == 1
    with pytest.raises(treadle.RuntimeFailure, match="TR-408"):
        step.measure(bad)
    assert step.measure(good).peak_bytes


def test_the_step_checks_an_index_before_it_is_looked_up():
    model = nn.Embedding(5, 3)

    def look(tokens):
        if (tokens >= 5).any():
            raise KeyError("no such word")
        return model(tokens).sum()

    step = treadle.compile(look, model=model, options=PLAIN)
    for token in (9, 1, 9, 2):
        tokens = torch.tensor([0, token])
        if token == 9:
            with pytest.raises(KeyError, match="no such word"):
                step(tokens)
        else:
            torch.testing.assert_close(step(tokens), look(tokens))


def test_gradients_alone():
    function, model, optimizer = gaussian()()
    step = treadle.compile(function, model=model, optimizer=optimizer, options=PLAIN)
    good, bad = gaussian_batches((1,), 2)
    step(*good, update=False)
    before = values(model, optimizer)
    with pytest.raises(ValueError, match="negative entry"):
        step(*bad, update=False)
    after = values(model, optimizer)
    assert torch.equal(before["0.last.weight"], after["0.last.weight"])
    step(*good)
    assert not torch.equal(before["0.last.weight"], model.last.weight)


@pytest.mark.filterwarnings("ignore:a call ran eagerly")
@pytest.mark.parametrize("clears", ["before", "after", "never"])
def test_gradients_that_a_call_without_an_update_leaves_alone(clears):
    """In a call that runs eagerly as in others: of parameters that its backward does not reach,
    and all of them if there is none."""

    def check(x):
        if (x > 5).any():
            raise ValueError("large")

    def left(factor):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def function(x, at):
            if clears == "before":
                optimizer.zero_grad()
            try:
                check(x)
            except ValueError:
                x = x * 1
            loss = sum(each(x / x.max()).square().sum() for each in model[:at])
            if at:
                loss.backward()
            optimizer.step()
            if clears == "after" and at:
                optimizer.zero_grad()
            return x.sum()

        step = treadle.compile(function, model=model, optimizer=optimizer, options=PLAIN)
        found = []
        for at in (2, 1, 0):
            step(torch.ones(1, 2) * (factor if at < 2 else 1), at, update=False)
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        return found, sum("ran eagerly" in each for each in step.recompiles)

    (ours, eagerly), (theirs, none) = left(10), left(1)
    assert (eagerly, none) == (1, 0)
    assert [each is None for each in ours] == [each is None for each in theirs]
    assert sum(each is not None for each in ours) == (6 if clears == "before" else 12)
    torch.testing.assert_close(ours, theirs)


def test_a_saved_step_and_a_plan(tmp_path):
    function, model, optimizer = gaussian()()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    good, bad = gaussian_batches((1,), 2)
    step(*good)
    step.save(tmp_path / "step")
    loaded = treadle.load(tmp_path / "step", function, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="negative entry"):
        loaded(*bad)
    loaded(*good)
    assert loaded.compiled.from_cache
    plan = treadle.plan(function, *good, model=model, optimizer=optimizer)
    assert plan.peak_bytes == step.compiled.artifact.peak_bytes


# Shapes of the question.

GOOD, BAD = "(x == x).all()", "x.isnan().any()"
CONDITIONS = [BAD, f"not {GOOD}", "x.sum() != x.sum()", f"bool({BAD})", f"not bool({GOOD})",
              f"not not {BAD}", "has_nan(x)", f"any([{BAD}, {BAD}])"]  # fmt: skip
JOINED = ["{0}", "{0} or {1}", "yes and {0}", "no or {0}", "not (not ({0}))", "{0} and yes",
          "not (not ({0}) and not ({1}))", "({0}) if yes else ({1})"]  # fmt: skip
STATEMENTS = [
    "if {0}:\n    raise ValueError('bad')",
    "assert not ({0})",
    "assert not ({0}), 'bad ' + str(1)",
    "if not ({0}):\n    pass\nelse:\n    raise ValueError('bad')",
    "ok = not ({0})\nif not ok:\n    raise ValueError(f'bad {{ok}}')",
    "with torch.no_grad():\n    if {0}:\n        raise ValueError('bad')",
    "try:\n    if {0}:\n        raise ValueError('bad')\nfinally:\n    no = False",
    "try:\n    assert not ({0})\nexcept AssertionError as error:\n    raise TypeError from error",
    "for each in (x, x):\n    if {0}:\n        raise ValueError('bad')",
    "while {0}:\n    raise ValueError('bad')",
    "if {0}:\n    why = [i for i in range(3)]\n    raise ValueError(why)",
    "if yes:\n    if {0}:\n        raise ValueError('bad' if no else 'worse')",
    "def inner():\n    return {0}\nif inner():\n    raise ValueError('bad')",
]
LONG = "\n".join(f"number = {at} if no else {at + 1}" for at in range(120))


def written(source):
    """The function of ``x`` that ``source`` is in."""
    body = textwrap.indent(source, "    ")
    text = f"def has_nan(x):\n    return bool({BAD})\ndef checked(x, yes, no):\n{body}\n"
    found = {"torch": torch}
    exec(compile(text + "    return x\n", "<written>.py", "exec"), found)
    return found["checked"]


@settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(
    st.sampled_from(STATEMENTS),
    st.sampled_from(JOINED),
    st.sampled_from(CONDITIONS),
    st.sampled_from(CONDITIONS),
    st.booleans(),
)
def test_however_the_question_is_written(statement, joined, first, second, long):
    source = statement.format(joined.format(first, second))
    checked = written(f"if {BAD}:\n{textwrap.indent(LONG, '    ')}\n    raise OSError\n{source}"
                      if long else source)  # fmt: skip
    model = nn.Linear(3, 3)

    def plain(x):
        return checked(model(x), True, False).sum()

    step = treadle.compile(plain, model=model, options=PLAIN)
    good, bad = torch.ones(2, 3), torch.full((2, 3), float("nan"))
    for x in (good, bad, good):
        ours, theirs = outcome(step, (x,), 0)[0], outcome(plain, (x,), 0)[0]
        assert isinstance(theirs, tuple) == bool(x.isnan().any())
        if isinstance(theirs, tuple):
            assert ours[:3] == theirs[:3]
        else:
            torch.testing.assert_close(ours, theirs)
    assert not step.recompiles


def stops(loss):
    print(f"Loss is {loss.item()}, stopping training")
    sys.exit(1)


def fails(loss):
    print(f"Loss is {loss.item()}")
    raise FloatingPointError("loss")


def exits_here(loss):
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training")
        sys.exit(1)


def exits_in_a_call(loss):
    if not math.isfinite(loss.item()):
        stops(loss)


def fails_in_a_call(loss):
    if loss.isnan():
        fails(loss)


@pytest.mark.parametrize("check", [exits_here, exits_in_a_call, fails_in_a_call])
def test_a_step_that_stops_the_program_says_what_eager_says(check, capsys):
    """The first calls are fine, and the one that is not prints its values."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    def step_of(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            check(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    step = treadle.compile(
        step_of(model, optimizer), model=model, optimizer=optimizer, options=PLAIN
    )
    eager = step_of(twin, other)
    for bad in (False, True, False, True, False):
        x = torch.full((2, 3), float("nan")) if bad else torch.randn(2, 3)
        found = []
        for each in (step, eager):
            if bad:
                with pytest.raises((SystemExit, FloatingPointError)) as stopped:
                    each(x)
                found.append((stopped.type, str(stopped.value), capsys.readouterr().out))
            else:
                found.append((each(x), capsys.readouterr().out))
        assert found[0] == pytest.approx(found[1]) if not bad else found[0] == found[1]
        assert_same_state((model, optimizer), (twin, other), **CLOSE)
    assert not step.recompiles


@pytest.mark.parametrize("source", [
    f"if {BAD}:\n    x = x * 2",
    f"if {BAD}:\n    return x * 2",
    f"try:\n    assert {GOOD}\nexcept AssertionError:\n    x = x * 2",
    f"x = x * 2 if {BAD} else x",
    f"while {BAD}:\n    x = x.nan_to_num()",
    f"if {BAD}:\n    raise ValueError\nelse:\n    raise TypeError",
    f"for each in (x, x):\n    if {BAD}:\n        break\nelse:\n    x = x + 1",
    "x = x * 2 if x.sum().item() > 0 else x",
    f"numbers = [1 for each in (x, x) if {BAD}]",
])  # fmt: skip
def test_what_both_ways_go_on_from_is_a_path_and_refused_where_strict(source):
    checked = written(source + "\nreturn x")
    model = nn.Linear(3, 3)

    def plain(x):
        return checked(model(x), True, False).sum()

    step = treadle.compile(plain, model=model, options=PLAIN)
    good, bad = torch.ones(2, 3), torch.full((2, 3), float("nan"))
    for x in (good, bad, -good, bad, good):
        ours, theirs = outcome(step, (x,), 0)[0], outcome(plain, (x,), 0)[0]
        if isinstance(theirs, tuple):
            assert issubclass(ours[0], theirs[0])  # of the capture it has a code
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert len(step.recompiles) <= 1
    strict = treadle.Options(codegen=False, strict=True)
    with pytest.raises(treadle.CaptureError, match="TR-102"):
        treadle.compile(plain, model=model, options=strict)(good)
    assert "__bool__" not in vars(torch.Tensor)
