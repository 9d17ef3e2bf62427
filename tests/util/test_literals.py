"""Literals and numbers of tensors come back from their texts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.util.errors import ParseError
from treadle.util.generators import GeneratorRef
from treadle.util.literals import LiteralReader, literal_text, numbers_text
from treadle.util.scanner import Scanner


def read(text):
    scanner = Scanner(text, "")
    found = LiteralReader(scanner, {"f32": torch.float32}).literal()
    assert scanner.at_end_of_line(), text
    return found


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
    st.complex_numbers(allow_nan=False), st.integers(0, 9).map(GeneratorRef),
    st.sampled_from([torch.bfloat16, torch.strided, torch.channels_last, torch.device("cuda:1")]),
)  # fmt: skip


@given(plain)
@settings(max_examples=300, deadline=None)
def test_any_literal(value):
    found = read(literal_text(value))
    assert type(found) is type(value)
    if isinstance(value, float):
        assert math.isnan(value) == math.isnan(found)
        assert math.isnan(value) or math.copysign(1, value) == math.copysign(1, found)
    assert found == value or value != value


def test_short_words():
    assert read("f32") is torch.float32


@pytest.mark.parametrize("text", ["<AnyType 3>", "fry(1)", "float('big')", "device('moon')", "x"])
def test_what_is_no_literal(text):
    with pytest.raises(ParseError):
        read(text)


@pytest.mark.parametrize("count", [0, 1, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_numbers_of_tensors(count, dtype):
    value = torch.arange(count).sub(7).to(dtype)
    scanner = Scanner(numbers_text(value), "")
    found = LiteralReader(scanner, {}).numbers(torch.empty(count, dtype=dtype))
    assert torch.equal(found, value)


def test_numbers_that_are_special_keep_their_bits():
    value = torch.tensor([math.nan, -0.0, math.inf, 1e-45])
    found = LiteralReader(Scanner(numbers_text(value), ""), {}).numbers(torch.empty(4))
    assert torch.equal(found.view(torch.int32), value.view(torch.int32))


def test_a_very_large_tensor_has_no_text():
    assert numbers_text(torch.zeros(1 << 19)) == ""
