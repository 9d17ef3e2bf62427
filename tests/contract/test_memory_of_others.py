"""Tensors of memory that something else has (arrays of NumPy's, bytes, other tensors): what a step
writes to it and reads of it happens at every call, or is refused."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import treadle

HELD = np.ones((2, 3), np.float32)
BYTES = bytearray(HELD.tobytes())
TENSOR = torch.ones(3)
from_numpy = torch.from_numpy  # a name of the user's own, which nobody can replace


def compiled(function, model=None):
    return treadle.compile(
        function, model=model or nn.Linear(3, 3), options=treadle.Options(codegen=False)
    )


def written_twice(x):
    first = torch.from_numpy(x)
    first.add_(1)
    second = torch.from_numpy(x)
    second.mul_(2)
    return first * 1, second * 1


def test_an_array_that_is_written_is_that_of_the_call():
    step = compiled(written_twice)
    for at in range(3):
        x = np.full((2, 3), at, np.float32)
        mine = x.copy()
        torch.testing.assert_close(step(x), written_twice(mine))
        np.testing.assert_array_equal(x, mine)


def written_then_looked_at(x):
    t = torch.from_numpy(x)
    t.add_(1)
    return t * float(x[0, 0])


def asked_for_its_type(x):
    return written_twice(x) if type(x) is np.ndarray else x


def by_another_name(x):
    t = from_numpy(x)
    t[0].add_(1)
    return t * 1


def of_a_global(x):
    t = from_numpy(HELD[:1])
    t.mul_(2)
    return torch.from_numpy(x) + t


def of_bytes(x):
    t = torch.frombuffer(BYTES, dtype=torch.float32)
    t.view(2, 3).t().add_(1)
    return torch.from_numpy(x) + t.view(2, 3)


WRITES = [written_then_looked_at, asked_for_its_type, by_another_name, of_a_global, of_bytes]


@pytest.mark.parametrize("function", WRITES, ids=lambda each: each.__name__)
def test_a_write_that_later_calls_would_not_do_is_refused(function):
    before = HELD.copy(), bytes(BYTES)
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(treadle.CaptureError, match=r"(?s)TR-112.*NumPy array.*write to a copy"):
        compiled(function)(x)
    np.testing.assert_array_equal(x, 0)
    np.testing.assert_array_equal(HELD, before[0])
    assert bytes(BYTES) == before[1]


def test_an_array_of_the_step_s_own_may_be_written():
    """Each call has a new one."""

    def function(x):
        mask = from_numpy(np.tril(np.ones((3, 3), np.float32)))
        mask.mul_(2)
        mask[0] += x[0]
        return x @ mask

    step = compiled(function)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step(x), function(x))


LOOKS = {
    "str": lambda t: torch.tensor(float(str(t)[8])),
    "repr": lambda t: torch.tensor(float(repr(t)[8])),
    "format": lambda t: torch.tensor(float(f"{t}"[8])),
    "array": lambda t: torch.tensor(float(np.asarray(t)[0])),
    "dlpack of NumPy": lambda t: torch.from_numpy(np.from_dlpack(t).copy()),
    "dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)) * 1,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "list": lambda t: torch.tensor(t.tolist()),
    "contains": lambda t: torch.tensor(float(2.0 in t)),
    "storage": lambda t: torch.tensor(t.untyped_storage().tolist()),
    "as_subclass": lambda t: t.as_subclass(torch.Tensor) * 1,
}


@pytest.mark.parametrize("where", ["global", "parameter", "buffer", "argument"])
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_numbers_is_refused_or_looks_again(name, where):
    """Whoever holds the tensor, and however it is looked at."""
    model = nn.Linear(1, 3)
    model.register_buffer("held", torch.ones(3))

    def function(x):
        tensors = {
            "global": TENSOR,
            "parameter": model.bias,
            "buffer": model.held,
            "argument": x,
        }
        return LOOKS[name](tensors[where]).detach()

    step = compiled(function, model)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            for each in (TENSOR, model.bias, model.held):
                each.fill_(value)
            x = torch.full((3,), value)
            try:
                actual = step(x)
            except treadle.CaptureError as error:
                refused = error.code
                break
            refused = ""
            torch.testing.assert_close(actual, function(x))
    assert refused in ("", "TR-102", "TR-132", "TR-133", "TR-137")


OF_ELEMENTS = {
    "times": lambda e: e * 2,
    "sum": lambda e: (e + 2).sum() / 3,
    "minus": lambda e: 1 - e,
    "where": lambda e: torch.where(e > 0, e, 0.0),
}


@pytest.mark.parametrize("codegen", [True, False])
@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_vmap_over_elements(name, codegen):
    def function(x):
        return torch.func.vmap(OF_ELEMENTS[name])(x)

    step = treadle.compile(
        function, model=nn.Linear(3, 3), options=treadle.Options(codegen=codegen)
    )
    for _ in range(2):
        x = torch.randn(5)
        torch.testing.assert_close(step(x), function(x))


def test_sparse_tensors_are_refused():
    with pytest.raises(treadle.CaptureError, match=r"(?s)TR-127.*sparse_coo.*dense"):
        compiled(lambda x: x.to_sparse().to_dense())(torch.ones(3))
