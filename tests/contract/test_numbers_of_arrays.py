"""Numbers that a step takes from NumPy's arrays: those of the call, with one compile."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from contract.linear_step import in_fours, pair
from treadle import Options


def helper(w):
    return float(w[0]) + float(w.sum())


CASES = {
    "a number": lambda h, w: h * w[1],
    "Python's": lambda h, w: h * float(w[1]) + w[2].item(),
    "in a function": lambda h, w: h * helper(w),
    "a sum": lambda h, w: h * w.sum(),
    "a sum of NumPy's": lambda h, w: h * np.sum(w),
    "a mean": lambda h, w: h * np.mean(w) + float(w.std()),
    "two": lambda h, w: h * (w[0] + w[1] * 2 - w[-1]),
    "a list": lambda h, w: h * sum(w.tolist()),
    "a loop": lambda h, w: sum(h * each for each in w),
    "unpacked": lambda h, w: h * (lambda a, b, c: a - b * c)(*w),
    "a function": lambda h, w: h * np.exp(-w).sum(),
    "two arrays": lambda h, w: h * (w * w + np.tanh(w)).max(),
    "a product": lambda h, w: h * np.dot(w, w) + (w @ w).item(),
    "a norm": lambda h, w: h * np.linalg.norm(w),
    "a part": lambda h, w: h * w[1:].min() * w[::-1].cumsum()[0],
    "an index": lambda h, w: h * w[w.argmax()],
    "a tensor": lambda h, w: h * torch.from_numpy(np.sqrt(w)).sum().float(),
    "a constant beside": lambda h, w: h * np.maximum(w, 0.25).sum(),
    "without dims": lambda h, w: h * float(np.sum(w, keepdims=True).reshape(())),
    "lists": lambda h, w: h * torch.tensor(w.tolist()).sum() + torch.tensor([w[0], w[1]]).float(),
    "a copy": lambda h, w: h * np.array(w).sum() * np.asarray(w, dtype=np.float32)[0],
    "joined": lambda h, w: h * np.concatenate([w, w[:1]]).sum() + np.stack([w, w])[1, 0],
    "picked": lambda h, w: h * np.where(w > 1, w, 0.5).sum() * np.count_nonzero(w > 0.5),
    "between": lambda h, w: h * np.interp(0.3, [0, 1, 2], w) + np.interp(w, [0, 1], [3, 4]).sum(),
    "a row of numbers": lambda h, w: h * np.mean([w[0], 2 * w[1], 3]) + np.array([w[0], 1]).max(),
    "a branch": lambda h, w: h * (w.sum() if (w > -1).all() else 3),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("names", in_fours(CASES), ids=", ".join)
def test_numbers_of_arrays_are_those_of_the_call(names, dtype):
    ours, eager = pair(*(CASES[name] for name in names))
    for _ in range(4):
        x, w = torch.randn(4, 3), np.random.rand(3).astype(dtype)
        torch.testing.assert_close(ours(x, w), eager(x, w))
    assert not ours.recompiles


OF_NUMBERS = {
    "clip": lambda h, n, s: h * np.clip(n, 0.2, 0.8) + np.clip(s, 0.2, 0.8),
    "interp": lambda h, n, s: h * np.interp(n, [0, 2], [1, 0.25]) + np.interp(s, [0, 1], [2, 3]),
    "round": lambda h, n, s: h * np.round(n, 1) + round(s, 2),
    "mean": lambda h, n, s: h * np.mean([n, s]) + np.median([n, s, 1.0]),
    "array": lambda h, n, s: h * np.array([n, s]).sum(),
    "tensor": lambda h, n, s: h * torch.tensor([n, n + 1]) + torch.tensor([[n, 1], [2, s]]).sum(),
    "whole": lambda h, n, s: h * torch.tensor([int(n * 10), 3]) + torch.tensor([int(n * 9), s]),
    "named": lambda h, n, s: h * torch.tensor(data=[n, 1.0], dtype=torch.float64).float(),
    "one column": lambda h, n, s: h @ torch.as_tensor([[n, n, 1.0], [0.0, n, 2.0]])[:, :2],
    "cast": lambda h, n, s: h * s.astype("float32") * np.asarray(n).astype(np.float32)[()],
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_functions_of_numbers_and_lists_of_them(name):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return lambda x, n, s: OF_NUMBERS[name](model(x), n, s), model

    step, model = make()
    ours = treadle.compile(step, model=model, options=Options(codegen=False))
    eager, _ = make()
    for _ in range(4):
        x, n, s = torch.randn(4, 3), float(np.random.rand()), np.float64(np.random.rand())
        theirs = eager(x, n, s)
        found = ours(x, n, s)
        assert found.dtype is theirs.dtype
        torch.testing.assert_close(found, theirs)
    assert len(ours.recompiles) + len(ours.recaptures) <= 1


def test_a_list_whose_numbers_become_of_another_kind():
    model = nn.Linear(2, 1)

    def step(n):
        return torch.tensor([2**n, 1]), np.array([2**n, 3]), model.weight * n

    ours = treadle.compile(step, model=model, options=Options(codegen=False))
    for n in (1, 2, 3, -1, 2, -2):
        for found, theirs in zip(ours(n), step(n), strict=True):
            assert found.dtype == theirs.dtype
            np.testing.assert_array_equal(
                torch.as_tensor(found).detach(), torch.as_tensor(theirs).detach()
            )


@pytest.mark.parametrize("read", [float, lambda a: a.item(), lambda a: a * 2, lambda a: a.max()])
def test_arrays_without_dims(read):
    ours, eager = pair(lambda h, a: h * read(a))
    for n in (0.3, 1.2, 2.5):
        x, a = torch.randn(4, 3), np.array(n)
        torch.testing.assert_close(ours(x, a), eager(x, a))
    assert not ours.recompiles


ALIKE = {
    "zeros": [np.array([0.0, 1.0]), np.array([-0.0, 1.0])],
    "a zero": [np.array(0.0), np.array(-0.0)],
    "dtypes": [np.array([1, 2], dtype=kind) for kind in ("int64", "float64", "int32", "float32")],
    "wide": [np.array([0.1, 2], dtype=kind) for kind in ("float32", "float64")],
    "shapes": [np.array([1.0, 2]), np.array([[1.0], [2]]), np.array([1.0])],
    "order": [np.eye(2) * [1, 2] + 1, np.asfortranarray(np.eye(2) * [1, 2] + 1)],
    "nan": [np.array([1.0, 2]), np.array([np.nan, 2]), np.array([np.inf, 2])],
    "kinds": [np.array(1), np.float64(1), np.int64(1), 1, 1.0, True, np.array(True)],
}
USES = {
    "sign": lambda h, w: h * math.copysign(2.0, np.ravel(w)[0]),
    "quotient": lambda h, w: h + 1 / (np.ravel(w)[0] + 2) + math.atan2(0.0, float(np.ravel(w)[0])),
    "kind": lambda h, w: h * np.sum(w) * (2 if isinstance(np.sum(w), np.floating) else 3),
    "division": lambda h, w: h * (np.sum(w) // 2) + np.sum(w) / 3,
    "first": lambda h, w: h * np.asarray(w).reshape(-1)[0] + np.asarray(w).ravel(order="K")[-1],
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("uses", [("sign",), ("kind",), ("quotient", "division", "first")], ids=str)
@pytest.mark.parametrize("name", ALIKE)
def test_arrays_that_look_alike_are_not_one(name, uses):
    ours, eager = pair(*(USES[use] for use in uses))
    for w in [*ALIKE[name], *ALIKE[name]]:
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x, w), eager(x, w), equal_nan=True)


def test_decisions_by_arrays():
    ours, eager = pair(lambda h, w: h * (2 if w.sum() > 2 else w[0]) if (w < 3).any() else h)
    for w in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [2.0, 1.0, 0.0], [4.0, 4.0, 4.0], [0.3, 0.1, 0.1]):
        x, w = torch.randn(4, 3), np.array(w)
        torch.testing.assert_close(ours(x, w), eager(x, w))


def test_masks_take_as_many_as_there_are():
    ours, eager = pair(lambda h, w: h * w[w > 0.5].sum() * len(w[w > 0.5]))
    for w in ([0.9, 0.2, 0.7], [0.3, 0.2, 0.1], [2.0, 1.0, 0.0]):
        x, w = torch.randn(4, 3), np.array(w)
        torch.testing.assert_close(ours(x, w), eager(x, w))


def test_numbers_that_are_returned_and_arrays_that_are_written_to_after():
    def step(model, w):
        first, total = w[0], w.sum()
        torch.from_numpy(w).add_(1)
        return first, float(total), model.weight * float(first)

    model = nn.Linear(3, 2)
    ours = treadle.compile(
        functools.partial(step, model), model=model, options=Options(codegen=False)
    )
    for _ in range(3):
        w = np.random.rand(3)
        theirs = w.copy()
        torch.testing.assert_close(ours(w), step(model, theirs))
        np.testing.assert_allclose(w, theirs)
