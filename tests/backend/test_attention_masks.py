"""Masks of attention in graphs of Dynamo's: which are laid out anew, and that numbers stay."""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from treadle.session.joint.attention_masks import lay_out_masks

B, H, T, S, D = 2, 3, 5, 7, 8


class Attention(nn.Module):
    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named

    def forward(self, q, k, v, mask):
        if self.named:
            first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)
        else:
            first = F.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
        return first + F.scaled_dot_product_attention(q * 2, k, v, mask)


def traced(mask, named=False, device="meta"):
    """As Dynamo hands it over, from a device that is no CPU."""
    module = fx.symbolic_trace(Attention(named))
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name == "mask":
            node.meta["example_value"] = torch.empty_strided(
                mask.shape, mask.stride(), dtype=mask.dtype, device=device
            )
    return module


def operands():
    return torch.randn(B, H, T, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)


def masks():
    bits = torch.rand(B, 1, T, S) > 0.4
    yield "a number a row", (torch.rand(B, 1, T, 1) > 0.4).expand(B, H, T, S)
    yield "one row for all", (torch.rand(1, 1, T, 1) > 0.4).expand(B, 1, T, S)
    yield "transposed", (torch.rand(B, 1, S, T) > 0.4).transpose(2, 3)
    yield "added", torch.randn(T, 1).expand(T, S)
    yield "every second", torch.cat([bits, bits], -1)[..., ::2]


SCATTERED = dict(masks())


@pytest.mark.parametrize("named", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_rows_are_laid_out_once(name, named):
    mask = SCATTERED[name]
    q, k, v = operands()
    module = traced(mask, named)
    before = module(q, k, v, mask)
    assert lay_out_masks(module) == 1
    assert torch.allclose(module(q, k, v, mask), before, atol=1e-5, equal_nan=True)
    assert len(module.graph.find_nodes(op="call_method", target="contiguous")) == 1
    (laid_out,) = module.graph.find_nodes(op="call_method", target="expand_as")
    assert len(laid_out.users) == 2


def test_what_is_expanded_stays_so():
    module = traced(SCATTERED["one row for all"])
    lay_out_masks(module)
    narrowed = module.graph.find_nodes(op="call_method", target="narrow")
    assert [node.args[1:] for node in narrowed] == [(0, 0, 1)]


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(B, 1, T, S, dtype=torch.bool),
        torch.ones(1, 1, 1, S).expand(B, H, T, S),
        torch.ones(B, 1, T, 1),
        torch.tensor(True),
    ],
    ids=["in order", "expanded elsewhere", "one column", "one number"],
)
def test_others_stay_as_they_are(mask):
    module = traced(mask)
    text = str(module.graph)
    assert lay_out_masks(module) == 0
    assert str(module.graph) == text


@pytest.mark.parametrize("shape", [(0, 1, T, S), (B, 1, 0, S), (B, 0, T, S)])
def test_empty_masks(shape):
    mask = torch.ones(1, 1, 1, 1).expand(shape)
    module = traced(mask)
    assert lay_out_masks(module) == 1
    q, k, v = (torch.randn(*shape[:1], H, n, D) for n in (shape[2], S, S))
    if shape[1]:  # eager takes no mask of no heads
        assert module(q, k, v, mask).shape == (shape[0], H, shape[2], D)


def test_on_a_cpu_they_stay_as_they_are():
    assert lay_out_masks(traced(SCATTERED["a number a row"], device="cpu")) == 0
