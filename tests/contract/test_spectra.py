"""Short-time Fourier transforms and their inverse, which looks at the sums of its windows."""

import pytest
import torch
from torch import nn

import treadle


def enhancing(window, **how):
    torch.manual_seed(0)
    model = nn.Conv1d(9, 9, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        y = torch.istft(spectrum * model(spectrum.abs()), 16, 4, window=window, **how)
        loss = (y - x[..., : y.shape[-1]]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), y

    return treadle.compile(step, model=model, optimizer=optimizer), step, model


@pytest.mark.parametrize("how", [{}, {"length": 60}, {"normalized": True}])
@pytest.mark.parametrize("window", [None, torch.hann_window(16)])
def test_the_inverse_is_part_of_a_step(window, how):
    compiled, _, model = enhancing(window, **how)
    _, eager, twin = enhancing(window, **how)
    for _ in range(3):
        x = torch.randn(2, 64)
        torch.testing.assert_close(compiled(x), eager(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), atol=1e-5, rtol=1e-4)
    assert not compiled.recompiles


def test_sizes_that_change():
    compiled, _, _ = enhancing(torch.hann_window(16))
    _, eager, _ = enhancing(torch.hann_window(16))
    for length in (64, 96, 80, 64):
        x = torch.randn(2, length)
        torch.testing.assert_close(compiled(x), eager(x), atol=1e-5, rtol=1e-4)


def test_windows_that_add_up_to_nothing_are_eagers_error():
    window = torch.hann_window(16)
    compiled, eager, model = enhancing(window)
    compiled(torch.randn(2, 64))
    before = [p.clone() for p in model.parameters()]
    window.zero_()
    with pytest.raises(RuntimeError) as expected:
        eager(torch.randn(2, 64))
    with pytest.raises(RuntimeError) as found:
        compiled(torch.randn(2, 64))
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    assert all(map(torch.equal, model.parameters(), before))
    window.copy_(torch.hann_window(16))
    assert compiled(torch.randn(2, 64))[0].isfinite()
