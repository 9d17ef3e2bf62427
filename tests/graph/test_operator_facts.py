"""The table of facts about operators, against what PyTorch says of every operator it has."""

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from treadle.compat.draw_operators import DRAWS
from treadle.graph.operator_facts import CostClass, call_draws, facts_of, follows_seed
from treadle.graph.operators import has_effect, is_in_order, is_random
from treadle.graph.recurrent import recurrent_layer

aten = torch.ops.aten


def every_operator():
    """All operators of PyTorch's own: (operator, schema)."""
    for packet_name in sorted(dir(aten)):
        packet = getattr(aten, packet_name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for name in packet.overloads():
            op = getattr(packet, name)
            yield op, op._schema


@pytest.fixture(scope="module", autouse=True)
def whole_namespace():
    """``dir(torch.ops.aten)`` lists what has been asked for; ask for everything."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            getattr(aten, schema.name.removeprefix("aten::"))


DRAWS_NOTHING = {  # the exceptions, once more: a new one needs a reason in both places
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_cudnn_attention_backward",
    "_fused_sdp_choice",
    "initial_seed",
}


def test_what_is_tagged_random_or_takes_a_generator_draws():
    seen = 0
    for op, schema in every_operator():
        tagged = torch.Tag.nondeterministic_seeded in op.tags
        takes = any("Generator" in str(each.type) for each in schema.arguments)
        excepted = schema.name.removeprefix("aten::") in DRAWS_NOTHING
        assert facts_of(op).draws == ((tagged or takes) and not excepted), op
        seen += tagged or takes
    assert seen > 100


def test_no_operator_whose_name_says_random_is_left_out():
    """Names decide nothing; here they are a second opinion on PyTorch's tags."""
    quiet = {
        *("_dirichlet_grad", "poisson_nll_loss", "native_dropout_backward", "exponential_backward"),
        *("_philox_key_fold_in", "_philox_key_split"),  # functions of a key, as are those below
        *("_philox_normal", "_philox_normal_", "_philox_uniform", "_philox_uniform_"),
        *("_philox_randint", "_philox_randint_"),
        *("rrelu_with_noise_backward",),
    }
    words = ("rand", "dropout", "bernoulli", "normal_", "poisson", "dirichlet", "multinomial")
    for op, schema in every_operator():
        name = schema.name.removeprefix("aten::")
        if any(word in name for word in words) and name not in quiet | DRAWS_NOTHING:
            assert facts_of(op).draws, op


def test_what_draws_or_writes_is_neither_repeated_nor_measured():
    for op, schema in every_operator():
        facts = facts_of(op)
        assert facts.mutates == schema.is_mutable
        if facts.draws or facts.mutates or not schema.returns:
            assert not facts.may_recompute, op
        random = follows_seed(op, {each.name: each.default_value for each in schema.arguments})
        if random or not schema.returns or torch.Tag.dynamic_output_shape in op.tags:
            assert not facts.measurable or "dropout_p" in str(schema) or "train" in str(schema), op
        assert not facts.opaque


@pytest.mark.parametrize(
    "name",
    ["multinomial", "_linalg_solve_ex", "linalg_inv_ex", "_linalg_det", "linalg_cholesky_ex",
     "cholesky_inverse", "_assert_async", "nonzero", "_embedding_bag", "segment_reduce",
     "repeat_interleave", "_cudnn_rnn"],
)  # fmt: skip
def test_what_looks_at_its_data_never_runs_on_invented_data(name):
    packet = getattr(aten, name)
    assert not any(facts_of(getattr(packet, each)).measurable for each in packet.overloads())


def test_costs():
    for packet in flop_registry:
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for each in packet.overloads():
                assert facts_of(getattr(packet, each)).cost is CostClass.PRODUCT
    assert facts_of(aten.add.Tensor).cost is CostClass.POINTWISE
    assert facts_of(aten.sum.dim_IntList).cost is CostClass.REDUCTION
    assert facts_of(aten.sort.default).cost is CostClass.LIBRARY
    assert facts_of(aten.tanh.default).slow_elements


def test_our_own_operators_are_known_as_well():
    layer = facts_of(recurrent_layer)
    assert layer.cost is CostClass.PRODUCT
    assert layer.measurable
    assert layer.may_recompute
    for op in DRAWS.values():
        facts = facts_of(op)
        assert facts.draws
        assert not facts.may_recompute
        assert not facts.measurable


def test_a_call_without_dropout_draws_nothing():
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not call_draws(attention, {"dropout_p": 0.0})
    assert call_draws(attention, {"dropout_p": 0.1})
    dropout = aten.native_dropout.default
    assert call_draws(dropout, {"p": 0.1, "train": True})
    assert call_draws(dropout, {"p": 0.1, "train": None})  # eager drops then
    assert not call_draws(dropout, {"p": 0.1, "train": False})
    assert facts_of(attention).measurable  # of calls without dropout
    assert follows_seed(attention, {"dropout_p": 0.1})
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert follows_seed(backward, {"dropout_p": 0.1})
    assert not call_draws(backward, {"dropout_p": 0.1})


@torch.library.custom_op("treadle_tests::anything", mutates_args=())
def anything(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


@torch.library.custom_op(
    "treadle_tests::tagged", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def tagged(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


def test_a_user_s_operator_may_do_anything():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for op in (torch.ops.treadle_tests.anything.default, torch.ops.treadle_tests.tagged.default):
        node = graph.call_function(op, (x,))
        assert is_in_order(node)
        assert has_effect(node)
        assert not facts_of(op).may_recompute
        assert not facts_of(op).measurable
    assert is_random(node)
