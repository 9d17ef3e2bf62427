"""The functions behind packed sequences."""

from collections.abc import Callable

from torch import nn

PACK: Callable[..., object] = nn.utils.rnn._VF._pack_padded_sequence
"""Rows of many sequences, one time step after the other."""
UNPACK: Callable[..., object] = nn.utils.rnn._VF._pad_packed_sequence
"""The inverse, with padding."""
