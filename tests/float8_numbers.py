"""Numbers that show how float8 is rounded."""

import torch

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NAN, INF = float("nan"), float("inf")
AWKWARD = [
    0.0,
    -0.0,
    NAN,
    -NAN,
    INF,
    -INF,
    448.0,
    464.0,
    464.1,
    479.9,
    480.0,
    57344.0,
    61439.0,
    61440.0,
    65535.0,
    65536.0,
    1e30,
    2.0**-9,
    2.0**-10,
    1.5 * 2.0**-10,
    2.0**-16,
    2.0**-17,
    3e-5,
    1e-45,
]


def numbers(dtype):
    """All float8, the middles between them, their neighbours, awkward numbers and random ones."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([finite, middles])
    up = torch.nextafter(near, torch.tensor(INF))
    down = torch.nextafter(near, torch.tensor(-INF))
    awkward = torch.tensor(AWKWARD)
    random = torch.randn(3001) * torch.exp2(torch.randint(-20, 18, (3001,)).float())
    return torch.cat([every, middles, up, down, awkward, -awkward, random])


def same_bits(a, b):
    assert a.dtype is b.dtype
    assert a.shape == b.shape
    nan = a.float().isnan()
    assert torch.equal(nan, b.float().isnan())
    assert torch.equal(a.float()[~nan], b.float()[~nan])
