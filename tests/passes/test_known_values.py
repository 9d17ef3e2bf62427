import pytest
import torch
from torch import nn

import treadle
from testing import check_numbers, check_pass, trace
from treadle.compat.fake import FakeTensorMode
from treadle.compiler.cleaning import CLEAN, cleaned, rewritten
from treadle.graph.core.constants import constant_of
from treadle.loop.program import Call
from treadle.lower.graph import lower
from treadle.options import Options
from treadle.passes.cleanup import known_values
from treadle.passes.cleanup.known_values import FoldConstants

aten = torch.ops.aten
X = torch.randn(3, 6)


def constants(step):
    return [constant_of(node) for node in step.graph.find_nodes(op="get_attr")]


def test_a_table_is_computed_once():
    step = check_pass(
        FoldConstants(),
        lambda x: x * torch.arange(6).cumsum(0).sin(),
        (X,),
        after="""
            x: f32[3, 6]
            folded_0: f32[6] = constant folded_0
            mul: f32[3, 6] = mul.Tensor(x, folded_0)
            return [mul]
        """,
    )
    torch.testing.assert_close(constants(step)[0], torch.arange(6).cumsum(0).sin())


def test_what_follows_is_part_of_it_until_it_grows():
    step = check_pass(
        FoldConstants(),
        lambda x: x * (torch.arange(3.0).exp() * 2)[:, None] * torch.linspace(0, 1, 6).cos().neg(),
        (X,),
        after="""
            x: f32[3, 6]
            folded_0: f32[3] = constant folded_0
            unsqueeze: f32[3, 1] = unsqueeze(folded_0, 1)
            mul: f32[3, 6] = mul.Tensor(x, unsqueeze)
            folded_1: f32[6] = constant folded_1
            mul.1: f32[3, 6] = mul.Tensor(mul, folded_1)
            return [mul.1]
        """,
    )
    assert len(constants(step)) == 2


def test_results_of_an_operation_with_several():
    def program(x):
        values, order = torch.arange(6.0).sub(2).abs().sort(stable=True)
        return x * values, x.index_select(1, order), x * values.sum()

    step = trace(program, X)
    assert FoldConstants().run(step) == 3
    targets = {node.target for node in step.graph.nodes if node.op == "call_function"}
    assert aten.sort.default not in targets
    assert aten.sum.default not in targets
    check_numbers(step, program, (X,))


STAYS = {
    "formulas": lambda x: x * torch.arange(6) + torch.ones(6, 6).tril()[0],
    "an input": lambda x: x.cumsum(0).sin(),
    "a draw": lambda x: x * torch.rand(6).sin(),
    "what is drawn from a table": lambda x: x * torch.bernoulli(torch.full((6,), 0.5)).cumsum(0),
    "a result": lambda x: (x, torch.arange(6.0).sin()),
    "a view of a result": lambda x: (x, torch.arange(6.0).sin()[1:]),
    "a copy that grows": lambda x: x * torch.arange(6)[None].expand(3, 6).clone(),
    "memory as it is": lambda x: x * torch.empty(6).sin() * 0,
    "complex numbers": lambda x: x * torch.polar(torch.ones(6), torch.zeros(6)).exp().real,
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    step = rewritten(trace(STAYS[name], X), CLEAN)
    before = str(step.graph)
    assert FoldConstants().run(step) == 0
    assert str(step.graph) == before


def test_large_ones_are_computed_by_every_call(monkeypatch):
    def program(x):
        return x * torch.arange(600.0).sin().sum() + torch.arange(600.0).cos()[:6]

    monkeypatch.setattr(known_values, "LARGEST", 1024)
    step = trace(program, X)
    assert FoldConstants().run(step) == 1  # the sum is small
    assert len(step.graph.find_nodes(op="call_function", target=aten.cos.default)) == 1
    monkeypatch.setattr(known_values, "LARGEST_OPERAND", 1024)
    assert FoldConstants().run(trace(program, X)) == 0


def test_all_of_a_step_have_room():
    def program(x):
        return x * torch.arange(6.0).sin() + torch.arange(6.0).cos() + torch.arange(6.0).exp()

    step = trace(program, X)
    assert FoldConstants(most=50).run(step) == 2
    check_numbers(step, program, (X,))


def test_an_error_is_that_of_the_call():
    step = trace(lambda x: x * torch.linalg.cholesky(-torch.eye(6)).sum(), X)
    FoldConstants().run(step)
    assert step.graph.find_nodes(op="call_function", target=aten.linalg_cholesky_ex.default) == []
    assert FoldConstants().run(step) == 0


def test_two_graphs_of_one_module_have_their_own():
    step = trace(lambda x: x * torch.arange(6.0).sin() + torch.arange(6.0).cos(), X)
    one, other = step.copy(), step.copy()
    FoldConstants(most=30).run(one)
    FoldConstants().run(other)
    assert len(constants(one)) == 1
    assert len(constants(other)) == 2
    assert not constants(step)


def test_on_a_device_it_is_brought_there():
    """The host computes it, and the program has it where it computes."""
    with FakeTensorMode():
        x = torch.empty(3, 6, device="cuda")
    table = trace(lambda x: x * torch.arange(6, device="cuda").cumsum(0).sin(), x)
    step = cleaned(table, Options())
    assert [constant.device.type for constant in constants(step)] == ["cpu"]
    lowered = lower(step, device="cuda")
    assert not any(isinstance(each, Call) for each in lowered.steps)


def trained(**options):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        order = torch.arange(4.0).sub(2).abs().sort().values.repeat(16)
        loss = (model(x) * torch.arange(64).cumsum(0).float().sin() * order).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = treadle.Options(**options)
    return model, step, treadle.compile(step, model=model, optimizer=optimizer, options=options)


def test_a_step_computes_it_when_it_is_compiled():
    x = torch.randn(8, 64)
    model, _, compiled = trained()
    losses = [compiled(x), compiled(x)]
    again, plain, other = trained(skip=("FoldConstants",))
    expected = [plain(x), plain(x)]
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(model.weight, again.weight)
    other(x)
    summaries = compiled.summary(), other.summary()
    assert [summary.library_calls for summary in summaries] == [2, 4]


@pytest.mark.parametrize("memory", [None, 0.9])
def test_the_promised_peak_counts_it(memory):
    """256 KiB that are there between calls as well; within a budget they would be too many."""
    torch.manual_seed(0)
    model = nn.Linear(128, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        table = torch.arange(256 * 256.0).sin().reshape(256, 256)
        loss = (model(x).relu() * table).tanh().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = treadle.Options(memory=memory)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    x = torch.randn(256, 128)
    compiled(x)
    kept = compiled.compiled.artifact.constants.values()
    assert [each.nbytes for each in kept] == ([] if memory else [256 << 10])
    measured = compiled.measure(x).peak_bytes
    assert measured <= compiled.summary().peak_predicted_bytes
