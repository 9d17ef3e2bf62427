"""What is known of a node: one frozen record beside FX's value."""

import dataclasses

import pytest
import torch

from testing import trace
from treadle.graph.core.arguments import given_of, map_argument, map_nodes, types_of
from treadle.graph.core.node_info import (
    NodeInfo,
    belong,
    copy_notes,
    info,
    notes,
    tensor_of,
    value_of,
    with_info,
)
from treadle.util.generators import GeneratorRef


@pytest.fixture
def nodes():
    step = trace(lambda x: x.exp().split(2), torch.randn(4, 2))
    return {each.name: each for each in step.graph.nodes}


def test_a_record_has_what_was_said_and_nothing_else(nodes):
    with_info(nodes["exp"], where="net.py:3", region=0)
    assert info(nodes["exp"]) == NodeInfo(phase="forward", where="net.py:3", region=0)
    with pytest.raises(TypeError):
        with_info(nodes["exp"], wher="net.py:3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        info(nodes["exp"]).phase = "backward"


def test_a_node_without_a_record(nodes):
    made = nodes["exp"].graph.call_function(torch.neg, (nodes["exp"],))
    assert info(made) == NodeInfo()


def test_a_node_belongs_where_its_root_does(nodes):
    exp, split = nodes["exp"], nodes["split"]
    with_info(exp, phase="backward", module="h.0", asked="must_save", recomputed=True)
    with_info(split, draw=3)
    belong(split, exp)
    assert info(split) == NodeInfo(phase="backward", module="h.0", asked="must_save", draw=3)


def test_notes_of_others_are_kept_apart(nodes):
    nodes["exp"].meta["mine"] = 1
    copy_notes(nodes["split"], nodes["exp"])
    assert notes(nodes["split"])["mine"] == 1
    assert info(nodes["exp"]) not in notes(nodes["split"]).values()


def test_values(nodes):
    assert tensor_of(nodes["exp"]).shape == (4, 2)
    assert len(value_of(nodes["split"])) == 2
    with pytest.raises(TypeError, match="split is not one tensor"):
        tensor_of(nodes["split"])


def test_arguments_keep_their_form(nodes):
    exp = nodes["exp"]
    given = ([exp, 2], {"a": (None, exp)}, slice(exp, None))
    assert map_nodes(lambda each: each.name, given) == (
        ["exp", 2],
        {"a": (None, "exp")},
        slice("exp", None),
    )
    assert map_argument(lambda leaf: 1, ([exp, 2], None)) == ([1, 1], 1)


def test_types_touch_no_generator(nodes):
    exp = nodes["exp"]
    made = exp.graph.call_function(torch.neg, (exp, [2]), {"generator": GeneratorRef(0)})
    args, kwargs = types_of(made)
    assert args[0] is value_of(exp)
    assert args[1:] == ([2],)
    assert kwargs == {"generator": None}
    assert given_of(made, lambda each: each.name)[0] == ("exp", [2])
