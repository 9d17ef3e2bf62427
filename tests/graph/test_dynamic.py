"""Graphs of samples: two of them share nothing, however equal their dims are."""

import gc
import math
import threading

import torch
from torch import fx

from treadle.algebra.extents import Size, same, sample_of
from treadle.compat.fake import symbolic_mode
from treadle.graph.analysis.dynamic import (
    SampleMode,
    Symbols,
    guards_of,
    layout_of,
    pair,
    resampled,
    sampled,
    symbols_of,
    twin_of,
)


def dims(sample=13):
    return Size.dim("t", 2, 40, sample)


def symbols_for(size):
    mode, known = symbolic_mode([size])
    return Symbols(mode, known)


def halved(size):
    """``h = x[:t // 2]`` as a graph of samples, from a trace with symbols."""
    symbols = symbols_for(size)
    graph = fx.Graph()
    x = graph.placeholder("x")
    n = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    half = graph.call_function(lambda n: n // 2, (n,))
    h = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, half))
    graph.output((h,))
    with symbols.mode:
        x.meta["val"] = torch.empty(symbols.symint(size))
        n.meta["val"] = x.meta["val"].shape[0]
        half.meta["val"] = n.meta["val"] // 2
        h.meta["val"] = x.meta["val"][: half.meta["val"]]
    sampled(graph, SampleMode(symbols))
    symbols.note()
    return graph, h


def test_samples_lead_to_their_own_symbols_and_formulas():
    size = dims()
    graph, h = halved(size)
    assert h.args[3] == size // 2
    assert tuple(h.meta["val"].shape) == (6,)
    assert same(layout_of(h.meta["val"])[0][0], size // 2)
    assert symbols_of(h.meta["val"]).guards is guards_of(graph)


def test_graphs_of_equal_dims_have_symbols_and_guards_of_their_own():
    (one, h), (two, other) = halved(dims()), halved(dims())
    first, second = symbols_of(h.meta["val"]), symbols_of(other.meta["val"])
    assert first is not second
    guards_of(one).equal(dims(), 7)
    assert not guards_of(one).holds({"t": 7})
    assert guards_of(two).holds({"t": 7})
    del two, other, second
    gc.collect()
    assert first.symint(dims()).node.shape_env is first.mode.shape_env
    assert same(layout_of(h.meta["val"])[0][0], dims() // 2)


def test_graphs_are_made_in_threads_at_once():
    made = {}

    def make(number):
        for at in range(10):
            made[number, at] = halved(dims())

    threads = [threading.Thread(target=make, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    environments = {id(twin_of(h.meta["val"]).fake_mode.shape_env) for _, h in made.values()}
    assert len(environments) == len(made) == 30


def test_other_samples_are_guarded_apart():
    graph, h = halved(dims())
    symbols = symbols_of(h.meta["val"])
    again = resampled(graph, symbols, {"t": dims(20)})
    (new,) = again.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert tuple(new.meta["val"].shape) == (10,)
    assert sample_of(new.args[3]) == 10
    assert symbols_of(new.meta["val"]).guards is not symbols.guards
    assert tuple(h.meta["val"].shape) == (6,)
    assert same(layout_of(h.meta["val"])[0][0], dims() // 2)


def test_what_has_no_symbols_is_no_twin():
    _, h = halved(dims())
    value = h.meta["val"]
    with value.fake_mode:
        fixed, like = torch.empty(3), torch.empty(3)
    pair(fixed, like)
    assert twin_of(fixed) is fixed
    assert layout_of(fixed) == ((3,), (1,))


def test_quotients_that_python_rounds_have_formulas():
    """PyTorch's meta kernels do: of attention, ``math.ceil(rows / 32) * 32``."""
    size = dims()
    symbols = symbols_for(size)
    n = symbols.symint(size)
    up, down = symbols.size(math.ceil(n / 32) * 32), symbols.size(math.floor(n / 4))
    assert same(up, (size + 31) // 32 * 32)
    assert same(down, size // 4)
