"""Rules whose programs are functions of PyTorch's, in graphs of many shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import treadle
from testing import check_numbers, node_of, refusal, trace
from treadle.graph.rewrite.rules import NoMatch, Rewrite, Rule, explain, explain_all, lowering
from treadle.util.errors import require

aten = torch.ops.aten


def scores(q, k, scale):
    return torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)


def smooth_scores(q, k, scale):
    return torch.sigmoid((q * scale) @ k.transpose(-2, -1))


EXAMPLES = [
    (torch.empty(2, 3), torch.empty(4, 3), 0.123),
    (torch.empty(2, 5, 3), torch.empty(2, 4, 3), 0.123),
    (torch.empty(2, 7, 5, 3), torch.empty(2, 7, 4, 3), 0.123),
]
SCORES = Rule.from_functions("scores", scores, smooth_scores, EXAMPLES)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 5),
    st.sampled_from([0.5, 2.0, 1e-3]),
)
def test_found_in_every_shape(batch, rows, columns, inner, scale):
    q, k = torch.randn(*batch, rows, inner), torch.randn(*batch, columns, inner)
    step = trace(lambda q, k: scores(q, k, scale).exp(), q, k)
    assert Rewrite((SCORES,)).run(step) == 1
    step.graph.eliminate_dead_code()
    assert not step.graph.find_nodes(op="call_function", target=aten._softmax.default)
    check_numbers(step, lambda q, k: smooth_scores(q, k, scale).exp(), (q, k), exact=False)
    assert Rewrite((SCORES,)).run(step) == 0


Q, K = torch.randn(3, 5), torch.randn(7, 5)
ELSEWHERE = {
    "other-dim": (lambda q, k: torch.softmax(q @ k.mT * 0.5, 0), "_softmax has dim=0, not -1"),
    "other-order": (lambda q, k: torch.softmax(0.5 * (k @ q.mT).mT, -1), "transpose_1 is not mm"),
    "read-elsewhere": (
        lambda q, k: torch.softmax((p := q @ k.mT) * 0.5, -1) + p,
        "mm is used outside the match",
    ),
    "another-operation": (lambda q, k: torch.softmax(q @ k.mT + 0.5, -1), "add is not mul"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_constants_count_where_it_is_found(name):
    program, reason = ELSEWHERE[name]
    step = trace(program, Q, K)
    assert reason in explain(SCORES, node_of(step, aten._softmax.default))
    assert Rewrite((SCORES,)).run(step) == 0


def test_sizes_among_the_arguments_are_those_of_what_is_found():
    """``flatten`` is a view with sizes: one that merges other dims is another function."""

    def rows(x):
        return x.flatten(0, 1).exp()

    rule = Rule.from_functions(
        "rows", rows, lambda x: x.exp().flatten(0, 1), [(torch.empty(2, 3, 4),)]
    )
    step = trace(lambda x: rows(x).neg(), torch.randn(5, 7, 3))
    assert Rewrite((rule,)).run(step) == 1
    check_numbers(step, lambda x: rows(x).neg(), (torch.randn(5, 7, 3),))
    other = trace(lambda x: x.flatten(1, 2).exp(), torch.randn(5, 7, 3))
    words = explain(rule, node_of(other, aten.exp.default))
    assert words == "expected 35, found 5"


def test_a_lowering_and_a_check():
    def check(x, y):
        require(x.dtype == torch.float32, NoMatch, f"{x} is not f32")

    rule = Rule.from_functions(
        "distance",
        lambda x, y: ((x - y) ** 2).mean(),
        lowering(lambda b, x, y: b.call(aten.mse_loss.default, x, y)),
        [(torch.empty(3), torch.empty(3))],
        check,
    )
    step = trace(lambda x, y: ((x - y) ** 2).mean(), Q, Q)
    assert explain(rule, node_of(step, aten.mean.default)) == "applies"
    step = trace(lambda x, y: ((x - y) ** 2).mean(), Q.double(), Q.double())
    assert explain(rule, node_of(step, aten.mean.default)) == "f64[3, 5] is not f32"


def test_several_results():
    def parts(x):
        return x.sum(-1), (x * x).sum(-1)

    def others(x):
        return x.sum(-1), x.square().sum(-1)

    rule = Rule.from_functions("moments", parts, others, [(torch.empty(2, 3),)])
    program = lambda x: parts(x)[0] / parts(x)[1].exp()  # noqa: E731
    step = trace(program, Q)
    last = step.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)[-1]
    assert explain(rule, last) == "applies"


@pytest.mark.parametrize("shared", [False, True])
def test_values_inside_that_others_read(shared):
    rule = Rule.from_functions("scores", scores, smooth_scores, EXAMPLES, shared=shared)
    step = trace(lambda q, k: torch.softmax((p := q @ k.mT) * 0.5, -1).exp() + p, Q, K)
    softmax = node_of(step, aten._softmax.default)
    assert explain(rule, softmax) == ("applies" if shared else "mm is used outside the match")
    assert explain_all(rule, step) == {softmax.name: explain(rule, softmax)}
    assert Rewrite((rule,)).run(step) == shared
    if shared:
        after = lambda q, k: smooth_scores(q, k, 0.5).exp() + q @ k.mT  # noqa: E731
        check_numbers(step, after, (Q, K), exact=False)


@pytest.mark.parametrize(
    ("search", "examples", "words"),
    [
        (lambda x, s: x * 2.0, [(Q, 0.5)], "s of"),
        (lambda x, y: x.exp(), [(Q, Q)], "y of"),
        (lambda x: x + torch.tensor([1.0]), [(Q,)], "makes a tensor from numbers"),
        (lambda x: x, [(Q,)], "does not end in an operation"),
        (lambda x: x.exp(), [(Q, Q)], "2 arguments for x"),
    ],
)
def test_functions_that_no_rule_can_be_made_of(search, examples, words):
    rule = Rule.from_functions("wrong", search, search, examples)
    step = trace(lambda x: x.exp(), Q)
    assert words in refusal(lambda: Rewrite((rule,)).run(step))


def test_in_a_whole_training_step(monkeypatch, tmp_path):
    from treadle.passes import registered

    monkeypatch.setattr(registered, "_passes", [])
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))

    def gelu_by_hand(x):
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

    rule = Rule.from_functions(
        "gelu", gelu_by_hand, lambda x: F.gelu(x, approximate="tanh"), [(torch.empty(2, 3),)]
    )
    treadle.register_pass(treadle.Rewrite((rule,)))
    model = nn.Linear(5, 7)
    step = treadle.compile(lambda x: gelu_by_hand(model(x)).sum(-1), model=model)
    x = torch.randn(3, 5)
    torch.testing.assert_close(step(x), gelu_by_hand(model(x)).sum(-1))
    assert "gelu" in step.graph("captured")
    assert "= tanh(" not in step.graph("captured")


def test_with_sizes_that_each_call_decides(monkeypatch, tmp_path):
    from treadle.passes import registered

    monkeypatch.setattr(registered, "_passes", [])
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    treadle.register_pass(treadle.Rewrite((SCORES,)))
    model = nn.Linear(5, 5)

    def evaluate(x):
        return scores(model(x), model.weight, 0.5).sum(0)

    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(2, 40))
    step = treadle.compile(evaluate, model=model, shapes=shapes)
    for rows in (3, 11, 40):
        x = torch.randn(rows, 5)
        expected = smooth_scores(model(x), model.weight, 0.5).sum(0)
        torch.testing.assert_close(step(x), expected)
