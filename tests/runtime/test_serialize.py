"""Artifacts to JSON and back."""

import json
import math

import pytest
import torch

from treadle.runtime.store.artifact import Artifact, View
from treadle.runtime.store.serialize import artifact_from_bytes, artifact_to_bytes, decode, encode
from treadle.util.errors import RuntimeFailure

VALUES = [
    None,
    True,
    7,
    -(2**62),
    2.5,
    "text",
    1 + 2j,
    complex(math.inf, 0.5),
    torch.bfloat16,
    torch.complex64,
    torch.device("cuda", 1),
    torch.strided,
    torch.channels_last,
    View("b", torch.int64, (2, 3), (3, 1), 4),
    (1, (2.0, [View("b", torch.bool, (), ())], None), ()),
    [float("inf"), -math.inf],
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_arguments(value: object) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    again = decode(json.loads(text))
    assert again == value
    assert type(again) is type(value)


def test_nan() -> None:
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan), allow_nan=False))))


@pytest.mark.parametrize("value", [torch.ones(2), object(), {"a": 1}, len])
def test_refuses_what_is_no_data(value: object) -> None:
    with pytest.raises(RuntimeFailure, match="TR-405"):
        encode((1, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)])
def test_constants(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.randn(shape) * 3).to(dtype)
    turned = values.t() if len(shape) == 2 else values
    art = Artifact("cpu", (), {}, (), (), (), (), 0, 0, {"c": turned})
    again = artifact_from_bytes(artifact_to_bytes(art)).constants["c"]
    assert again.dtype is dtype
    assert torch.equal(again, turned)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\x80\x04.", b'{"format": 99}'])
def test_refuses_what_is_no_artifact(damage: bytes) -> None:
    with pytest.raises(RuntimeFailure, match="TR-405"):
        artifact_from_bytes(damage)
