"""The functions behind packed sequences."""

from collections.abc import Callable
from typing import Any

from torch import nn

PACK: Callable[..., Any] = nn.utils.rnn._VF._pack_padded_sequence
"""Rows of many sequences, one time step after the other."""
UNPACK: Callable[..., Any] = nn.utils.rnn._VF._pad_packed_sequence
"""The inverse, with padding."""
