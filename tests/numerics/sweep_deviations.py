"""Where a compiled step may differ from eager, and why. Everything else must be eager's."""

import re
from collections.abc import Iterable

from numerics.sweep_values import Deviation

REASONS: dict[str, dict[str, str]] = {
    "of 0.0 and -0.0 any may be the least: eager's kernels differ among themselves": {
        r"aten\.(amin|amax|min|max|fmin|fmax)\.": "zero",
    },
    "the order of factors or terms decides what is infinite on the way": {
        r"aten\.prod\.": "nan inf zero",
        r"aten\._log_softmax_backward_data": "number",
    },
    "the mean of infinities is NaN where eager runs Welford's algorithm": {
        r"aten\.(var|std)_mean\.": "nan number",
    },
    "a difference of nearly equal numbers, which is rounded in another place": {
        r"aten\._native_batch_norm_legit": "zero number",
        r"aten\.native_layer_norm_backward": "zero number",
        r"aten\._weight_norm_interface_backward": "zero number",
        r"sinc of torch\.float64": "number",
    },
    "eager rounds to float16 on the way, ours once": {
        r"aten\.(mse_loss|sigmoid)_backward.* of torch\.float16": "inf nan",
        r"(mse|soft margin) of torch\.float16": "inf nan",
    },
    "a product and a sum of one loss, rounded once": {r"poisson( .*)? of": "nan"},
    "eager's log1p of the least numbers is zero": {r"log1p .* of torch\.float32": "nan zero"},
    "PyTorch's sixth is one of float32": {r"hardsigmoid of torch\.float64": "number"},
    "of whole numbers, which no gradient is": {
        r"aten\.native_dropout_backward.* of torch\.float32": "zero",
        r"aten\.smooth_l1_loss_backward.* of torch\.uint8": "number",
    },
}
"""Each reason with what the texts of deviations match, and of which kinds they may be."""


def unexplained(found: Iterable[Deviation]) -> list[str]:
    """The texts of those that no reason is known for."""
    return [str(each) for each in found if not _is_known(each)]


def _is_known(found: Deviation) -> bool:
    return any(
        re.match(text, str(found)) and found.kinds <= set(kinds.split())
        for texts in REASONS.values()
        for text, kinds in texts.items()
    )
