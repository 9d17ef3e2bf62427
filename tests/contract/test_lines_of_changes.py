"""What is found when a step's code is done has the line that did it."""

import linecache
import random
import sys
import threading

import pytest
import torch
from torch import nn

import treadle
from treadle.options import Options


class OwnList(list):
    pass


LOG = OwnList()
HELD = (1, [2])
GENERATOR = torch.Generator()


def numbers():
    yield from range(9)


NUMBERS = numbers()


def own_list(model, optimizer, loss, given):
    LOG.append(loss)


def in_a_tuple(model, optimizer, loss, given):
    HELD[1].append(loss)


def in_a_default(model, optimizer, loss, given, seen=[]):  # noqa: B006
    seen.append(loss)


def twice(model, optimizer, loss, given):
    HELD[1].append(1)
    HELD[1].pop()
    _ = loss + 1
    HELD[1].append(2)  # here


def argument(model, optimizer, loss, given):
    given.append(1)


def module(model, optimizer, loss, given):
    model.other = nn.Linear(2, 2)


def group(model, optimizer, loss, given):
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def attribute_of_a_parameter(model, optimizer, loss, given):
    model.weight.mine = 3


def hook_of_a_parameter(model, optimizer, loss, given):
    model.weight.register_hook(lambda grad: grad)


def lock(model, optimizer, loss, given):
    model.lock = threading.Lock()


def dtype(model, optimizer, loss, given):
    torch.set_default_dtype(torch.float64)


def grad_mode(model, optimizer, loss, given):
    torch.set_grad_enabled(False)
    return loss + 1


def counter(model, optimizer, loss, given):
    model.count += 1
    return loss + torch.zeros(model.count).sum()


def seed(model, optimizer, loss, given):
    torch.manual_seed(3)
    return loss + 1


def seed_of_a_generator(model, optimizer, loss, given):
    GENERATOR.manual_seed(3)


def next_value(model, optimizer, loss, given):
    next(NUMBERS)


def shuffled(model, optimizer, loss, given):
    numbers = [1, 2, 3]
    random.shuffle(numbers)
    return loss * numbers[0]


def generator_returned(model, optimizer, loss, given):
    return (each for each in [loss])


CASES = {
    own_list: ("TR-117", "LOG.append(loss)"),
    in_a_tuple: ("TR-117", "HELD[1].append(loss)"),
    in_a_default: ("TR-117", "seen.append(loss)"),
    twice: ("TR-117", "# here"),
    argument: ("TR-117", "given.append(1)"),
    module: ("TR-117", "model.other ="),
    group: ("TR-117", "optimizer.add_param_group("),
    attribute_of_a_parameter: ("TR-117", "model.weight.mine = 3"),
    hook_of_a_parameter: ("TR-117", "model.weight.register_hook("),
    lock: ("TR-117", "model.lock ="),
    dtype: ("TR-117", "set_default_dtype"),
    grad_mode: ("TR-117", "set_grad_enabled"),
    counter: ("TR-118", "model.count += 1"),
    seed: ("TR-120", "torch.manual_seed(3)"),
    seed_of_a_generator: ("TR-120", "GENERATOR.manual_seed(3)"),
    next_value: ("TR-117", "next(NUMBERS)"),
    shuffled: ("TR-119", "random.shuffle(numbers)"),
    generator_returned: ("TR-136", "return result"),
}


def compiled(function):
    model = nn.Linear(4, 3)
    model.count = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, given):
        loss = model(x).sum()
        result = function(model, optimizer, loss, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result

    given = {"model": model, "optimizer": optimizer, "options": Options(codegen=False)}
    return treadle.compile(step, **given)


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_the_line_that_changed_something_is_named(function):
    code, line = CASES[function]
    traced = sys.gettrace()
    with pytest.raises(treadle.CaptureError, match=code) as caught:
        compiled(function)(torch.randn(2, 4), [1])
    assert "test_lines_of_changes.py" in caught.value.where
    assert line in caught.value.where, caught.value
    assert caught.value.remedy
    assert type(caught.value) is treadle.CaptureError
    assert (sys.gettrace(), len(LOG), HELD[1]) == (traced, 0, [2])


TEXT = """
def in_a_notebook(model, optimizer, loss, given):
    _ = loss + 1
    LOG.append(loss)

def wrong(model, optimizer, loss, given):
    _ = loss + 1
    return loss @ loss

def asks(model, optimizer, loss, given):
    _ = loss + 1
    return {loss.item(): 1}

def raises(model, optimizer, loss, given):
    _ = loss + 1
    raise KeyError("mine")
"""


@pytest.mark.parametrize("name", ["<ipython-input-1>", "<string>"])
def test_code_without_a_file_is_the_users(name):
    """Of a notebook Python has the text, of what ``exec`` was given only the number of the line."""
    space = {"LOG": LOG, "torch": torch}
    exec(compile(TEXT, name, "exec"), space)
    shown = name.startswith("<ipython")
    if shown:
        linecache.cache[name] = (len(TEXT), None, TEXT.splitlines(keepends=True), name)
    for function, code, line in (
        ("in_a_notebook", "TR-117", "4: LOG.append(loss)"),
        ("wrong", "TR-132", "8: return loss @ loss"),
        ("asks", "TR-102", "12: return {loss.item(): 1}"),
    ):
        with pytest.raises(treadle.CaptureError, match=code) as caught:
            compiled(space[function])(torch.randn(2, 4), [1])
        expected = line if shown else line.partition(" ")[0]
        assert f"{name}:{expected}" in caught.value.where, caught.value
    with pytest.raises(KeyError, match="mine") as caught:
        compiled(space["raises"])(torch.randn(2, 4), [1])
    assert "TR-138" in caught.value.__notes__[0]
    assert f"{name}:16:" in caught.value.__notes__[0]
