"""Cutting a joint graph: what is kept, what is taken again, and an error for what cannot be."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.graph.core.node_info import with_info
from treadle.passes.memory.split import copy_overwritten, extract, split
from treadle.util.errors import PlanError

aten = torch.ops.aten


def joint():
    """y = relu(x @ w.t()), and the gradients of w; y's value and mask are wanted later."""

    def program(w, x, dy):
        y = aten.relu.default(aten.mm.default(x, aten.t.default(w)))
        mask = aten.gt.Scalar(y, 0)
        dz = aten.mul.Tensor(dy, mask)
        dw = aten.mm.default(aten.t.default(dz), x)
        dx = aten.mm.default(dz, w)
        return [y, dw, dx]

    module = make_fx(program, tracing_mode="fake")(
        torch.randn(4, 3), torch.randn(5, 3), torch.randn(5, 4)
    )
    return module.graph, module.graph.find_nodes(op="placeholder")


def _calls(graph):
    return [node for node in graph.nodes if node.op == "call_function"]


def names(graph, op="placeholder"):
    return [node.name for node in graph.find_nodes(op=op)]


def test_the_default_keeps_what_the_backward_reads():
    graph, (w, x, dy) = joint()
    halves = split(graph, [w, x], [dy], 1)
    assert [node.name for node in halves.kept] == ["w_1", "x_1", "relu"]
    assert [n.target for n in _calls(halves.forward)] == [
        aten.t.default,
        aten.mm.default,
        aten.relu.default,
    ]
    assert names(halves.backward) == ["w_1", "x_1", "relu", "dy_1"]
    targets = [n.target for n in _calls(halves.backward)]
    assert aten.gt.Scalar in targets, "cheap and needed by the backward alone: computed there"


def test_the_halves_compute_what_the_whole_does():
    graph, (w, x, dy) = joint()
    halves = split(graph, [w, x], [dy], 1)
    given = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5, 4)
    whole = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*given)
    y, *kept = torch.fx.Interpreter(torch.fx.GraphModule({}, halves.forward)).run(*given[:2])
    grads = torch.fx.Interpreter(torch.fx.GraphModule({}, halves.backward)).run(*kept, given[2])
    for mine, other in zip((y, *grads), whole, strict=True):
        assert torch.equal(mine, other)


def test_several_results_are_kept_one_by_one():
    def program(x, dy):
        values, places = aten.max.dim(x, 1, True)
        return [values, aten.scatter.src(aten.zeros_like.default(x), 1, places, dy)]

    module = make_fx(program, tracing_mode="fake")(torch.randn(4, 3), torch.randn(4, 1))
    x, dy = module.graph.find_nodes(op="placeholder")
    halves = split(module.graph, [x], [dy], 1)
    assert all(node.target is operator.getitem or node is x for node in halves.kept)


def test_a_missing_input_is_named():
    graph, (_, x, _) = joint()
    (output,) = graph.find_nodes(op="output")
    with pytest.raises(PlanError, match=r"output 0 .relu. depends on an input") as caught:
        extract(graph, [x], output.args[0])
    assert caught.value.code == "TR-210"


def test_a_backward_reads_what_an_overwritten_input_was():
    def program(mean, x, dy):
        y = aten.sub.Tensor(x, mean)
        centred = aten.sub.Tensor(x, mean)
        return [y, aten.mul.Tensor(dy, centred)]

    given = torch.randn(3), torch.randn(5, 3), torch.randn(5, 3)
    graph = make_fx(program, tracing_mode="fake")(*given).graph
    mean, x, dy = graph.find_nodes(op="placeholder")
    again = graph.find_nodes(op="call_function", target=aten.sub.Tensor)[1]
    with_info(again, recomputed=True)
    (copy,) = copy_overwritten(graph, [mean], [dy])
    order = [node.name for node in graph.nodes][3:]
    assert order == [copy.name, "sub", "sub_1", "mul", "output"]
    assert copy.args == (mean,)
    assert again.args == (x, copy)
    assert copy_overwritten(graph, [mean], [dy]) == []  # a second run finds nothing
    halves = split(graph, [mean, x], [dy], 1, [copy])
    assert copy in halves.kept
    assert mean not in halves.kept
