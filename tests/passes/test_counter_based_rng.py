import pytest
import torch

from testing import show_plain, trace
from treadle.graph.analysis.execute import run_step
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.counter_based_rng import UseCounterBasedRng
from treadle.passes.dropout import ExpandDropout

aten = torch.ops.aten
MASK = (1 << 64) - 1


def squares(counter: int, key: int) -> int:
    """The paper's function, on whole numbers of Python."""
    x = y = counter * key & MASK
    z = (y + key) & MASK
    for number, term in enumerate((y, z, y, z)):
        x = (x * x + term) & MASK
        x = x >> 32 if number == 3 else (x >> 32 | x << 32) & MASK
    return x


def test_the_numbers_are_those_of_the_paper():
    """The same key, element by element; every other result is unlikely beyond doubt."""
    step = trace(lambda x: aten.bernoulli.p(x, 0.3), torch.empty(5, 41))
    assert run_passes(step, [UseCounterBasedRng()])[0].matches == 1
    torch.manual_seed(7)
    (found,) = run_step(step, [torch.empty(5, 41)])
    torch.manual_seed(7)
    key = int(torch.randint(1, 1 << 62, (1,))) | 1
    limit = round(0.3 * 2**32)
    expected = [float(squares(at, key) < limit) for at in range(5 * 41)]
    assert found.flatten().tolist() == expected


def test_one_draw_of_keys_serves_all():
    def program(x, y):
        a = aten.bernoulli.p(x, 0.5)
        b = aten.bernoulli.p(y, 0.25)
        return a * x, b.sum()

    step = trace(program, torch.randn(3), torch.randn(2, 2))
    run_passes(step, [UseCounterBasedRng()])
    text = show_plain(step)
    assert text.count("randint.low(1, 4611686018427387904, [2], dtype=i64") == 1
    assert "counted_mask(bitwise_or, 0, [3], 0.5, f32)" in text
    assert "counted_mask(bitwise_or, 1, [2, 2], 0.25, f32)" in text
    assert "bernoulli" not in text
    assert UseCounterBasedRng().run(step) == 0


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_what_is_no_draw_is_left_alone(p):
    step = trace(lambda x: aten.bernoulli.p(x, p), torch.empty(4))
    assert UseCounterBasedRng().run(step) == 0


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 0, 3), ()])
def test_awkward_shapes(shape):
    step = trace(lambda x: aten.bernoulli.p(x, 0.5), torch.empty(shape))
    run_passes(step, [UseCounterBasedRng()])
    (found,) = run_step(step, [torch.empty(shape)])
    assert found.shape == torch.Size(shape)
    assert ((found == 0) | (found == 1)).all()


def test_the_numbers_look_random():
    """Means, neighbours, rows and keys: each within five standard deviations."""
    step = trace(lambda x, y: (aten.bernoulli.p(x, 0.5), aten.bernoulli.p(y, 0.5)), *_two())
    run_passes(step, [ExpandDropout(everywhere=True), UseCounterBasedRng()])
    bound = 5 * 0.5 / (1000 * 1000) ** 0.5
    for seed in range(4):
        torch.manual_seed(seed)
        a, b = run_step(step, _two())
        assert abs(a.mean() - 0.5) < bound
        assert abs((a == b).float().mean() - 0.5) < bound
        for distance in (1, 2, 31, 1000, 1024, 65536):
            flat = a.flatten()
            same = (flat[distance:] == flat[:-distance]).float().mean()
            assert abs(same - 0.5) < 1.1 * bound, distance
        assert (a.mean(0) - 0.5).abs().max() < 5.5 * 0.5 / 1000**0.5
        assert (a.mean(1) - 0.5).abs().max() < 5.5 * 0.5 / 1000**0.5


def _two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(1000, 1000), torch.empty(1000, 1000)
