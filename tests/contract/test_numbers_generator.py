"""Numbers that change from call to call: kinds of numbers, the places that hold them, and what a
step does with them. A number that is seen to change is one of the run time from then on; what a
step decides by one compiles once for each way that it goes.

python tests/contract/test_numbers_generator.py
"""

import itertools
import linecache
import math
import sys
import types
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import treadle
from treadle import Options

KINDS = {
    "float": lambda i: 0.5 + i / 8,
    "int": lambda i: i,
    "float16": lambda i: np.float16(0.5 + i / 7),
    "float32": lambda i: np.float32(0.5 + i / 7),
    "float64": lambda i: np.float64(0.5 + i / 7),
    "int32": lambda i: np.int32(i),
    "int64": lambda i: np.int64(i),
}
WHOLE = frozenset({"int", "int32", "int64"})


class Use(NamedTuple):
    """``ways``: how many there are through the step for the numbers of a run."""

    body: str
    ways: int = 1
    whole: bool = False


USES = {
    "a factor": Use("x * v"),
    "a factor before": Use("v * x"),
    "arithmetic": Use("x * (1 - v) + 2 * v - v / 3"),
    "arithmetic of NumPy's": Use("x * (np.float32(0.1) * v + v * np.float64(0.3))"),
    "a power": Use("x * 0.9**v"),
    "a correction": Use("x / (1 - 0.9 ** (v + 1))"),
    "a bound": Use("x.clamp(max=v / 3)"),
    "alpha": Use("torch.add(x, x, alpha=v)"),
    "a tensor": Use("torch.tensor(v), torch.tensor(v) * x, torch.full((3,), v)"),
    "a comparison": Use("x * 2 if v < 100 else x * v"),
    "a branch": Use("x * (2 if v % 2 < 1 else 3)", ways=2),
    "a warm-up": Use("x * min(1.0, (v + 1) / 3)", ways=2),
    "rounding": Use("x * round(v / 3)"),
    "a function of NumPy's": Use("x * np.cos(v)"),
    "a function of Python's": Use("x * math.cos(v) + math.sqrt(v + 1)"),
    "a conversion": Use("x * float(v) + int(v)"),
    "an index": Use("x[v % 4] * 2", whole=True),
    "an index from the end": Use("x[1:, v % 3 - 3] * 2", whole=True),
    "two indices": Use("x[v % 4, v % 3] * x[None, ..., v % 2]", whole=True),
    "a slice": Use("x[v % 3 : v % 3 + 2] * 2", whole=True),
    "narrow": Use("x.narrow(1, v % 2, 2) * x[v % 4, 1:]", whole=True),
    "an item that is written": Use("put_at(x * 1.0, (v % 4,), x[0])", whole=True),
    "a column that is written": Use("put_at(x * 1.0, (slice(1, 3), v % 3), v)", whole=True),
    "a slice that is written": Use(
        "put_at(x * 1.0, (slice(v % 3, v % 3 + 2), 1), x[:2, 0])", whole=True
    ),
    "nothing": Use("x * 1.0"),
    "a result": Use("x * 1.0, v, v + 1, -v"),
}

FORMS = {
    "leaky_relu": "F.leaky_relu(t, float(v) / 9)",
    "leaky_relu in place": "F.leaky_relu(t * 1.0, float(v) / 9, inplace=True)",
    "elu": "F.elu(t * 50, v + 1.0)",
    "celu": "F.celu(t * 50, alpha=v + 1.0)",
    "threshold": "F.threshold(t, float(v) / 9, v - 2.0)",
    "hardtanh": "F.hardtanh(t, -float(v) - 0.1, v + 0.2)",
    "softplus": "F.softplus(t * 50, v + 1.0, 4.0 + v)",
    "softshrink": "F.softshrink(t, float(v) / 9)",
    "hardshrink": "F.hardshrink(t, float(v) / 9)",
    "logit": "torch.logit(t.sigmoid(), eps=(v + 1) / 40.0)",
    "nan_to_num": "torch.nan_to_num(t + HOLES, nan=float(v), posinf=2.0, neginf=-v - 1.0)",
    "index_fill": "t.index_fill(1, torch.tensor([0, 2]), float(v))",
    "addmm": "torch.addmm(t[:1], t, t.t() @ t, beta=float(v), alpha=v + 1.0)",
    "addmv": "torch.addmv(t[:, 0], t, t[1], alpha=v + 1.0)",
    "addr": "torch.addr(t @ t.t(), t[:, 0], t[:, 1], beta=v + 1.0)",
    "baddbmm": "torch.baddbmm(t[None], t[None] @ t.t(), t[None], beta=0, alpha=v + 1.0)",
    "addbmm": "torch.addbmm(t, t[None] @ t.t(), t[None], alpha=v + 1.0)",
    "attention": "F.scaled_dot_product_attention(t[None], t[None], t[None], scale=(v + 1.0) / 3)",
    "huber": "F.huber_loss(t, t.detach() * 3, delta=v + 0.1)",
    "smooth l1": "F.smooth_l1_loss(t, t.detach() * 3, beta=v + 0.1, reduction='none')",
    "ranking": "F.margin_ranking_loss(t[0], t[1], torch.ones(3), margin=float(v))",
    "triplet": "F.triplet_margin_loss(t, t.detach() * 2, t - 1, margin=v + 0.1, swap=True)",
    "hinge": "F.hinge_embedding_loss(t, torch.ones(3), margin=v + 1.0)",
    "smoothing": "F.cross_entropy(t, torch.tensor([0, 1, 2, 1]), label_smoothing=(v + 1.0) / 9)",
    "padding": "F.pad(t, (1, 0, 0, 2), value=float(v))",
    "gumbel": "F.softmax(t / (v + 1.0), dim=1) + F.normalize(t, eps=v + 1.0)",
    "batch norm": "averages(t, v / 9)",
    "linspace": "t * torch.linspace(-float(v), v + 1.0, 3)",
    "rounded quotient": "torch.div(t, v + 1.0, rounding_mode='floor') + t",
    "whole numbers": "t * ((t > 0).long() * (v + 0.5)) + (t > 0) * float(v)",
    "a distribution": "torch.distributions.Normal(t, float(v) + 1).log_prob(t * 2)",
    "a custom function": "Scaled.apply(t, float(v))",
    "a class of tensors": "t * torch.Tensor([float(v), 1, 2]) * torch.FloatTensor([v + 0.5])",
    "another class of tensors": "t * torch.DoubleTensor([[float(v)]]).float() * Made([v, 0.5, 1])",
    "a tensor like another": "t * t.new_tensor([float(v), 2, 3]) + t.new([v + 0.5])",
}
"""Of a tensor ``t`` and a number."""

USES |= {
    name: Use(f"gradient(lambda t: {form}, x), (lambda t: {form})(x)")
    for name, form in FORMS.items()
}
USES |= {
    "an entry": Use("x * [0.5, 1.5, -2.5, 3.5, 4.5, 5.5][v]", whole=True),
    "an entry of a table": Use("x * table[v] + table[-v]", whole=True),
    "an entry of a dict": Use("x * named[v]", whole=True),
    "an entry of an array": Use("x * array[v % 3]", whole=True),
    "an entry beside others": Use("x * [v + 1, 2 * v, v - 1][v % 3]", whole=True),
}

PLACES = {
    "argument": ("def step(x, v):\n    return BODY", "step(x, V)"),
    "keyword": ("def step(x, *, v):\n    return BODY", "step(x, v=V)"),
    "in a dict": ("def step(x, d):\n    v = d['v']\n    return BODY", "step(x, {'v': V})"),
    "global": ("g = 0\ndef step(x):\n    v = g\n    return BODY", "put(g=V); step(x)"),
    "attribute": (
        "o = types.SimpleNamespace(v=0)\ndef step(x):\n    v = o.v\n    return BODY",
        "o.v = V; step(x)",
    ),
    "attribute of another object each time": (
        "o = types.SimpleNamespace(v=0)\ndef step(x):\n    v = o.v\n    return BODY",
        "put(o=types.SimpleNamespace(v=V)); step(x)",
    ),
    "attribute of the model": (
        "model.v = 0\ndef step(x):\n    v = model.v\n    return BODY",
        "model.v = V; step(x)",
    ),
    "entry": ("o = {'v': 0}\ndef step(x):\n    v = o['v']\n    return BODY", "o['v'] = V; step(x)"),
    "item": ("o = [0]\ndef step(x):\n    v = o[0]\n    return BODY", "o[0] = V; step(x)"),
    "parameter group": (
        "group = optimizer.param_groups[0]\ndef step(x):\n    v = group['v']\n    return BODY",
        "group['v'] = V; step(x)",
    ),
    "variable of a function": (
        "def make():\n    v = 0\n    def set(new):\n        nonlocal v\n        v = new\n"
        "    def step(x):\n        return BODY\n    return step, set\nstep, set = make()",
        "set(V); step(x)",
    ),
}


WORLDS = itertools.count()


def put_at(x, index, value):
    x[index] = value
    return x


def gradient(function, x):
    """That of the sum of what a function gives."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def averages(x, momentum):
    """Averages of a batch norm, and its result."""
    mean, variance = torch.zeros(3), torch.ones(3)
    found = F.batch_norm(x, mean, variance, training=True, momentum=momentum)
    return found + mean + variance


class Scaled(torch.autograd.Function):
    """The gradient is scaled by a number that the context keeps."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg() * ctx.by, None


class World:
    """A program of its own; ``compiled`` if its step is."""

    def __init__(self, text, compiled):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.space = {
            "torch": torch, "np": np, "math": math, "put_at": put_at, "types": types,
            "model": model, "optimizer": optimizer, "F": F, "gradient": gradient,
            "averages": averages, "Scaled": Scaled, "Made": torch.FloatTensor,
            "HOLES": torch.tensor([math.nan, math.inf, -math.inf]),
            "table": [0.5 * k for k in range(9)], "named": {k: k / 3 for k in range(9)},
            "array": np.linspace(0.0, 1.0, 5),
        }  # fmt: skip
        self.space["put"] = self.space.update
        optimizer.param_groups[0]["v"] = 0.0
        file = f"{__file__}.{next(WORLDS)}.py"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        exec(compile(text, file, "exec"), self.space)
        self.step = self.space["step"]
        if compiled:
            options = Options(codegen=False)
            self.step = treadle.compile(
                self.step, model=model, optimizer=optimizer, options=options
            )
            self.space["step"] = self.step

    def call(self, text, value, x):
        space = self.space | {"V": value, "x": x}
        *before, last = text.split("; ")
        for each in before:
            exec(each, self.space | {"V": value}, self.space)
        return eval(last, space)


def compiles(kind, place, use, calls=6):
    """How often a step is compiled that is beside eager; an error if it is not."""
    text, call = PLACES[place]
    text = text.replace("BODY", use.body)
    ours, theirs = World(text, compiled=True), World(text, compiled=False)
    for at in range(calls):
        x = torch.randn(4, 3)
        found, expected = (each.call(call, KINDS[kind](at), x) for each in (ours, theirs))
        torch.testing.assert_close(found, expected, equal_nan=False)
        pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
        assert all(type(a) is type(b) for a, b in pairs), (found, expected)
    return 1 + len(ours.step.recompiles), ours.step.recompiles


def cases():
    for kind, place, use in itertools.product(KINDS, PLACES, USES):
        if not USES[use].whole or kind in WHOLE:
            yield kind, place, use


def together(names):
    """A step that has these uses one after the other, of equal ``ways`` and ``whole``."""
    ways, whole = {(USES[name].ways, USES[name].whole) for name in names}.pop()
    return Use(", ".join(f"({USES[name].body})" for name in names), ways, whole)


def programs(size=6):
    """Uses of one way by ``size``, each of several ways and that of nothing alone."""
    for whole in (False, True):
        names = [name for name, use in USES.items() if use.whole == whole and use.ways == 1]
        names = [name for name in names if name != "nothing"]
        yield from (tuple(names[at : at + size]) for at in range(0, len(names), size))
    yield from ((name,) for name, use in USES.items() if use.ways > 1 or name == "nothing")


def test_each_use_is_in_a_program():
    assert sorted(itertools.chain(*programs())) == sorted(USES)


@pytest.mark.parametrize("names", programs(), ids=", ".join)
def test_a_number_that_changes_is_one_of_the_run_time(names):
    """Each place once, with one kind after the other."""
    use = together(names)
    kinds = [kind for kind in KINDS if not use.whole or kind in WHOLE]
    offset = list(USES).index(names[0])
    for at, place in enumerate(PLACES):
        kind = kinds[(at + offset) % len(kinds)]
        count, why = compiles(kind, place, use, calls=5)
        assert count <= 1 + use.ways, (kind, place, why)


def test_numbers_that_change_together_compile_once():
    settings = types.SimpleNamespace(a=1.0, b=2, c=np.float32(3), d=[4.0, {"e": 5.0}])

    def step(x, f, g):
        inner = settings.d[1]["e"]
        return x * settings.a + settings.b * settings.c - settings.d[0] * inner * f + g["g"]

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for at in range(5):
        settings.a, settings.b, settings.c = 1.0 + at, at, np.float32(at)
        settings.d[0], settings.d[1]["e"] = at * 2.0, at - 7.0
        x, arguments = torch.randn(3), (0.5 + at, {"g": at})
        torch.testing.assert_close(compiled(x, *arguments), step(x, *arguments))
    assert len(compiled.recompiles) == 1, compiled.recompiles


@pytest.mark.parametrize("kind", ["float64", "float32", "int64", "int"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_hyper_parameters_of_any_kind(kind, optimizer):
    """Those of a parameter group are of the run time from the first call on."""
    losses = []
    for compiles_step in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        updates = optimizer(model.parameters(), lr=0.5, weight_decay=0.1)

        def train(x, model=model, updates=updates):
            updates.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            updates.step()
            return loss.detach()

        step = train
        if compiles_step:
            step = treadle.compile(train, model=model, optimizer=updates)
        found = []
        for at in range(6):
            for group in updates.param_groups:
                group["lr"] = KINDS[kind](at) / KINDS[kind](20)
                group["weight_decay"] = KINDS[kind](at)
            found.append(step(torch.randn(3, 4)))
        losses.append([*found, *model.parameters()])
        if compiles_step:
            assert len(step.recompiles) <= 1, step.recompiles
    torch.testing.assert_close(*losses)


DRAWS = {
    "normal_": "torch.empty(3).normal_(v - 2.0, v + 0.5)",
    "uniform_": "torch.empty(3).uniform_(-v, v + 1.0)",
    "normal": "torch.normal(0.0, v + 0.5, (3,))",
    "normal of means": "torch.normal(torch.arange(3.0), v + 0.5)",
    "init": "nn.init.normal_(torch.empty(3), v, v + 0.5)",
    "gumbel": "F.gumbel_softmax(torch.arange(3.0), tau=v + 0.5)",
    "a distribution": "torch.distributions.Normal(torch.zeros(3), v + 0.5).rsample()",
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_with_a_number_that_changes(name):
    """The same random numbers as eager's."""
    step = eval(f"lambda x, v: x * {DRAWS[name]}", {"torch": torch, "nn": nn, "F": F})
    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for at in range(5):
        x = torch.randn(3)
        found = []
        for each in (compiled, step):
            torch.manual_seed(at)
            found.append((each(x, 0.5 + at / 3), torch.rand(3)))
        torch.testing.assert_close(*found)
    assert len(compiled.recompiles) == 1, compiled.recompiles


def test_numbers_that_draws_and_losses_refuse_are_eager_s():
    def step(x, v):
        y = torch.empty(3).normal_(0.0, v)
        return y * F.cross_entropy(x, torch.tensor([0, 1]), label_smoothing=v)

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    x = torch.randn(2, 3)
    for v in (0.25, 0.5, 0.0, 1.0, 0.75):
        found = []
        for each in (compiled, step):
            torch.manual_seed(0)
            found.append(each(x, v))
        torch.testing.assert_close(*found)
    for v in (-0.5, 1.5):
        with pytest.raises((RuntimeError, ValueError, treadle.TreadleError)):
            compiled(x, v)
    assert len(compiled.recompiles) <= 6, compiled.recompiles


@pytest.mark.parametrize(
    "body",
    [
        "torch.index_fill(x, k % 2, torch.tensor([0]), v)",
        "F.pad(x, (k % 2, 0), value=v)",
        "torch.constant_pad_nd(x, [k % 2, 0], v)",
        "torch.linspace(0, v, k % 2 + 2)",
        "F.cross_entropy(x, torch.tensor([0, 1]), ignore_index=k % 2, label_smoothing=v / 9)",
        "F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.0 * v, scale=v)",
    ],
)
def test_sizes_and_dims_beside_a_number_are_those_of_a_variant(body):
    """What a form hands on to its own function is no number that stands in."""
    step = eval(f"lambda x, v, k: {body}", {"torch": torch, "F": F})
    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for k in range(6):
        x, v = torch.randn(2, 3), 0.5 + k / 9
        torch.testing.assert_close(compiled(x, v, k), step(x, v, k), equal_nan=True)
    assert len(compiled.recompiles) <= 5, compiled.recompiles


def test_a_dim_that_a_tensor_decides_is_a_path():
    def step(x):
        return torch.index_fill(x, int(x[0, 0] > 0), torch.tensor([0]), 1.0)

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3)):
        torch.testing.assert_close(compiled(x), step(x))
    assert len(compiled.recompiles) == 1


def test_entries_are_those_that_the_list_has_at_the_call():
    table, names, array = [0.5, 1.5, 2.5, 3.5], {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, np.arange(4.0)

    def step(x, k):
        return x * table[k] + names[k] - array[k]

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for at in range(12):
        k, x = at % 4, torch.randn(3)
        if at > 4:
            table[k], names[k], array[k] = at * 2.0, at - 1.0, at / 3
        if at == 8:
            table[k] = torch.tensor(3.0)
        torch.testing.assert_close(compiled(x, k), step(x, k))
    for k in (7, -9):
        for each in (compiled, step):
            with pytest.raises(LookupError):
                each(torch.randn(3), k)
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x, 1), step(x, 1))


def test_entries_of_other_kinds_are_python_s():
    """Layers, texts and lists are no numbers of a run: one variant for each."""
    layers, names = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), ["relu", "tanh"]

    def step(x, k):
        return getattr(torch, names[k])(layers[k](x)) * [[1.0, 2.0], [3.0, 4.0]][k][0]

    compiled = treadle.compile(step, model=layers, options=Options(codegen=False))
    for k in (0, 1, 0, 1, 1, 0):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x, k), step(x, k))
    assert len(compiled.recompiles) <= 2, compiled.recompiles


def test_what_a_step_decides_is_named():
    model = nn.Linear(2, 2)
    model.n = 0

    def step(x, limit):
        if model.n % 3 == 0:
            return x * (2 + model.n)
        return x * 3 if limit < 5 else x

    compiled = treadle.compile(step, model=model, options=Options(codegen=False))
    for at in range(12):
        model.n = at
        x = torch.randn(3)
        assert torch.equal(compiled(x, at), step(x, at))
    assert len(compiled.recompiles) <= 3, compiled.recompiles
    assert any("n was" in each and "model.n % 3 == 0" in each for each in compiled.recompiles)


def test_a_decision_that_raises_is_eager_s():
    def step(x, k):
        return x * 2 if 6 // k > 1 else x

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for k in (1, 2, 3):
        assert torch.equal(compiled(torch.ones(2), k), step(torch.ones(2), k))
    with pytest.raises(ZeroDivisionError):
        compiled(torch.ones(2), 0)
    assert torch.equal(compiled(torch.ones(2), 6), step(torch.ones(2), 6))
    assert len(compiled.recompiles) <= 2


def test_indices_out_of_bounds_are_eager_s():
    def step(x, k):
        return x[k] * 2

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    x = torch.randn(4, 2)
    for k in (0, 1, -1, 3, -4):
        assert torch.equal(compiled(x, k), step(x, k))
    for k in (4, -5):
        with pytest.raises(IndexError):
            compiled(x, k)
    assert torch.equal(compiled(x, 2), step(x, 2))
    assert len(compiled.recompiles) <= 3, compiled.recompiles


def test_what_is_picked_by_a_number_has_its_gradient():
    table = nn.Parameter(torch.randn(6, 3))
    model = nn.ParameterList([table])

    def step(x, k):
        table.grad = None
        loss = (table[k] * x + table[k : k + 2].sum(0)).square().sum()
        loss.backward()
        return loss.detach(), table.grad.clone()

    compiled = treadle.compile(step, model=model, options=Options(codegen=False))
    for k in range(5):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x, k), step(x, k))
    assert len(compiled.recompiles) == 1, compiled.recompiles


def test_views_that_are_written_to_are_eager_s():
    """The number itself is in the graph then."""

    def step(x, k):
        y = x * 1.0
        y[k].add_(1)
        y[k] += 2
        return y

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    for k in (0, 1, 2, 1):
        x = torch.randn(4, 2)
        assert torch.equal(compiled(x, k), step(x, k))


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
def test_arrays_that_are_indices(dtype):
    def step(x, index):
        y = x * 2.0
        y[index] = 0.0
        return x[index], y

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=Options(codegen=False))
    random = np.random.default_rng(0)
    for _ in range(5):
        x = torch.randn(6, 2)
        index = random.permutation(6)[:4].astype(dtype)
        if dtype == "bool":
            index = random.permutation(6) < 3
        torch.testing.assert_close(compiled(x, index), step(x, index))
    assert not compiled.recompiles


def main():
    findings = 0
    for kind, place, use in cases():
        try:
            count, why = compiles(kind, place, USES[use])
        except Exception as error:
            count, why = 0, f"{type(error).__name__}: {str(error)[:200]}"
        if not 0 < count <= 1 + USES[use].ways:
            findings += 1
            print(f"{kind}, {place}, {use}: {count} compiles; {why}", flush=True)
    print(f"{len(list(cases()))} cases, {findings} findings")
    return findings


if __name__ == "__main__":
    sys.exit(bool(main()))
