"""A cut that failed says which values cannot be cut, and draws them."""

import pytest
import torch
from torch.nn import functional as F

from passes.memory.traced_steps import traced
from treadle.graph.core.node_info import with_info
from treadle.passes.memory.classify import SaveCandidates, classify
from treadle.passes.memory.cut import cheapest_cut
from treadle.passes.memory.drawing import CutFailure
from treadle.passes.memory.order import facts_of
from treadle.util.errors import VerifyError


def several():
    """A step whose forward pass has an operation with several results, which is drawn once."""

    def loss(w, x):
        return F.layer_norm(F.dropout(x @ w, 0.5), (16,)).square().mean()

    return traced(loss, [torch.randn(16, 16)], [torch.randn(8, 16)])


def test_a_cut_that_failed_is_drawn():
    step = several()
    facts = facts_of(step)
    claims = classify(facts)
    random = next(i for i in sorted(claims.candidates) if facts.keep[i])
    with_info(facts.nodes[random], where='net.py:7: "x"')
    after = [i for i in sorted(claims.candidates) if random in facts.operands[i]]
    impossible = {i: float("inf") for i in claims.candidates}
    with pytest.raises(CutFailure, match="must not be saved cannot be recomputed") as failed:
        cheapest_cut(facts, claims, [1.0] * len(facts.nodes), products=True, costs=impossible)
    error = failed.value
    assert isinstance(error, VerifyError)
    assert error.code == "TR-900"
    assert error.values
    lines = error.dot.splitlines()
    assert lines[0] == "digraph cut {"
    assert lines[-1] == "}"
    assert sum("color=red" in line for line in lines) == len(error.values)
    assert all(error.dot.count(f'label="{name}: ') == 1 for name in error.values)
    assert " -> later;" in error.dot
    assert after
    assert error.dot.count('"') % 2 == 0


def test_nothing_fails_where_something_can_be_kept():
    facts = facts_of(several())
    claims: SaveCandidates = classify(facts)
    assert cheapest_cut(facts, claims, [1.0] * len(facts.nodes), products=True)
