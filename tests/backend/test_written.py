"""Custom operators that write to their arguments, through ``torch.compile``."""

import pytest
import torch

from treadle.backend import treadle


@torch.library.custom_op("treadle_tests::bump_both", mutates_args=("a", "b"))
def bump_both(a: torch.Tensor, b: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    a.add_(by)
    b.mul_(2)
    return by.sum()


@bump_both.register_fake
def _(a, b, by):
    return by.new_empty(())


@torch.library.custom_op("treadle_tests::bump_one", mutates_args=("a",))
def bump_one(a: torch.Tensor) -> None:
    a.add_(1)


@bump_one.register_fake
def _(a):
    return None


def whole(x, y):
    total = bump_both(x, y, x.sin())
    return x * y + total


def views(x, y):
    h = x * 2
    bump_one(h[1])
    total = bump_both(h[:, 1:3], y, h[:, 2:4].cos())
    bump_one(h.t())
    return h + y.sum() + total


@pytest.mark.parametrize("function", [whole, views])
def test_what_they_write_is_seen(function, monkeypatch):
    monkeypatch.setenv("TREADLE_NO_CODEGEN", "1")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    given, others = (x.clone(), y.clone()), (x.clone(), y.clone())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend=treadle)(*given), function(*others))
    torch.testing.assert_close(given, others)
