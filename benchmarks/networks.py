"""Networks that ``backend.py`` measures: each with its batch and its loss.

``small`` makes few and small layers, for CPUs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Batch], Tensor]
Network = tuple[nn.Module, Callable[[], Batch], Loss]


def language_model(model: nn.Module, shape: tuple[int, int]) -> Network:
    """A model of ``transformers`` with tokens of ``shape``."""
    vocabulary = model.config.vocab_size
    return (
        model,
        lambda: (torch.randint(vocabulary, shape),),
        lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
    )


def _gpt2(small: bool) -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_head": 4, "vocab_size": 257, "n_layer": 2} if small else {}
    rates = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **rates, **sizes))
    return language_model(model, (2, 32) if small else (16, 1024))


def _bert(small: bool) -> Network:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 257} if small else {}
    depth = {"num_hidden_layers": 2, "intermediate_size": 128} if small else {}
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = BertForMaskedLM(BertConfig(**rates, **sizes, **depth))
    return language_model(model, (2, 32) if small else (32, 512))


def _images(model: nn.Module, small: bool) -> Network:
    shape = (2, 3, 64, 64) if small else (128, 3, 224, 224)
    return (
        model,
        lambda: (torch.randn(shape), torch.randint(1000, shape[:1])),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def _resnet50(small: bool) -> Network:
    import torchvision

    return _images(torchvision.models.resnet18() if small else torchvision.models.resnet50(), small)


def _vit(small: bool) -> Network:
    from torchvision.models.vision_transformer import VisionTransformer

    if small:
        model = VisionTransformer(64, 16, 2, 4, 64, 128)
    else:
        model = VisionTransformer(224, 16, 12, 12, 768, 3072)
    return _images(model, small)


def _torchvision(name: str, small: bool) -> Network:
    import torchvision

    return _images(getattr(torchvision.models, name)(), small)


def _t5(small: bool) -> Network:
    """An encoder of 512 tokens and a decoder of 256."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_layers": 2} if small else {}
    vocabulary = 257 if small else 32128
    config = T5Config(vocab_size=vocabulary, use_cache=False, decoder_start_token_id=0, **sizes)
    rows, read, written = (2, 16, 8) if small else (16, 512, 256)
    return (
        T5ForConditionalGeneration(config),
        lambda: (
            torch.randint(vocabulary, (rows, read)),
            torch.randint(vocabulary, (rows, written)),
        ),
        lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss,
    )


def _mamba2(small: bool) -> Network:
    """A state space model, in the operations that ``transformers`` writes without its kernels."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    width, heads, layers = (64, 4, 2) if small else (768, 24, 12)
    vocabulary = 257 if small else 50280
    config = Mamba2Config(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_heads=heads,
        head_dim=2 * width // heads, state_size=16 if small else 64, n_groups=1,
        chunk_size=8 if small else 64, use_cache=False,
    )  # fmt: skip
    return language_model(Mamba2ForCausalLM(config), (2, 32) if small else (4, 1024))


def _experts(small: bool) -> Network:
    """Mixtral's layers: 8 experts, of which each token takes 2."""
    from transformers import MixtralConfig, MixtralForCausalLM

    width, inner, layers = (64, 128, 2) if small else (1024, 2048, 8)
    vocabulary = 257 if small else 32000
    heads = 4 if small else 16
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_local_experts=8,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return language_model(MixtralForCausalLM(config), (2, 32) if small else (8, 1024))


class _Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.body = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


def _lstm(small: bool) -> Network:
    words, width = (257, 32) if small else (10000, 512)
    return lstm(words, width, (2, 9) if small else (64, 129))


def lstm(words: int, width: int, shape: tuple[int, int]) -> Network:
    """Each word of rows of ``shape`` from the words before it."""
    return (
        _Recurrent(words, width),
        lambda: (torch.randint(words, shape),),
        lambda model, batch: F.cross_entropy(
            model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten()
        ),
    )


class _Block(nn.Module):
    """Two convolutions, to which the time step is added, beside a shortcut (Ho et al., 2020)."""

    def __init__(self, into: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1)
        )
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(
            nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.shortcut = nn.Identity() if into == out else nn.Conv2d(into, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.second(hidden) + self.shortcut(x)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), width // 64
        self.into, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).mT.unbind(1)
        return x + self.out(F.scaled_dot_product_attention(*parts).mT.reshape(x.shape))


class _UNet(nn.Module):
    """Predicts the noise of an image: two blocks a level, attention in the coarser half."""

    def __init__(self, width: int, factors: tuple[int, ...]) -> None:
        super().__init__()
        time, widths = 4 * width, [width * each for each in factors]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, last = [width], width
        for level, each in enumerate(widths):
            for _ in range(2):
                self.down.append(self._level(last, each, time, 2 * level >= len(widths)))
                last = each
                kept.append(last)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(last, last, 3, stride=2, padding=1))
                kept.append(last)
        self.middle = self._level(last, last, time, True)
        for level, each in reversed(list(enumerate(widths))):
            for _ in range(3):
                attends = 2 * level >= len(widths)
                self.up.append(self._level(last + kept.pop(), each, time, attends))
                last = each
            if level:
                self.up.append(nn.Conv2d(last, last, 3, padding=1))
        self.out = nn.Sequential(
            nn.GroupNorm(32, last), nn.SiLU(), nn.Conv2d(last, 3, 3, padding=1)
        )

    @staticmethod
    def _level(into: int, out: int, time: int, attends: bool) -> nn.ModuleList:
        return nn.ModuleList([_Block(into, out, time)] + [_Attention(out)] * attends)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        rates = torch.exp(
            torch.arange(self.width // 2, device=x.device) * (-math.log(10000) / (self.width // 2))
        )
        angles = at[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.stem(x)
        kept = [x]
        for each in self.down:
            x = self._through(each, x, time)
            kept.append(x)
        x = self._through(self.middle, x, time)
        for each in self.up:
            if isinstance(each, nn.Conv2d):
                x = each(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            else:
                x = self._through(each, torch.cat([x, kept.pop()], 1), time)
        return self.out(x)

    @staticmethod
    def _through(level: nn.Module, x: Tensor, time: Tensor) -> Tensor:
        if isinstance(level, nn.Conv2d):
            return level(x)
        for each in level:
            x = each(x, time) if isinstance(each, _Block) else each(x)
        return x


def _diffusion(small: bool) -> Network:
    if small:
        return noise_prediction(2, 32, (1, 2))
    return noise_prediction(128, 128, (1, 2, 2, 2))


def noise_prediction(rows: int, width: int, factors: tuple[int, ...]) -> Network:
    """Noise prediction on images of 32 x 32, with a cosine schedule."""

    def loss(model: Any, batch: Batch) -> Tensor:
        images, noise, at = batch
        angle = at[:, None, None, None] * (math.pi / 2000)
        noisy = torch.cos(angle) * images + torch.sin(angle) * noise
        return F.mse_loss(model(noisy, at), noise)

    return (
        _UNet(width, factors),
        lambda: (
            torch.randn(rows, 3, 32, 32),
            torch.randn(rows, 3, 32, 32),
            torch.randint(1000, (rows,)).float(),
        ),
        loss,
    )


NETWORKS: dict[str, Callable[[bool], Network]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "mamba2": _mamba2,
    "experts": _experts,
    "lstm": _lstm,
    "diffusion": _diffusion,
    "resnet50": _resnet50,
    "vit": _vit,
} | {
    name: partial(_torchvision, name)
    for name in ("convnext_tiny", "efficientnet_b0", "mobilenet_v2")
}
