import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, check_pass, node_of, trace
from treadle.compat.fake import FakeTensorMode
from treadle.compiler.cleaning import clean
from treadle.graph.rewrite.rules import explain
from treadle.loop.program import Call
from treadle.lower.graph import lower
from treadle.passes.cleanup.constructors import CountConstants

aten = torch.ops.aten
X = torch.randn(3, 4)


def test_the_running_sum_of_a_constant_is_its_multiples():
    step = check_pass(
        CountConstants(),
        lambda x: x + torch.cumsum(torch.full([3, 4], 2.0), 1),
        (X,),
        after="""
            x: f32[3, 4]
            full: f32[3, 4] = full([3, 4], 2.0, device=cpu, pin_memory=False)
            arange: f32[4] = arange.start(1, 5, dtype=f32, device=cpu)
            mul: f32[4] = mul.Tensor(arange, 2.0)
            view: f32[1, 4] = view(mul, [1, 4])
            expand: f32[3, 4] = expand(view, [3, 4])
            clone: f32[3, 4] = clone(expand, memory_format=torch.contiguous_format)
            add: f32[3, 4] = add.Tensor(x, clone)
            return [add]
        """,
    )
    assert not step.graph.find_nodes(op="call_function", target=aten.cumsum.default)


def test_positions_of_an_ordinary_model():
    """``cumsum(ones) - 1``, as position indices are made."""

    def program(x):
        mask = torch.ones_like(x, dtype=torch.int64)
        return torch.cumsum(mask, dim=1) - 1

    step = trace(program, X)
    assert CountConstants().run(step) == 1
    check_numbers(step, program, (X,))


STAYS = {
    "no constant": (lambda x: torch.cumsum(x, 0), "x is not one number everywhere"),
    "it rounds": (
        lambda x: x + torch.cumsum(torch.full((4,), 0.1), 0),
        "sums of 4 times 0.10000000149011612 round in torch.float32",
    ),
    "too long": (
        lambda x: x.new_ones(300, dtype=torch.bfloat16).cumsum(0),
        "sums of 300 times 1.0 round in torch.bfloat16",
    ),
    "not finite": (lambda x: x.new_full((4,), math.inf).cumsum(0), "inf is not finite"),
    "minus zero": (lambda x: x.new_full((4,), -0.0).cumsum(0), "sum of -0.0 may be 0.0"),
    "no dims": (lambda x: torch.cumsum(torch.full((), 2.0), 0) + x, "cumsum has no dims"),
    "complex": (lambda x: torch.full((4,), 1j).cumsum(0) * x, "cumsum is c64[4]"),
    "bytes": (
        lambda x: torch.cumsum(torch.ones(400), 0, dtype=torch.uint8).sum() + x,
        "torch.uint8 has no 401",
    ),
    "too large": (
        lambda x: torch.cumsum(torch.full((4,), 2**40), 0, dtype=torch.int32).sum() + x,
        f"torch.int32 has no {2**40}",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_and_says_why(name):
    body, reason = STAYS[name]
    if name in ("too long", "not finite", "minus zero"):
        number, length, dtype = {
            "too long": (1.0, 300, torch.bfloat16),
            "not finite": (math.inf, 4, torch.float32),
            "minus zero": (-0.0, 4, torch.float32),
        }[name]
        body = lambda x: torch.full((length,), number, dtype=dtype).cumsum(0).sum() + x  # noqa: E731
    step = trace(body, X)
    assert reason in explain(CountConstants(), node_of(step, aten.cumsum.default))
    assert CountConstants().run(step) == 0
    check_numbers(step, body, (X,))


NUMBERS = st.one_of(st.integers(-9, 9), st.booleans(), st.sampled_from([0.5, -1.25, 3.0, 0.1, 0.0]))
DTYPES = [None, torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16]


@settings(max_examples=100, deadline=None)
@given(
    NUMBERS,
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 13]), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(-3, 2),
)
def test_any_constant(number, shape, dtype, dim):
    dim = dim % len(shape)
    if dtype is torch.uint8:  # a negative number has no such element: what it becomes is undefined
        number = abs(number)

    def program(x):
        return torch.cumsum(torch.full(shape, number), dim, dtype=dtype), x.sum()

    step = trace(program, X)
    strides = step.returned[0].meta["val"].stride()
    CountConstants().run(step)
    assert step.returned[0].meta["val"].stride() == strides
    check_numbers(step, program, (X,))
    assert CountConstants().run(step) == 0


def test_what_the_host_constructs_for_a_device_is_computed_where_it_is_read():
    """Constructors are formulas, without a place: nothing is copied but what the step returns."""

    def program(x):
        positions = torch.arange(5).float() * 2 + torch.ones(5)
        mask = torch.arange(6)[None] <= torch.arange(6)[:, None]
        scaled = x * positions.to(x.device).unsqueeze(1)
        return (scaled * mask.to(x.device).narrow(0, 0, 5)).sum(), torch.arange(4)

    with FakeTensorMode():
        x = torch.empty(5, 6, device="cuda")
    lowered = lower(clean(trace(program, x)), device="cuda")
    copies = [step.outputs for step in lowered.steps if isinstance(step, Call)]
    assert [name.partition("_")[0] for (name,) in copies] == ["arange"]  # the second result
    assert all(
        lowered.buffers[s.output.buffer].device == "cuda"
        for s in lowered.steps
        if not isinstance(s, Call)
    )
