"""Samples: random."""

import torch
import torch.nn.functional as F

from lower.operator_table import Family, normal, positive

RANDOM = Family("random numbers")


def _random() -> None:
    RANDOM.add(
        "rand, randn, randint, randperm",
        lambda x: [
            torch.rand(3),
            torch.randn(3),
            torch.randint(9, (4,)),
            torch.randperm(5),
            torch.rand_like(x),
            torch.randn_like(x),
            torch.randint_like(x, 7),
            torch.randint_like(x, 2, 7),
            torch.randint(2, 9, (4,)),
        ],
        normal(3, 4),
    )
    RANDOM.add(
        "bernoulli",
        lambda x: [torch.bernoulli(x), torch.bernoulli(x, 0.3)],
        positive(3, 4),
        grad=False,
    )
    RANDOM.add("multinomial", lambda x: torch.multinomial(x, 2), positive(3, 4))
    RANDOM.add(
        "normal, uniform, exponential",
        lambda x: [
            torch.normal(x, x.abs()),
            torch.normal(0.0, 1.0, (3,)),
            torch.empty(3).uniform_(),
            torch.empty(3).normal_(),
            torch.empty(3).exponential_(),
        ],
        positive(3, 4),
        grad=False,
    )
    RANDOM.add("dropout", lambda x: F.dropout(x, 0.3), normal(5, 4))
    RANDOM.add(
        "dropout of channels",
        lambda x: [F.dropout1d(x, 0.3), F.alpha_dropout(x, 0.3, True)],
        normal(5, 4, 3),
    )
    RANDOM.add("native_dropout", lambda x: torch.native_dropout(x, 0.3, True), normal(5, 4))
    RANDOM.add("gumbel_softmax", lambda x: F.gumbel_softmax(x), normal(5, 4))
    RANDOM.add("poisson", torch.poisson, positive(5, 4), grad=False)
    RANDOM.add(
        "attention with dropout",
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2),
        normal(2, 2, 5, 8),
    )


LISTS = Family("lists (foreach)")


def _lists() -> None:
    LISTS.add(
        "arithmetic",
        lambda x, y: [
            *torch._foreach_add([x, y], 2.0),
            *torch._foreach_mul([x, y], [2.0, 3.0]),
            *torch._foreach_sub([x, y], [x, y], alpha=0.5),
            *torch._foreach_div([x, y], 3.0),
            *torch._foreach_sqrt([x, y]),
            *torch._foreach_lerp([x, y], [y, x], 0.1),
            *torch._foreach_addcmul([x, y], [x, y], [x, y], 0.5),
            *torch._foreach_norm([x, y]),
            *torch._foreach_maximum([x, y], 0.3),
            *torch._foreach_pow([x, y], 2.0),
            *torch._foreach_reciprocal([x, y]),
            *torch._foreach_neg([x, y]),
            *torch._foreach_clamp_min([x, y], 0.2),
            *torch._foreach_sign([x, y]),
            *torch._foreach_max([x, y]),
        ],
        positive(3),
        positive(3),
        grad=False,
    )


_random()
_lists()
