import torch

from passes.comm.communicating import all_reduce, wait
from testing import trace
from treadle.graph.analysis.dataflow import readers_of
from treadle.graph.core.collectives import is_wait
from treadle.passes.comm.blocks import is_view

X = torch.randn(4, 3)


def test_readers_are_behind_views():
    def program(x):
        w = wait(all_reduce(x))
        a, b = torch.split(w.t(), 2, 1)
        return a.sin(), w, b

    step = trace(program, X)
    (waited,) = filter(is_wait, step.graph.nodes)
    assert [each.name for each in readers_of(waited, is_view)] == ["output", "sin"]
