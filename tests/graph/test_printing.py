from textwrap import dedent

import torch

from testing import trace
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Role
from treadle.graph.text.diff import diff
from treadle.graph.text.printing import show, show_around

W, X = torch.randn(8, 2), torch.randn(4, 8)


def sgd(w, x):
    (loss, loss_2) = ((x @ w).sum(), (x @ w).relu().to(torch.float64))
    return loss, w - 0.1 * x.t().mm(loss_2.float())


def test_roles_results_and_writes():
    step = trace(sgd, W, X, writes={1: 0}, roles={"w": Role.PARAMETER})
    expected = """
        w: f32[8, 2]  # parameter
        x: f32[4, 8]  # batch
        mm: f32[4, 2] = mm(x, w)
        sum: f32[] = sum(mm)
        mm.1: f32[4, 2] = mm(x, w)
        relu: f32[4, 2] = relu(mm.1)
        _to_copy: f64[4, 2] = _to_copy(relu, dtype=f64)
        t: f32[8, 4] = t(x)
        _to_copy.1: f32[4, 2] = _to_copy(_to_copy, dtype=f32)
        mm.2: f32[8, 2] = mm(t, _to_copy.1)
        mul: f32[8, 2] = mul.Tensor(mm.2, 0.1)
        sub: f32[8, 2] = sub.Tensor(w, mul)
        return [sum]
        w <- sub
    """
    assert show(step) == dedent(expected).strip()


def test_several_results_and_constants():
    def program(x):
        values, where = x.max(dim=1)
        return values + torch.tensor([1.0, 2.0]).sum(), where

    text = show(trace(program, X))
    assert "max: (f32[4], i64[4]) = max.dim(x, 1)" in text
    assert "getitem.1: i64[4] = max[1]" in text
    assert "_tensor_constant0: f32[2] = constant _tensor_constant0" in text


def test_details_name_phase_and_line():
    step = trace(lambda x: x.neg(), X)
    node = next(each for each in step.graph.nodes if each.op == "call_function")
    with_info(node, where="net.py:7", module="h.0", region=3)
    assert "neg: f32[4, 8] = neg(x)  # forward, module h.0, region 3, at net.py:7" in show(
        step, exact=True
    )


def test_the_lines_around_a_fault():
    step = trace(lambda x: x.neg().exp().relu().sum(), X)
    fault = list(step.graph.nodes)[3]
    assert show_around(step.graph, fault, lines=1).splitlines() == [
        "  exp: f32[4, 8] = exp(neg)",
        "> relu: f32[4, 8] = relu(exp)",
        "  sum: f32[] = sum(relu)",
    ]


def test_diff_shows_only_what_changed():
    text = "\n".join(f"line {i}" for i in range(9))
    assert diff(text, text) == ""
    changed = diff(text, text.replace("line 4", "line four"))
    assert changed.splitlines()[1:] == [
        " line 2",
        " line 3",
        "-line 4",
        "+line four",
        " line 5",
        " line 6",
    ]
