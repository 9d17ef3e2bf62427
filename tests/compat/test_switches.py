"""How PyTorch is set to compute: put back after a step that leaves it otherwise, and left alone
after one that does not."""

import pytest
import torch

import treadle
from treadle.compat.switches import switches, switches_kept

SETTINGS = {
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "gradients": lambda: torch.set_grad_enabled(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "warns only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "anomaly without a check": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "cudnn": lambda: torch._C._set_cudnn_benchmark(True),
}


def everything():
    return (
        switches(),
        torch.is_grad_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    )


@pytest.fixture(autouse=True)
def as_before():
    before = everything()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_float32_matmul_precision("highest")
    torch._C._set_cudnn_benchmark(False)
    assert everything() == before


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_set_inside_is_put_back(setting, fails):
    before = everything()

    def inside():
        with switches_kept(LookupError):
            setting()
            assert everything() != before
            if fails:
                raise ArithmeticError

    with pytest.raises(ArithmeticError if fails else LookupError):
        inside()
    assert everything() == before


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
def test_what_is_set_before_stays(setting):
    setting()
    before = everything()
    with switches_kept(LookupError):
        pass
    assert everything() == before


def test_a_capture_leaves_warnings_in_the_place_of_errors():
    model = torch.nn.Linear(3, 2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    treadle.compile(lambda x: model(x).sum(), model=model)(torch.ones(4, 3))
    assert torch.is_deterministic_algorithms_warn_only_enabled()
