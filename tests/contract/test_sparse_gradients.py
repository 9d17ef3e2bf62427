"""Sparse gradients of embeddings, beside eager: numbers, state, and what is left in ``.grad``."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treadle

ROWS, DIM = 30, 5
OPTIM = torch.optim


class Worked(nn.Module):
    """``F.embedding`` of a parameter, and a dense layer behind it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, DIM))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        return self.head(F.embedding(x, self.table, sparse=True))


class Bag(nn.EmbeddingBag):
    """Bags of the lines of a batch, weighted or not."""

    def __init__(self, *, weighs=False, **options):
        super().__init__(ROWS, DIM, sparse=True, **options)
        self.weighs = weighs

    def forward(self, x):
        return super().forward(x, per_sample_weights=(x % 3).float() if self.weighs else None)


class CutBag(nn.EmbeddingBag):
    """Bags of unequal lengths, one of them empty."""

    def forward(self, x):
        return super().forward(x.view(-1), torch.tensor([0, 2, 2, 5]))


MODELS = {
    "embedding": lambda: nn.Embedding(ROWS, DIM, sparse=True),
    "padding": lambda: nn.Embedding(ROWS, DIM, sparse=True, padding_idx=2),
    "max_norm": lambda: nn.Embedding(ROWS, DIM, sparse=True, max_norm=0.8),
    "float64": lambda: nn.Embedding(ROWS, 1, sparse=True, dtype=torch.float64),
    "bag": Bag,
    "sum bag": lambda: Bag(mode="sum", padding_idx=2),
    "weighted bag": lambda: Bag(mode="sum", weighs=True),
    "cut bag": lambda: CutBag(ROWS, DIM, sparse=True),
}
OPTIMIZERS = {
    "SGD": lambda p: OPTIM.SGD(p, 0.1),
    "SGD up": lambda p: OPTIM.SGD(p, torch.tensor(0.1), maximize=True),
    "SparseAdam": lambda p: OPTIM.SparseAdam(p, 0.05),
    "SparseAdam up": lambda p: OPTIM.SparseAdam(p, 0.05, betas=(0.8, 0.95), maximize=True),
    "Adagrad": lambda p: OPTIM.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.3),
}


def plain(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def looked_up_twice(model, optimizer, x):
    loss = model(x).square().mean() + model(x + 1).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), model.weight.grad


def two_backwards(model, optimizer, x):
    model.weight.grad = None
    model(x).square().mean().backward()
    model(x + 1).sin().sum().backward()
    optimizer.step()
    return model.weight.grad.is_sparse


def two_updates(model, optimizer, x):
    for shift in range(2):
        plain(model, optimizer, x + shift)


def cleared_afterwards(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def scaled_by_hand(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    grad = model.weight.grad
    grad.mul_(0.5)
    grad /= 3
    grad._values().clamp_(-0.01, 0.01)
    optimizer.step()
    return grad.norm(), grad.to_dense().sum(0), -grad * 2, grad._nnz()


def with_dense_gradient(model, optimizer, x):
    optimizer.zero_grad()
    (model(x).square().mean() + model.weight.square().sum()).backward()
    optimizer.step()
    return model.weight.grad.is_sparse


STEPS = [looked_up_twice, two_backwards, two_updates, cleared_afterwards, scaled_by_hand]


def dense(value):
    """``value`` with dense tensors in the places of sparse ones."""
    if isinstance(value, tuple):
        return tuple(map(dense, value))
    return value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value


def left(model, optimizer):
    """What a step leaves: parameters, gradients with their layouts, and state."""
    parameters = list(model.parameters())
    states = [dict(sorted(optimizer.state[p].items())) for p in parameters]
    grads = [p.grad for p in parameters]
    sparse = [each.is_coalesced() for each in grads if each is not None and each.is_sparse]
    return [*parameters, *map(dense, grads)], states, sparse


def same(model, optimizer, function, *, codegen, calls=3):
    """``function`` compiled and eager over several calls, which compile once."""
    ours = copy.deepcopy(model)
    mine, theirs = (OPTIMIZERS[optimizer](list(m.parameters())) for m in (ours, model))
    options = treadle.Options(codegen=codegen)
    step = treadle.compile(
        lambda x: function(ours, mine, x), model=ours, optimizer=mine, options=options
    )
    for _ in range(calls):
        x = torch.randint(0, ROWS - 1, (4, 3))
        torch.testing.assert_close(dense(step(x)), dense(function(model, theirs, x)))
        torch.testing.assert_close(left(ours, mine), left(model, theirs))
    assert step.recompiles == []
    return step


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_embedding(kind):
    step = same(MODELS["embedding"](), kind, plain, codegen=True)
    assert step.verify([(torch.randint(0, ROWS, (4, 3)),)]) is None


@pytest.mark.parametrize("model", [each for each in MODELS if each != "embedding"])
def test_every_module(model):
    step = same(MODELS[model](), "SparseAdam", plain, codegen=False, calls=2)
    assert "TR-150" not in str(step.explain())  # rows of padding decide no size


def test_a_batch_of_padding_alone():
    model = MODELS["padding"]()
    before = model.weight.detach().clone()
    optimizer = OPTIM.SparseAdam(model.parameters(), 0.1)
    step = treadle.compile(
        lambda x: plain(model, optimizer, x),
        model=model, optimizer=optimizer, options=treadle.Options(codegen=False),
    )  # fmt: skip
    step(torch.tensor([2, 2, 2]))
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
@pytest.mark.parametrize("function", STEPS)
def test_every_step(function, kind):
    same(MODELS["embedding"](), kind, function, codegen=False)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_beside_dense_gradients(kind):
    same(Worked(), kind, plain, codegen=False)
    same(MODELS["embedding"](), kind, with_dense_gradient, codegen=False)


def test_rows_that_were_not_looked_up_stay():
    model = nn.Embedding(ROWS, DIM, sparse=True)
    optimizer = OPTIM.SparseAdam(model.parameters(), 0.1)
    step = treadle.compile(
        lambda x: plain(model, optimizer, x),
        model=model, optimizer=optimizer, options=treadle.Options(codegen=False),
    )  # fmt: skip
    step(torch.tensor([1, 2, 2]))
    before = copy.deepcopy(optimizer.state[model.weight])
    step(torch.tensor([3, 4, 4]))
    after = optimizer.state[model.weight]
    assert (before["step"], after["step"]) == (1, 2)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(after[name][:3], before[name][:3], rtol=0, atol=0)
        assert bool((after[name][3:5] != 0).all())


def add_to_the_last(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()


def clear_in_place(model, optimizer, x):
    optimizer.zero_grad(set_to_none=False)
    model(x).sum().backward()


def clip(model, optimizer, x):
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("function", "make", "why"),
    [
        (add_to_the_last, OPTIMIZERS["SGD"], "TR-127.*an earlier call.*zero_grad"),
        (clear_in_place, OPTIMIZERS["SGD"], "TR-127.*zero_.*set_to_none=True"),
        (clip, OPTIMIZERS["SGD"], "TR-127.*vector_norm"),
        (plain, lambda p: OPTIM.SGD(p, 0.1, momentum=0.9), "TR-127.*momentum"),
        (plain, lambda p: OPTIM.SGD(p, 0.1, weight_decay=0.1), "TR-132.*SGD"),
        (plain, lambda p: OPTIM.Adagrad(p, 0.1, weight_decay=0.1), "TR-132.*Adagrad"),
        (plain, lambda p: OPTIM.Adam(p, 0.1), "TR-132.*Adam cannot step with sparse"),
        (with_dense_gradient, OPTIMIZERS["SparseAdam"], "TR-132.*SparseAdam.*dense"),
    ],
)
def test_what_is_refused(function, make, why):
    model = MODELS["embedding"]()
    optimizer = make(list(model.parameters()))
    step = treadle.compile(
        lambda x: function(model, optimizer, x),
        model=model, optimizer=optimizer, options=treadle.Options(codegen=False),
    )  # fmt: skip
    with pytest.raises(treadle.CaptureError, match=f"(?s){why}"):
        [step(torch.tensor([1, 2, 2])) for _ in range(2)]
