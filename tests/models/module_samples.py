"""Modules of torch.nn with inputs, by construction: PyTorch's own samples, and more of ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import module_db


@dataclass(frozen=True)
class Sample:
    """``make()`` gives the module, ``inputs()`` the arguments of its forward."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def _given(*args: Any, **kwargs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: (args, kwargs)


def from_pytorch() -> Iterator[Sample]:
    """The samples that PyTorch tests its modules with, in float32 and training mode."""
    for info in module_db:
        torch.manual_seed(0)
        found = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        for at, each in enumerate(found):
            if each.forward_input is None:
                continue
            made, forward = each.constructor_input, each.forward_input
            words = f"{info.name.removeprefix('nn.')} {at} {each.desc}".strip()
            yield Sample(
                words,
                lambda kind=info.module_cls, made=made: kind(*made.args, **made.kwargs),
                _given(*forward.args, **forward.kwargs),
            )


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _indices(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


class Unpooled(nn.Module):
    """Pooled with indices, and back."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        pools = nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d
        backs = nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d
        self.pool, self.back = pools[dims - 1](2, return_indices=True), backs[dims - 1](2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(*self.pool(x * 2.0))


class Chosen(nn.Module):
    """Tokens, those of a mask only, and an adaptive softmax over many words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 40, cutoffs=[10, 20])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids), labels).loss


def of_ours() -> Iterator[Sample]:
    """Modules and settings that PyTorch's samples leave out."""
    for kind in (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout):
        yield Sample(kind.__name__, lambda kind=kind: kind(0.4), _given(_x(4, 3, 5)))
    for kind, shape in (
        (nn.Dropout1d, (4, 3, 5)),
        (nn.Dropout2d, (2, 3, 4, 5)),
        (nn.Dropout3d, (2, 3, 4, 2, 2)),
    ):
        yield Sample(kind.__name__, lambda kind=kind: kind(0.4), _given(_x(*shape)))
    yield Sample("RReLU", nn.RReLU, _given(_x(4, 5)))
    yield Sample("ChannelShuffle", lambda: nn.ChannelShuffle(2), _given(_x(2, 4, 3, 3)))
    yield Sample("CosineSimilarity", nn.CosineSimilarity, _given(_x(4, 5), _x(1, 5)))
    yield Sample("PairwiseDistance", nn.PairwiseDistance, _given(_x(4, 5), _x(1, 5)))
    yield Sample("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(2), _given(_x(2, 4, 3, 3)))
    for mode in ("sum", "mean", "max"):
        yield Sample(
            f"EmbeddingBag {mode}",
            lambda mode=mode: nn.EmbeddingBag(11, 4, mode=mode),
            _given(_indices(11, 7), torch.tensor([0, 2, 2, 5])),
        )
        yield Sample(
            f"EmbeddingBag {mode}, rows",
            lambda mode=mode: nn.EmbeddingBag(11, 4, mode=mode, padding_idx=3),
            _given(_indices(11, 3, 5)),
        )
    yield Sample(
        "EmbeddingBag weighted",
        lambda: nn.EmbeddingBag(11, 4, mode="sum", include_last_offset=True),
        _given(_indices(11, 7), torch.tensor([0, 2, 7]), _x(7)),
    )
    yield Sample(
        "EmbeddingBag max_norm",
        lambda: nn.EmbeddingBag(11, 4, max_norm=0.5),
        _given(_indices(11, 3, 5)),
    )
    yield Sample(
        "Embedding max_norm", lambda: nn.Embedding(11, 4, max_norm=0.5), _given(_indices(11, 3, 5))
    )
    yield Sample(
        "Embedding by frequency",
        lambda: nn.Embedding(11, 4, scale_grad_by_freq=True, padding_idx=2),
        _given(_indices(11, 3, 5)),
    )
    yield Sample("Flatten", nn.Flatten, _given(_x(2, 3, 4)))
    yield Sample("Unflatten", lambda: nn.Unflatten(1, (2, 3)), _given(_x(2, 6, 4)))
    yield Sample("Unfold", lambda: nn.Unfold((2, 3), padding=1, stride=2), _given(_x(2, 3, 6, 7)))
    yield Sample(
        "Fold", lambda: nn.Fold((6, 7), (2, 3), padding=1, stride=2), _given(_x(2, 18, 16))
    )
    yield Sample("Hardsigmoid", nn.Hardsigmoid, _given(_x(4, 5)))
    yield Sample("Identity", nn.Identity, _given(_x(4, 5)))
    for dims in (1, 2, 3):
        shape = (4, 3, 6, 4, 6)[: dims + 2]
        yield Sample(
            f"LazyBatchNorm{dims}d", getattr(nn, f"LazyBatchNorm{dims}d"), _given(_x(*shape))
        )
        yield Sample(
            f"LazyInstanceNorm{dims}d", getattr(nn, f"LazyInstanceNorm{dims}d"), _given(_x(*shape))
        )
        yield Sample(f"MaxUnpool{dims}d", lambda dims=dims: Unpooled(dims), _given(_x(*shape)))
    yield Sample("LazyLinear", lambda: nn.LazyLinear(3), _given(_x(2, 5)))
    yield Sample("PixelShuffle", lambda: nn.PixelShuffle(2), _given(_x(2, 8, 3, 3)))
    yield Sample("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), _given(_x(2, 3, 4, 4)))
    yield Sample(
        "TripletMarginLoss", nn.TripletMarginLoss, _given(_x(4, 5), _x(4, 5) + 1, _x(1, 5))
    )
    yield Sample(
        "TripletMarginWithDistanceLoss",
        lambda: nn.TripletMarginWithDistanceLoss(swap=True),
        _given(_x(4, 5), _x(4, 5) + 1, _x(4, 5) * 2),
    )
    for mode in ("nearest", "bilinear", "bicubic", "nearest-exact"):
        yield Sample(
            f"Upsample {mode}",
            lambda mode=mode: nn.Upsample(scale_factor=1.5, mode=mode),
            _given(_x(2, 3, 5, 4)),
        )
    yield Sample(
        "UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d((7, 9)), _given(_x(2, 3, 5, 4))
    )
    yield Sample(
        "UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d((7, 9)), _given(_x(2, 3, 5, 4))
    )
    yield Sample("AdaptiveLogSoftmaxWithLoss", Chosen, _given(_indices(40, 9), _indices(40, 9)))
    yield Sample(
        "weight_norm",
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
        _given(_x(3, 4)),
    )
    yield Sample(
        "spectral_norm",
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
        _given(_x(3, 4)),
    )
    yield Sample(
        "orthogonal",
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        _given(_x(3, 4)),
    )
    yield Sample(
        "spectral_norm of a convolution",
        lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
        _given(_x(2, 3, 5, 5)),
    )
    yield from _attention()
    yield from _losses()


def _attention() -> Iterator[Sample]:
    """Every form of mask, with and without weights, and the stacks that make masks themselves."""
    bools = (
        torch.zeros(5, 5, dtype=torch.bool)
        .fill_diagonal_(0)
        .logical_or(torch.ones(5, 5).triu(1) > 0)
    )
    floats = torch.zeros(5, 5).masked_fill(bools, -1e4)
    pads = torch.zeros(2, 5, dtype=torch.bool)
    pads[1, 3:] = True
    masks: dict[str, dict[str, Any]] = {
        "no mask": {},
        "bool mask": {"attn_mask": bools},
        "float mask": {"attn_mask": floats},
        "mask per head": {"attn_mask": floats.expand(4, 5, 5).contiguous()},
        "padding": {"key_padding_mask": pads},
        "padding and mask": {"key_padding_mask": pads, "attn_mask": bools},
        "causal": {"attn_mask": bools, "is_causal": True},
    }
    for name, given in masks.items():
        for needs in (True, False):
            for first in (True, False):
                x = _x(2, 5, 8) if first else _x(5, 2, 8)
                yield Sample(
                    f"MultiheadAttention {name} {needs} {first}",
                    lambda first=first: nn.MultiheadAttention(8, 2, batch_first=first),
                    _given(x, x, x, need_weights=needs, **given),
                )
    x = _x(2, 5, 8)
    for name, settings in {
        "zeros": {"add_zero_attn": True},
        "bias_k": {"add_bias_kv": True},
        "other sizes": {"kdim": 6, "vdim": 4},
        "without biases": {"bias": False},
    }.items():
        kv = (_x(2, 5, 6), _x(2, 5, 4)) if "kdim" in settings else (x, x)
        yield Sample(
            f"MultiheadAttention {name}",
            lambda settings=settings: nn.MultiheadAttention(8, 2, batch_first=True, **settings),
            _given(x, *kv, key_padding_mask=pads),
        )
    for first in (True, False):
        for norm in (True, False):
            settings = {"dropout": 0.0, "batch_first": first, "norm_first": norm}
            layer = lambda settings=settings: nn.TransformerEncoderLayer(8, 2, 12, **settings)  # noqa: E731
            back = lambda settings=settings: nn.TransformerDecoderLayer(8, 2, 12, **settings)  # noqa: E731
            x = _x(2, 5, 8) if first else _x(5, 2, 8)
            words = f"{first} {norm}"
            yield Sample(
                f"TransformerEncoder causal {words}",
                lambda layer=layer: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
                _given(x, mask=nn.Transformer.generate_square_subsequent_mask(5)),
            )
            yield Sample(
                f"TransformerEncoder padding {words}",
                lambda layer=layer: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
                _given(x, src_key_padding_mask=pads),
            )
            yield Sample(
                f"TransformerDecoder {words}",
                lambda back=back: nn.TransformerDecoder(back(), 2),
                _given(
                    x,
                    x * 2,
                    tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
                    memory_key_padding_mask=pads,
                ),
            )
            yield Sample(
                f"Transformer {words}",
                lambda settings=settings: nn.Transformer(8, 2, 1, 1, 12, **settings),
                _given(
                    x,
                    x * 2,
                    tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
                    src_key_padding_mask=pads,
                    tgt_is_causal=True,
                ),
            )
    yield Sample("own causal mask", OwnMask, _given(_x(2, 5, 8)))


class OwnMask(nn.Module):
    """The mask is made in forward, from sizes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


def _losses() -> Iterator[Sample]:
    logs = _x(6, 3, 5).log_softmax(-1)
    targets = 1 + _indices(4, 3, 4)
    for reduction in ("mean", "sum", "none"):
        loss = lambda reduction=reduction: nn.CTCLoss(reduction=reduction, zero_infinity=True)  # noqa: E731
        yield Sample(
            f"CTCLoss {reduction}, tuples", loss, _given(logs, targets, (6, 6, 5), (4, 2, 3))
        )
        lengths = torch.tensor([6, 6, 5]), torch.tensor([4, 2, 3])
        yield Sample(f"CTCLoss {reduction}, tensors", loss, _given(logs, targets, *lengths))
    yield Sample(
        "CrossEntropyLoss of chances",
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        _given(_x(4, 5), _x(4, 5).softmax(-1)),
    )
    yield Sample(
        "CrossEntropyLoss weighted",
        lambda: nn.CrossEntropyLoss(
            weight=torch.arange(1.0, 6), ignore_index=2, label_smoothing=0.1
        ),
        _given(_x(4, 5, 3), _indices(5, 4, 3)),
    )


def samples() -> list[Sample]:
    return [*from_pytorch(), *of_ours()]
