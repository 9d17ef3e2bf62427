"""What PyTorch warns of when a Python float is made of a tensor that requires grad.

::

    total += float(loss)      "Converting a tensor with requires_grad=True to a scalar ..."

During capture a substitute is made in place of the float, so PyTorch does not see the call. It is
made to see one of a tensor that is like it, and what it says is said at the user's line: the words
and the rule of PyTorch's version, which says it once in a process.
"""

import warnings

import torch
from torch import Tensor

from treadle.capture.explain_errors import users_frames
from treadle.compat.tracing import outside_modes


def warn_of_float(value: object) -> None:
    """``float(value)`` is asked for, or a function that takes floats is given ``value``."""
    if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
        return
    with outside_modes(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        float(torch.ones((), requires_grad=True))
    frame = next(users_frames())
    for each in heard:
        place = frame.f_code.co_filename, frame.f_lineno
        warnings.warn_explicit(each.message, each.category, *place)
