"""What PyTorch warns of when a Python float is made of a tensor that requires grad.

::

    total += float(loss)      "Converting a tensor with requires_grad=True to a scalar ..."

During capture a substitute is made in place of the float, so PyTorch does not see the call. It is
made to see one of a tensor that is like it, and what it says is said at the user's line: the words
and the rule of PyTorch's version, which says it once in a process.
"""

import torch
from torch import Tensor

from treadle.capture.explain_errors import users_frames
from treadle.compat.tracing import outside_modes
from treadle.util.warn import warn_again_at


def warn_of_float(value: object) -> None:
    """``float(value)`` is asked for, or a function that takes floats is given ``value``."""
    if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
        return
    frame = next(users_frames())
    with outside_modes():
        warn_again_at(frame.f_code.co_filename, frame.f_lineno, _float_of_trained)


def _float_of_trained() -> float:
    return float(torch.ones((), requires_grad=True))
