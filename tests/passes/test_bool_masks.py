import torch

from testing import check_numbers, check_pass, trace
from treadle.passes.bool_masks import StoreDropoutMasksAsBool
from treadle.passes.dce import RemoveDeadCode

aten = torch.ops.aten
X, DY = torch.randn(3, 5), torch.randn(3, 5)


def dropout(x, dy):
    mask = torch.bernoulli(x, 0.9)
    scale = mask / 0.9
    return x * scale, dy * scale


def test_the_scaled_mask_is_rebuilt_in_the_backward():
    check_pass(
        StoreDropoutMasksAsBool(),
        dropout,
        (X, DY),
        backward_from="mul_1",
        after="""
            x: f32[3, 5]
            dy: f32[3, 5]
            bernoulli: f32[3, 5] = bernoulli.p(x, 0.9)
            _to_copy: b1[3, 5] = _to_copy(bernoulli, dtype=b1)
            div: f32[3, 5] = div.Tensor(bernoulli, 0.9)
            mul: f32[3, 5] = mul.Tensor(x, div)
            _to_copy.1: f32[3, 5] = _to_copy(_to_copy, dtype=f32)
            div.1: f32[3, 5] = div.Tensor(_to_copy.1, 0.9)
            mul.1: f32[3, 5] = mul.Tensor(dy, div.1)
            return [mul, mul.1]
        """,
    )


def test_a_bare_mask_in_half_precision():
    def program(x, dy):
        mask = torch.bernoulli(x.bfloat16(), 0.5)
        return x * mask, dy * mask - mask

    check_pass(
        StoreDropoutMasksAsBool(),
        program,
        (X, DY),
        backward_from="mul_1",
        after="""
            x: f32[3, 5]
            dy: f32[3, 5]
            _to_copy: bf16[3, 5] = _to_copy(x, dtype=bf16)
            bernoulli: bf16[3, 5] = bernoulli.p(_to_copy, 0.5)
            _to_copy.1: b1[3, 5] = _to_copy(bernoulli, dtype=b1)
            mul: f32[3, 5] = mul.Tensor(x, bernoulli)
            _to_copy.2: bf16[3, 5] = _to_copy(_to_copy.1, dtype=bf16)
            mul.1: f32[3, 5] = mul.Tensor(dy, _to_copy.2)
            sub: f32[3, 5] = sub.Tensor(mul.1, _to_copy.2)
            return [mul, sub]
        """,
    )


def test_only_what_a_phase_reads_is_rebuilt():
    def program(x, dy):
        mask = torch.bernoulli(x, 0.5)
        return x * (mask / 0.5), dy * (mask / 0.25)

    check_pass(
        StoreDropoutMasksAsBool(),
        program,
        (X, DY),
        backward_from="div_1",
        after="""
            x: f32[3, 5]
            dy: f32[3, 5]
            bernoulli: f32[3, 5] = bernoulli.p(x, 0.5)
            _to_copy: b1[3, 5] = _to_copy(bernoulli, dtype=b1)
            div: f32[3, 5] = div.Tensor(bernoulli, 0.5)
            mul: f32[3, 5] = mul.Tensor(x, div)
            _to_copy.1: f32[3, 5] = _to_copy(_to_copy, dtype=f32)
            div.1: f32[3, 5] = div.Tensor(_to_copy.1, 0.25)
            mul.1: f32[3, 5] = mul.Tensor(dy, div.1)
            return [mul, mul.1]
        """,
    )


def test_phases_get_their_own_copies():
    step = trace(dropout, X, DY, backward_from="mul_1")
    (last,) = step.graph.find_nodes(op="output")
    scale = step.graph.find_nodes(op="call_function", target=aten.div.Tensor)[0]
    with step.graph.inserting_before(last):
        extra = step.graph.call_function(aten.neg.default, (scale,))
    extra.meta |= {**scale.meta, "phase": "optimizer"}
    last.args = ((last.args[0][0], extra),)
    assert StoreDropoutMasksAsBool().run(step) == 1
    phases = [
        node.meta["phase"]
        for node in step.graph.find_nodes(op="call_function", target=aten.div.Tensor)
    ]
    assert phases == ["forward", "backward", "optimizer"]


def test_leaves_a_mask_of_one_phase_alone():
    step = trace(dropout, X, DY)
    assert StoreDropoutMasksAsBool().run(step) == 0
    check_numbers(step, dropout, (X, DY))


def test_leaves_other_random_numbers_alone():
    def program(x, dy):
        noise = torch.rand_like(x)
        return x * noise, dy * noise

    step = trace(program, X, DY, backward_from="mul_1")
    assert StoreDropoutMasksAsBool().run(step) == 0


def test_bytes_between_the_phases_shrink():
    step = trace(dropout, X, DY, backward_from="mul_1")
    StoreDropoutMasksAsBool().run(step)
    RemoveDeadCode().run(step)
    crossing = {
        node
        for node in step.graph.nodes
        if node.op == "call_function" and node.meta["phase"] == "forward"
        if any(user.meta.get("phase") == "backward" for user in node.users)
    }
    assert sum(node.meta["val"].nbytes for node in crossing) == X.numel()
