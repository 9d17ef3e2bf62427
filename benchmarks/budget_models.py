"""Small models of many kinds, each with a training step, for ``budgets.py``.

Activations are a large part of each step's bytes, so that there is something to plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH, VOCABULARY = 64, 64, 211


@dataclass(frozen=True)
class Training:
    """``step``: the function of a batch; ``model`` and ``optimizer``: what it trains."""

    step: Callable[..., Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, ...]


def training(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    *batch: Tensor,
    cast: bool = False,
    clip: bool = False,
    sgd: bool = False,
) -> Training:
    """A step with AdamW, or with SGD and momentum."""
    parameters = list(model.parameters())
    if sgd:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def train_step(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = loss_of(model, *given)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(train_step, model, optimizer, batch)


def _classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _tokens(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


class Attention(nn.Module):
    """Heads of attention: of ``x`` to itself, or to ``context``."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, *, causal: bool = False):
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None, bias: Tensor | None = None):
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(x), k, v)
        )
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=p, is_causal=self.causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class WrittenOutAttention(nn.Module):
    """Attention with its scores and its dropout as operations of their own."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + 0.0).softmax(-1)
        return self.out((self.dropout(scores) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Norm, attention, norm, two layers; each with its residual."""

    def __init__(self, attention: nn.Module, width: int, dropout: float = 0.0):
        super().__init__()
        self.attention, self.dropout = attention, nn.Dropout(dropout)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x), *rest))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Language(nn.Module):
    """Embeddings of tokens and places, blocks, a head."""

    def __init__(self, blocks: list[nn.Module], width: int = WIDTH):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Gated(nn.Module):
    """A block of Llama: rotated attention, and a gated layer of SiLU; RMS norms."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10.0 ** -torch.arange(half))
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Experts(nn.Module):
    """Every expert sees every token, weighted by a softmax over the two best."""

    def __init__(self, width: int, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).topk(2, -1)
        gates = torch.zeros(len(flat), len(self.up)).scatter(1, chosen, weights.softmax(-1))
        hidden = F.silu(torch.einsum("nd,edh->enh", flat, self.up))
        return torch.einsum("enh,ehd,ne->nd", hidden, self.down, gates).view_as(x)


class MixtureBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention, self.experts = Attention(width, 4, causal=True), Experts(width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class Residual(nn.Module):
    """Two convolutions with norms over the batch."""

    def __init__(self, before: int, after: int, stride: int = 1):
        super().__init__()
        self.a = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.a_norm, self.b_norm = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b_norm(self.b(F.relu(self.a_norm(self.a(x)))))
        return F.relu(h + self.skip(x))


class UNet(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([self._block(w, w) for w in widths])
        self.wider = nn.ModuleList([nn.Conv2d(w, 2 * w, 2, 2) for w in widths[:2]])
        self.narrower = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:2]])
        self.up = nn.ModuleList([self._block(2 * w, w) for w in widths[:2]])
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        conv = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(conv, nn.GroupNorm(8, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.stem(x), list[Tensor]()
        for level in range(2):
            kept.append(self.down[level](h))
            h = self.wider[level](kept[-1])
        h = self.down[2](h)
        for level in (1, 0):
            h = self.up[level](torch.cat([kept[level], self.narrower[level](h)], 1))
        return self.head(h)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 48)
        self.lstm = nn.LSTM(48, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


class Scan(nn.Module):
    """A selective scan, written as a loop over time."""

    def __init__(self, width: int, states: int = 8):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.rates = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(width, 1))
        self.steps, self.both = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.into(self.norm(x)).chunk(2, -1)
        steps, (b, c) = F.softplus(self.steps(h)), self.both(h).chunk(2, -1)
        decay = (-steps.unsqueeze(-1) * self.rates.exp()).exp()
        drive = (steps * h).unsqueeze(-1) * b.unsqueeze(2)
        state, found = torch.zeros_like(drive[:, 0]), list[Tensor]()
        for time in range(x.shape[1]):
            state = decay[:, time] * state + drive[:, time]
            found.append((state * c[:, time].unsqueeze(1)).sum(-1))
        return x + self.out(torch.stack(found, 1) * F.silu(gate))


class Vision(nn.Module):
    def __init__(self, width: int = 48):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList([Block(Attention(width, 4), width) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h.mean(1)))


class Seq2Seq(nn.Module):
    """T5: an encoder and a decoder that reads it, with one bias of positions for all layers."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.tokens, self.bias = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * LENGTH, 4)
        self.encoder = nn.ModuleList([Block(Attention(width, 4), width, 0.1) for _ in range(2)])
        self.decoder = nn.ModuleList(
            [Block(Attention(width, 4, causal=True), width, 0.1) for _ in range(2)]
        )
        self.reads = nn.ModuleList([Block(Attention(width, 4), width, 0.1) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        bias = self.bias(places[:, None] - places + LENGTH).permute(2, 0, 1).unsqueeze(0)
        h = self.tokens(tokens)
        for block in self.encoder:
            h = block(h, None, bias)
        out = self.tokens(tokens)
        for own, reads in zip(self.decoder, self.reads, strict=True):
            out = reads(own(out), h)
        return out @ self.tokens.weight.t()


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
        self.decode = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        fit = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="sum")
        return (fit - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()) / len(x)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(500, 32, mode="max")
        self.layers = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.cat([self.bags(x + 10 * n) for n in range(3)], -1))


class Whitening(nn.Module):
    """Linear algebra inside of a model: an inverse root, an exponential and singular values."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.a, self.b = nn.Linear(64, width), nn.Linear(width, 10)
        self.turn = nn.Parameter(0.01 * torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        values, vectors = torch.linalg.eigh(h.t() @ h / len(h) + torch.eye(h.shape[1]))
        h = h @ (vectors * values.rsqrt()) @ vectors.t() @ torch.matrix_exp(self.turn)
        return self.b(h) + 1e-3 * torch.linalg.svdvals(self.a.weight).sum()


def mlp() -> Training:
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    return training(model, _classes, torch.randn(1024, 128), torch.randint(10, (1024,)), clip=True)


def gpt2() -> Training:
    blocks = [Block(Attention(WIDTH, 4, causal=True), WIDTH) for _ in range(4)]
    return training(Language(blocks), _next_tokens, _tokens(16), clip=True)


def gpt2_of_16_bits() -> Training:
    blocks = [Block(Attention(WIDTH, 4, causal=True), WIDTH) for _ in range(3)]
    return training(Language(blocks), _next_tokens, _tokens(16), cast=True, clip=True)


def llama() -> Training:
    blocks = [Gated(WIDTH, 4) for _ in range(4)]
    return training(Language(blocks), _next_tokens, _tokens(16), clip=True)


def bert() -> Training:
    blocks = [Block(WrittenOutAttention(WIDTH, 4, 0.1), WIDTH, 0.1) for _ in range(3)]
    return training(Language(blocks), _next_tokens, _tokens(8))


def mixture() -> Training:
    blocks = [MixtureBlock(WIDTH) for _ in range(2)]
    return training(Language(blocks), _next_tokens, _tokens(8))


def resnet() -> Training:
    widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Residual(*sizes) for sizes in widths]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    batch = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return training(model, _classes, *batch, sgd=True)


def unet() -> Training:
    def noise(model: nn.Module, x: Tensor) -> Tensor:
        drawn = torch.randn_like(x)
        return F.mse_loss(model(x + 0.3 * drawn), drawn)

    return training(UNet(), noise, torch.randn(8, 3, 32, 32))


def lstm() -> Training:
    return training(Tagger(), _next_tokens, _tokens(32, 24), clip=True)


def mamba() -> Training:
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 32), Scan(32), Scan(32), nn.Linear(32, VOCABULARY)
    )
    return training(model, _next_tokens, _tokens(16, 12))


def vit() -> Training:
    return training(Vision(), _classes, torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))


def t5() -> Training:
    return training(Seq2Seq(), _next_tokens, _tokens(8), clip=True)


def vae() -> Training:
    return training(Autoencoder(), lambda model, x: model(x), torch.rand(1024, 256))


def bags() -> Training:
    batch = torch.randint(400, (512, 12)), torch.randint(10, (512,))
    return training(Bags(), _classes, *batch)


def whitening() -> Training:
    return training(Whitening(), _classes, torch.randn(512, 64), torch.randint(10, (512,)))


def accumulated() -> Training:
    made = mlp()
    parameters = list(made.model.parameters())

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(made.model(part), wanted) / 4
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        made.optimizer.step()
        made.optimizer.zero_grad()
        return total

    return Training(train_step, made.model, made.optimizer, made.batch)


MODELS: Mapping[str, Callable[[], Training]] = {
    "mlp": mlp,
    "gpt2": gpt2,
    "resnet": resnet,
    "lstm": lstm,
    "vae": vae,
    "bags": bags,
    "whitening": whitening,
    "vit": vit,
    "llama": llama,
    "bert": bert,
    "gpt2 of 16 bits": gpt2_of_16_bits,
    "unet": unet,
    "mamba": mamba,
    "t5": t5,
    "mixture": mixture,
    "accumulated": accumulated,
}
