import pytest
import torch

from testing import check_pass, trace
from treadle.passes.dropout import ExpandDropout

aten = torch.ops.aten
X = torch.randn(3, 5)


def test_the_draw_and_the_products_of_a_fused_dropout():
    def program(x):
        y, mask = aten.native_dropout(x, 0.25, True)
        return y + 1, mask

    check_pass(
        ExpandDropout(),
        program,
        (X,),
        after="""
            x: f32[3, 5]
            bernoulli: f32[3, 5] = bernoulli.p(x, 0.75)
            mul: f32[3, 5] = mul.Tensor(x, bernoulli)
            mul.1: f32[3, 5] = mul.Scalar(mul, 1.3333333333333333)
            _to_copy: b1[3, 5] = _to_copy(bernoulli, dtype=b1)
            add: f32[3, 5] = add.Tensor(mul.1, 1)
            return [add, _to_copy]
        """,
    )


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (0.5, False)])
def test_no_draw_is_left_alone(p, train):
    step = trace(lambda x: aten.native_dropout(x, p, train)[0], X)
    assert ExpandDropout().run(step) == 0
