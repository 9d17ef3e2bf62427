"""Inputs of the backend have the roles that Dynamo and AOTAutograd give them, not their names."""

import pytest
import torch
from torch import nn

from treadle import backend
from treadle.graph.core.signature import Role


class Net(nn.Module):
    """Names say nothing: the buffer is called ``weight`` and the parameter ``mask``."""

    def __init__(self):
        super().__init__()
        self.mask = nn.Parameter(torch.randn(9, 5))
        self.register_buffer("weight", torch.ones(9))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, parameter):
        return torch.relu(self.norm((parameter * self.weight) @ self.mask))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs_of(run):
    before = set(backend.compiled())
    run()
    return [each for each in backend.compiled() if each not in before]


def counts(graph):
    return {each.role: each.count for each in graph._step_report().inputs}


BUFFERS = 4  # weight, running mean and variance, batches


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_forward_and_backward(dynamic):
    model = torch.compile(Net(), backend="treadle", dynamic=dynamic)
    (graph,) = graphs_of(lambda: model(torch.randn(7, 9)).sum().backward())
    assert counts(graph) == {Role.PARAMETER: 3, Role.BUFFER: BUFFERS, Role.BATCH: 1}
    assert "inputs: 3 parameter, 4 buffer, 1 batch" in graph.explain()


def test_inference():
    model = torch.compile(Net().eval(), backend="treadle")
    with torch.no_grad():
        (graph,) = graphs_of(lambda: model(torch.randn(7, 9)))
    assert counts(graph) == {Role.PARAMETER: 3, Role.BUFFER: 3, Role.BATCH: 1}


def test_a_number_that_changes():
    model = Net()

    def scaled(x, k):
        return model(x) * k

    compiled = torch.compile(scaled, backend="treadle", dynamic=True)
    (graph,) = graphs_of(lambda: compiled(torch.randn(7, 9), 0.37).sum().backward())
    assert counts(graph)[Role.SCALAR] == 1
    assert counts(graph)[Role.BATCH] == 1


def test_a_tensor_that_is_no_modules_is_brought_by_the_call():
    own = torch.randn(9, 9, requires_grad=True)
    compiled = torch.compile(lambda x: (x @ own).tanh(), backend="treadle")
    (graph,) = graphs_of(lambda: compiled(torch.randn(7, 9)).sum().backward())
    assert counts(graph) == {Role.BATCH: 2}


def test_a_frozen_parameter_is_one():
    model = Net()
    model.mask.requires_grad_(False)
    compiled = torch.compile(model, backend="treadle")
    (graph,) = graphs_of(lambda: compiled(torch.randn(7, 9)).sum().backward())
    assert counts(graph)[Role.PARAMETER] == 3


def test_two_halves(monkeypatch):
    """What the forward keeps and what the caller brings are told apart in a backward by itself."""
    from treadle.session.joint.joint_graph import JointGraph

    monkeypatch.setattr(JointGraph, "why_apart", lambda self: "for the test")
    model = Net()
    eager = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(7, 9)
    compiled = torch.compile(model, backend="treadle")
    forward, backward = graphs_of(lambda: compiled(x).sum().backward())
    assert counts(forward) == {Role.PARAMETER: 3, Role.BUFFER: BUFFERS, Role.BATCH: 1}
    found = counts(backward)
    assert found[Role.TANGENT] == 1
    assert found[Role.SAVED] >= 1
    assert found[Role.PARAMETER] >= 1
    assert "1 tangent" in backward.explain()
    again = Net()
    again.load_state_dict({**again.state_dict(), **eager})
    again(x).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name, atol=1e-5, rtol=1e-5)
