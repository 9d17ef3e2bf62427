"""Real numbers to whole ones, in generated code: what eager gives for NaN, infinities and numbers
beyond the range, also where nobody keeps the whole number."""

import pytest
import torch
from torch import nn

import treadle

BEYOND = [
    3e9, float("nan"), 1.7, -1.7, float("inf"), -float("inf"), -3e9, 2147483520.0, -2147483648.0,
    9.3e18, -9.3e18, -0.0, 0.5,
]  # fmt: skip
CONVERSIONS = {
    "int": lambda x: x.int(),
    "long": lambda x: x.long(),
    "int and back": lambda x: x.int().float() + 1,
    "long and back": lambda x: x.long().double() + 1,
    "to itself": lambda x: x.int().to(x.dtype),
    "narrow": lambda x: (x.short(), x.to(torch.int8), x.to(torch.uint8)),
    "both": lambda x: (x.int(), x.int().float()),
}


@pytest.mark.users_flags
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_eagers(name, dtype):
    x = torch.tensor(BEYOND * 16).to(dtype)[:203]
    step = treadle.compile(CONVERSIONS[name], model=nn.Linear(1, 1))
    torch.testing.assert_close(step(x), CONVERSIONS[name](x), rtol=0, atol=0, equal_nan=True)
