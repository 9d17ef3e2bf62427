import gc
import weakref

import torch
import torch.nn.functional as F

from testing import check_numbers, trace
from treadle.graph.analysis.execute import run_step


def test_a_step_means_what_eager_does():
    def program(w, x, y):
        w = w.detach().requires_grad_()
        loss = F.cross_entropy(x @ w, y)
        (grad,) = torch.autograd.grad(loss, w)
        return loss.detach(), w.detach() - 0.1 * grad, None

    inputs = (torch.randn(5, 7), torch.randn(3, 5), torch.tensor([0, 6, 2]))
    step = trace(program, *inputs, writes={1: 0})
    loss, weight, nothing = run_step(step, inputs)
    expected = program(*inputs)
    assert nothing is None
    assert torch.equal(loss, expected[0])
    assert torch.equal(weight, expected[1])


def test_inputs_stay_as_they_were():
    x = torch.randn(3)
    kept = x.clone()
    step = trace(lambda x: (x + 1) * x, x)
    run_step(step, (x,))
    assert torch.equal(x, kept)


def test_constants_and_several_results():
    def program(x):
        values, where = x.max(dim=1)
        return values + torch.tensor([1.0, 2.0]).sum(), where

    x = torch.randn(4, 3)
    check_numbers(trace(program, x), program, (x,))


def test_values_die_after_their_last_use():
    seen = []

    def watch(value):
        if seen:
            gc.collect()
            assert seen[0]() is None
        result = value + 1
        seen.append(weakref.ref(result))
        return result

    step = trace(lambda x: x.neg().exp().relu(), torch.randn(3))
    neg, _, relu = (node for node in step.graph.nodes if node.op == "call_function")
    relu.target = neg.target = watch
    run_step(step, (torch.randn(3),))
    assert len(seen) == 2
