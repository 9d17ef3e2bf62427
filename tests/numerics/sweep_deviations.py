"""Where a compiled step may differ from eager, and why. Everything else must be eager's."""

import re
from collections.abc import Iterable, Mapping

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
        r"aten\._softmax_backward_data": "zero number",
        r"aten\.logaddexp2\.default of torch\.float16": "zero",
        r"sinc of torch\.float64": "number",
    },
    "eager rounds to float16 on the way, ours once": {
        r"aten\.(mse_loss|sigmoid)_backward.* of torch\.float16": "inf nan",
        r"(mse|soft margin) of torch\.float16": "inf nan",
    },
    "a product and a sum, rounded once": {
        r"poisson( .*)? of": "nan",
        r"selu - inf of torch\.float32": "nan",
    },
    "eager's log1p of the least numbers is zero": {r"log1p .* of torch\.float32": "nan zero"},
    "eager's result is infinite where the exponential is, though half of it is a number": {
        r"(sinh|cosh)( .*)? of torch\.(float32|bfloat16)": "inf nan",
        r"aten\.(sinh|cosh)\.default .* of torch\.(float32|bfloat16)": "inf nan",
    },
    "PyTorch's sixth is one of float32": {r"hardsigmoid of torch\.float64": "number"},
    "of whole numbers, which no gradient is": {
        r"aten\.native_dropout_backward.* of torch\.float32": "zero",
        r"aten\.smooth_l1_loss_backward.* of torch\.uint8": "number",
    },
}
"""Each reason with what the texts of deviations match, and of which kinds they may be."""

ON_CUDA: dict[str, dict[str, str]] = {
    "a sum of three terms is added up as a tree, eager's in the order of the terms": {
        r".* sum of": "nan",
    },
    "a function is off by one in its last place, which a sum of nearly opposite terms shows": {
        r"(erf|sinc|mish) sum of torch\.float32": "nan number",
    },
    "eager's kernel rounds each operation to the half precision, ours the result": {
        r"aten\.tanh_backward.* of torch\.float16": "inf nan",
        r"aten\.smooth_l1_loss_backward.* of torch\.float16": "inf",
        r"x\*\*-1 of torch\.float16": "nan",
        r"tanh of torch\.bfloat16": "number",
        r"aten\._softmax_backward_data\.default 0 of torch\.float16": "zero",
    },
    "eager runs Welford's algorithm, where an infinity becomes NaN": {
        r"aten\._fused_rms_norm\.default": "nan",
    },
    "a difference of nearly equal numbers, which is rounded in another place": {
        r"aten\._fused_rms_norm_backward": "number",
        r"aten\.native_(layer|group)_norm\.default .* of torch\.float64": "number",
    },
    "eager's norm of float64 is one of float32, and the least numbers vanish in its factors": {
        r"aten\._weight_norm_interface_backward": "nan number zero",
    },
    "PyTorch multiplies by a sixth, which is one of float32, where ours divides by six": {
        r"aten\.hard(sigmoid|swish)\.default of torch\.float64": "number",
        r"hardswish of torch\.float64": "number",
        r"hardswish (\* g|y / g) of torch\.float32": "nan",
    },
    "a whole number modulo zero is nothing that the GPU defines": {
        r"aten\.remainder\.Scalar_Tensor of torch\.int64": "number",
    },
}
"""The same, for eager's kernels on NVIDIA GPUs alone."""


def unexplained(found: Iterable[Deviation], device: str = "cpu") -> list[str]:
    """The texts of those that no reason is known for on ``device``."""
    reasons = [*REASONS.values(), *(ON_CUDA.values() if device == "cuda" else ())]
    return [str(each) for each in found if not _is_known(each, reasons)]


def _is_known(found: Deviation, reasons: Iterable[Mapping[str, str]]) -> bool:
    return any(
        re.match(text, str(found)) and found.kinds <= set(kinds.split())
        for texts in reasons
        for text, kinds in texts.items()
    )
