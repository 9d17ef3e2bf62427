"""The class that PyTorch's batch norms share."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm_forward() -> tuple[type[_BatchNorm], str, Callable[..., Tensor]]:
    """Where the forward of batch norms is: its class, its name, and what is there."""
    return _BatchNorm, "forward", vars(_BatchNorm)["forward"]


def check_dims(module: _BatchNorm, given: Tensor) -> None:
    """What the module itself checks of an input first."""
    module._check_input_dim(given)
