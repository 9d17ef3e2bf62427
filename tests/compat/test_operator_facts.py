"""The table of facts about operators, against what PyTorch says of every operator it has."""

import re

import pytest
import torch
from torch import fx
from torch.fx.node import _side_effectful_functions
from torch.utils.flop_counter import flop_registry

from treadle.compat.operators import operator_facts, operator_lists
from treadle.compat.operators.operator_facts import (
    IN_ORDER,
    MATTERS,
    CostClass,
    Effect,
    call_effects,
    facts_by_name,
    facts_of,
    follows_seed,
    written_names,
)
from treadle.compat.operators.rng_operators import DRAWS
from treadle.graph.core.operators import (
    draw_reads_values,
    effects_of,
    has_effect,
    is_in_order,
    is_random,
    may_drop,
    may_recompute,
)
from treadle.graph.custom_ops.expect import expect
from treadle.graph.custom_ops.recurrent import recurrent_layer

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
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_cudnn_attention_backward",
    "aten::_fused_sdp_choice",
    "aten::initial_seed",
}
WRITES_UNDECLARED = {"aten::native_batch_norm"}


def test_the_exceptions_are_these():
    """What overrules PyTorch's own word stands here once more."""
    assert set(operator_lists.DRAW_NOTHING) == DRAWS_NOTHING
    assert set(operator_lists.WRITES_UNDECLARED) == WRITES_UNDECLARED
    assert all(operator_lists.DRAW_NOTHING.values())


TOLD = (
    "DRAW_NOTHING", "SHAPE_ALONE", "WRITES_UNDECLARED", "SHARES_UNDECLARED", "READ_OUTSIDE",
    "CONDITIONS", "POINTWISE", "REDUCTIONS", "PRODUCTS", "SLOW_ELEMENTS", "NEVER_WAIT",
    "COUNTS_MASKS", "REFUSES", "DIVIDES", "MEASURABLE", "UNMEASURABLE", "UNDEFINED",
    "CONVERSIONS", "PRODUCTS_OF_PARTS", "INVENTED",
)  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_no_list_tells_of_an_operator_that_is_not_there(name):
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    told = set(getattr(operator_lists, name))
    assert told
    if torch.__version__.startswith("2.13"):
        assert told <= known


def test_no_list_is_left_out():
    lists = {
        name
        for name, value in vars(operator_lists).items()
        if isinstance(value, frozenset | dict) and any("::" in str(each) for each in value)
    }
    assert lists == {*TOLD}


def test_what_is_made_empty_is_undefined():
    for op, schema in every_operator():
        kinds = "(new_)?empty(_like|_strided|_permuted)?"
        assert operator_facts.gives_undefined(op) == bool(
            re.fullmatch(f"aten::{kinds}", schema.name)
        )


def test_what_is_tagged_random_or_takes_a_generator_draws():
    seen = 0
    for op, schema in every_operator():
        tagged = torch.Tag.nondeterministic_seeded in op.tags
        takes = any("Generator" in str(each.type) for each in schema.arguments)
        excepted = schema.name in DRAWS_NOTHING
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
        known = name in quiet or schema.name in DRAWS_NOTHING
        if any(word in name for word in words) and not known:
            assert facts_of(op).draws, op


TAGGED_WRITES = {
    getattr(torch.Tag, name)
    for name in ("inplace", "out", "inplace_view")
    if name in torch.Tag.__members__  # PyTorch 2.11 has the last one alone
}
"""By tag, besides by schema, operators that write."""


def test_what_declares_that_it_writes_writes():
    for op, schema in every_operator():
        undeclared = schema.name in WRITES_UNDECLARED
        assert facts_of(op).writes == (schema.is_mutable or undeclared), op
        if TAGGED_WRITES & set(op.tags):
            assert facts_of(op).writes, op


def test_what_gives_nothing_happens():
    """Among them all checks that FX knows of as calls that must stay."""
    for op, schema in every_operator():
        if not schema.returns:
            assert facts_of(op).effects & MATTERS, op
    for op in _side_effectful_functions:
        if isinstance(op, torch._ops.OpOverload):
            assert facts_of(op).effects & MATTERS, op


def test_what_shares_memory_is_not_new():
    for op, schema in every_operator():
        shows = any(each.alias_info is not None for each in schema.returns)
        if shows or torch.Tag.maybe_aliasing_or_mutating in op.tags:
            assert not facts_of(op).allocates, op
    assert not facts_of(aten._unsafe_view.default).allocates
    assert facts_of(aten.view_copy.default).allocates


def test_what_draws_or_writes_is_neither_repeated_nor_measured():
    for op, schema in every_operator():
        facts = facts_of(op)
        if facts.draws or facts.writes or not schema.returns or not schema.arguments:
            assert not facts.may_recompute, op
        random = follows_seed(op, {each.name: each.default_value for each in schema.arguments})
        if random or not schema.returns or torch.Tag.dynamic_output_shape in op.tags:
            zeros = facts.invented == operator_lists.ZEROS
            assert not zeros or "dropout_p" in str(schema) or "train" in str(schema), op
        assert facts.native
        assert not facts.is_unknown
        assert not facts.communicates


@pytest.mark.parametrize(
    "name",
    ["multinomial", "_linalg_solve_ex", "linalg_inv_ex", "_linalg_det", "linalg_cholesky_ex",
     "cholesky_inverse", "_assert_async", "nonzero", "_embedding_bag", "segment_reduce",
     "repeat_interleave", "_cudnn_rnn"],
)  # fmt: skip
def test_what_looks_at_its_data_never_runs_on_zeros(name):
    packet = getattr(aten, name)
    facts = [facts_of(getattr(packet, each)) for each in packet.overloads()]
    assert all(each.invented != operator_lists.ZEROS for each in facts)


def test_what_a_tag_says_of_data_waits_for_the_host():
    """A number of the device's decides the size or the number that such an operator gives."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    for op, _ in every_operator():
        if not tags.isdisjoint(op.tags):
            assert facts_of(op).waits or facts_of(op).counts_masks, op
    assert not facts_of(aten.add.Tensor).waits


def test_costs():
    for packet in flop_registry:
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for each in packet.overloads():
                assert facts_of(getattr(packet, each)).cost is CostClass.PRODUCT
    for op, _ in every_operator():
        cheap = torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags
        assert not (cheap and facts_of(op).cost.is_expensive), op
    assert facts_of(aten.add.Tensor).cost is CostClass.POINTWISE
    assert facts_of(aten.sum.dim_IntList).cost is CostClass.REDUCTION
    assert facts_of(aten.sort.default).cost is CostClass.LIBRARY
    assert facts_of(aten.tanh.default).slow_elements
    assert [each for each in CostClass if each.is_expensive] == [
        CostClass.PRODUCT,
        CostClass.LIBRARY,
    ]


def test_our_own_operators_are_known_as_well():
    layer = facts_of(recurrent_layer)
    assert layer.cost is CostClass.PRODUCT
    assert layer.invented == operator_lists.ZEROS
    assert layer.may_recompute
    assert not layer.native
    for op in DRAWS.values():
        facts = facts_of(op)
        assert facts.draws
        assert not facts.may_recompute
        assert not facts.invented
    assert facts_of(expect).effects == Effect.RAISES | Effect.CONDITION


def test_a_call_without_dropout_draws_nothing():
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not call_effects(attention, {"dropout_p": 0.0})
    assert call_effects(attention, {"dropout_p": 0.1}) is Effect.DRAWS
    dropout = aten.native_dropout.default
    assert call_effects(dropout, {"p": 0.1, "train": True})
    assert call_effects(dropout, {"p": 0.1, "train": None})  # eager drops then
    assert not call_effects(dropout, {"p": 0.1, "train": False})
    assert facts_of(attention).invented == operator_lists.ZEROS  # of calls without dropout
    assert follows_seed(attention, {"dropout_p": 0.1})
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert follows_seed(backward, {"dropout_p": 0.1})
    assert not call_effects(backward, {"dropout_p": 0.1})


@pytest.mark.parametrize(
    ("op", "reads"),
    [
        (aten.rand.default, False),
        (aten.randn_like.default, False),
        (aten.bernoulli.p, False),
        (aten.bernoulli.default, True),  # of the probabilities in its operand
        (aten.bernoulli_.float, False),
        (aten.bernoulli_.Tensor, True),
        (aten.normal_functional.default, False),
        (aten.multinomial.default, True),
        (aten.native_dropout.default, True),
        (DRAWS[aten.normal_.default], False),
        (DRAWS[aten.bernoulli_.Tensor], True),
        (aten.add.Tensor, False),  # draws nothing
    ],
)
def test_whose_elements_decide_a_draw(op, reads):
    assert facts_of(op).draw_reads_values == reads
    node = fx.Graph().call_function(op)
    assert draw_reads_values(node) == reads


def test_running_statistics_are_written_in_training_alone():
    norm = aten.native_batch_norm.default
    given = {"running_mean": 1, "running_var": 2, "training": True}
    assert written_names(norm, given) == ("running_mean", "running_var")
    assert call_effects(norm, given) is Effect.WRITES
    assert not call_effects(norm, given | {"training": False})
    assert not call_effects(norm, given | {"running_mean": None, "running_var": None})
    assert written_names(aten.add_.Tensor, {}) == ("self",)


def test_an_operator_by_the_name_that_artifacts_give_it():
    assert facts_by_name("aten.mm.out") == facts_of(aten.mm.out)
    for name in ("aten.no_such_thing.default", "python.math.sqrt", "nobody.knows.this"):
        facts = facts_by_name(name)
        assert facts.is_unknown
        assert facts.writes
        assert facts.waits
        assert not facts.invented


@torch.library.custom_op("treadle_tests::anything", mutates_args=())
def anything(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


@torch.library.custom_op(
    "treadle_tests::tagged", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def tagged(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


@torch.library.custom_op("treadle_tests::element", mutates_args=(), tags=(torch.Tag.pointwise,))
def element(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.library.custom_op("treadle_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


def test_a_user_s_operator_may_do_anything():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for op in (torch.ops.treadle_tests.anything.default, torch.ops.treadle_tests.tagged.default):
        node = graph.call_function(op, (x,))
        assert is_in_order(node)
        assert has_effect(node)
        assert not may_drop(node)
        assert not may_recompute(node)
        assert not facts_of(op).invented
        assert not facts_of(op).native
    assert is_random(node)


def test_a_user_s_operator_is_what_its_tags_and_its_schema_say():
    pointwise = facts_of(torch.ops.treadle_tests.element.default)
    assert pointwise.may_recompute
    assert pointwise.cost is CostClass.POINTWISE
    assert not pointwise.invented  # it is not PyTorch's own
    assert pointwise.waits
    writes = facts_of(torch.ops.treadle_tests.bump.default)
    assert writes.effects == Effect.WRITES | Effect.RAISES | Effect.UNKNOWN


def test_a_draw_that_nobody_reads_may_go_where_the_stream_need_not_be_eager_s():
    graph = fx.Graph()
    draw = graph.call_function(aten.rand.default, ([2],))
    assert effects_of(draw) is Effect.DRAWS
    assert effects_of(draw) & IN_ORDER
    assert not may_drop(draw)
    assert may_drop(draw, keep_random=False)
