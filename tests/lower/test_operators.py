"""Every sample of the table: the interpreted program gives what eager gives, without fallbacks."""

import pytest
import torch

from lower.lowering_help import calls_of, fallbacks, run, trace
from lower.operator_samples import SAMPLES
from lower.operator_table import Sample
from treadle.loop.program import Program
from treadle.lower import lower

FALLBACKS = frozenset({"fft", "linalg solve"})
"""Samples with complex numbers in them."""
_IDS = [f"{sample.family}: {sample.name}" for sample in SAMPLES]


def _ran(sample: Sample, inputs: list[torch.Tensor]) -> tuple[Program, list[torch.Tensor]]:
    program = lower(trace(sample.program(), *inputs))
    torch.manual_seed(7)
    return program, run(program, [x.clone() for x in inputs])


@pytest.mark.parametrize("sample", SAMPLES, ids=_IDS)
def test_sample_equals_eager(sample: Sample) -> None:
    inputs = sample.make()
    torch.manual_seed(7)
    expected = sample.program()(*[x.clone() for x in inputs])
    program, found = _ran(sample, inputs)
    for mine, eager in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (eager.dtype, eager.shape)
        torch.testing.assert_close(mine, eager, rtol=sample.rtol, atol=sample.atol, equal_nan=True)
    if sample.name not in FALLBACKS:
        assert not fallbacks(program)
    assert all(call.op for call in calls_of(program))
