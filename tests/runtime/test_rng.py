"""Our draws are PyTorch's: bit for bit, at every size, and the stream goes on after them."""

import pytest
import torch

import treadle
from treadle.codegen.cpp.rng import DRAWS
from treadle.passes.memory import masks
from treadle.runtime.kernels import rng
from treadle.runtime.kernels.build import build
from treadle.runtime.store.artifact import CallStep
from treadle.runtime.store.cache import Cache


@pytest.fixture(scope="module")
def bernoulli(tmp_path_factory):
    machine = build(Cache(tmp_path_factory.mktemp("cache")), device="cpu")
    return rng.drawer(machine.load((DRAWS,)).native[rng.FUNCTION])


def compare(bernoulli, n, p, dtype=torch.float32):
    """Draw ``n`` both ways from the present state; afterwards both streams are in one place."""
    start = torch.get_rng_state()
    wanted = torch.bernoulli(torch.empty(n, dtype=dtype), p)
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    found = torch.full((n,), 7, dtype=dtype)
    bernoulli(found, p, out=found)
    assert torch.equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), after)


def test_this_version_of_pytorch_draws_as_expected():
    assert rng.is_known()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0, 1e-9, 1 - 1e-12])
@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 311, 312, 313, 624, 625, 50257])
def test_every_size_and_probability(bernoulli, n, p):
    torch.manual_seed(n + 1)
    compare(bernoulli, n, p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.bool])
def test_every_dtype(bernoulli, dtype):
    torch.manual_seed(3)
    start = torch.get_rng_state()
    wanted = torch.empty(1000, dtype=dtype).bernoulli_(0.3)
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    found = torch.empty(1000, dtype=dtype)
    bernoulli(found, 0.3, out=found)
    assert torch.equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), after)


def test_from_the_middle_of_a_block_and_from_an_odd_word(bernoulli):
    torch.manual_seed(11)
    for skipped, n in [(5, 100), (1, 700), (623, 3), (1, 1), (2, 624), (619, 1)]:
        torch.rand(skipped)  # one word each: the next number may span two blocks
        compare(bernoulli, n, 0.7)


def test_a_seed_of_64_bits_and_the_generators_normal_numbers_survive(bernoulli):
    torch.manual_seed(2**63 + 5)
    torch.randn(1)  # leaves a normal number for the next call
    start = torch.get_rng_state()
    wanted = torch.bernoulli(torch.empty(77), 0.4), torch.randn(1), torch.rand(3)
    torch.set_rng_state(start)
    found = torch.empty(77)
    bernoulli(found, 0.4, out=found)
    assert torch.equal(found, wanted[0])
    assert torch.equal(torch.randn(1), wanted[1])
    assert torch.equal(torch.rand(3), wanted[2])
    assert torch.initial_seed() == 2**63 + 5


def test_a_probability_that_is_none_is_refused(bernoulli):
    out = torch.empty(3)
    with pytest.raises(treadle.RuntimeFailure, match=r"probability of 1\.5"):
        bernoulli(out, 1.5, out=out)


def dropout_step(model, optimizer):
    def step(x):
        loss = torch.nn.functional.dropout(model(x), 0.3).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compiled_step():
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 31)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    function = dropout_step(model, optimizer)
    return treadle.compile(function, model=model, optimizer=optimizer), function


def test_a_step_uses_them_and_leaves_the_generator_where_eager_does():
    x = torch.randn(5, 7)
    step, eager = compiled_step()
    torch.manual_seed(1)
    ours, state = step(x), torch.get_rng_state()
    assert rng.OPERATOR in {
        each.out for each in step.compiled.artifact.steps if hasattr(each, "out")
    }
    step, eager = compiled_step()
    torch.manual_seed(1)
    torch.testing.assert_close(eager(x), ours)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mask_is_drawn_as_bytes_and_what_it_looks_like_takes_none():
    step, _ = compiled_step()
    artifact = step.prepare(torch.randn(5, 7)).artifact
    (draw,) = [
        each for each in artifact.steps if isinstance(each, CallStep) and each.out == rng.OPERATOR
    ]
    assert artifact.buffers[draw.outputs[0]].dtype is torch.bool
    assert draw.args[0].strides == (0, 0)
    assert artifact.buffers[draw.args[0].buffer].shape == ()


def test_masks_stay_floats_where_bools_are_drawn_differently(monkeypatch, tmp_path):
    monkeypatch.setattr(masks, "_draws_alike", lambda dtype: False)
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    x = torch.randn(5, 7)
    step, _ = compiled_step()
    torch.manual_seed(1)
    ours, state = step(x), torch.get_rng_state()
    artifact = step.compiled.artifact
    (draw,) = [
        each for each in artifact.steps if isinstance(each, CallStep) and "bernoulli" in each.op
    ]
    assert artifact.buffers[draw.outputs[0]].dtype is torch.float32
    _, eager = compiled_step()
    torch.manual_seed(1)
    torch.testing.assert_close(eager(x), ours)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_pytorch_draws_by_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(rng, "is_known", lambda: False)
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    step, _ = compiled_step()
    x = torch.randn(5, 7)
    step(x)
    calls = [each for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert [each.out for each in calls if "bernoulli" in each.op] == [""]
