"""Ordinary steps over batches whose rows and length change from call to call.

Each is a function of tokens ``[rows, time]`` and features ``[rows, time, WIDTH]``: a loss.
``python tests/sized_programs.py`` runs all of them beside eager, and says how often each compiles.
"""

import copy
import math
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle

WIDTH, WORDS, MOST = 8, 23, 32
SIZES = ((6, 14), (5, 11), (4, 14), (6, 9), (3, 12), (5, 13))
"""Rows and time of the calls."""


class Parts(nn.Module):
    """What the programs share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.places = nn.Embedding(MOST, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.group_norm = nn.GroupNorm(2, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.strided = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.transposed = nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2)
        self.image = nn.Conv2d(1, 2, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.pairs = nn.Bilinear(WIDTH, WIDTH, 2)
        self.score = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("causal", torch.tril(torch.ones(MOST, MOST, dtype=torch.bool)))


def trained(name: str) -> list[str]:
    """Why a program is compiled again, after calls of all ``SIZES`` that were eager's."""
    function = PROGRAMS[name]
    torch.manual_seed(0)
    model = Parts()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin))

    def step(tokens, x, m=model, update=optimizer):
        update.zero_grad()
        loss = function(m, tokens, x)
        loss.backward()
        update.step()
        return loss.detach()

    compiled = treadle.compile(lambda tokens, x: step(tokens, x), model=model, optimizer=optimizer)
    for rows, length in SIZES:
        tokens, x = torch.randint(WORDS, (rows, length)), torch.randn(rows, length, WIDTH)
        expected = step(tokens, x, twin, other)
        torch.testing.assert_close(compiled(tokens, x), expected, rtol=1e-4, atol=1e-5)
        for mine, own in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-5)
    return compiled.recompiles


PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def mean_square(x: Tensor) -> Tensor:
    return (x * x).mean()


def language(m: Parts, h: Tensor, tokens: Tensor, **options: object) -> Tensor:
    logits = m.head(h)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), **options)


@program
def next_token(m, tokens, x):
    return language(m, m.words(tokens[:, :-1]), tokens[:, 1:])


@program
def ignored_padding(m, tokens, x):
    return language(m, m.words(tokens) + x, tokens, ignore_index=0)


@program
def weighted_classes(m, tokens, x):
    return language(m, x, tokens, weight=torch.linspace(0.5, 1.5, WORDS), label_smoothing=0.1)


@program
def positions(m, tokens, x):
    at = torch.arange(tokens.shape[1])
    return language(m, m.words(tokens) + m.places(at), tokens)


@program
def table_of_positions(m, tokens, x):
    return language(m, m.words(tokens) + m.places.weight[: tokens.size(1)], tokens)


@program
def causal_buffer(m, tokens, x):
    time = x.shape[1]
    scores = m.linear(x) @ x.transpose(1, 2) / math.sqrt(WIDTH)
    scores = scores.masked_fill(~m.causal[:time, :time], float("-inf"))
    return mean_square(scores.softmax(-1) @ x)


@program
def causal_attention(m, tokens, x):
    q = m.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
    return mean_square(F.scaled_dot_product_attention(q, q, q, is_causal=True))


@program
def padded_attention(m, tokens, x):
    q = m.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
    mask = (tokens != 0)[:, None, None, :]
    return mean_square(F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


@program
def multihead(m, tokens, x):
    out, _ = m.attention(x, x, x, need_weights=False)
    return mean_square(out)


@program
def encoder_layer(m, tokens, x):
    return mean_square(m.layer(x, src_key_padding_mask=tokens == 0))


@program
def alibi(m, tokens, x):
    at = torch.arange(x.size(1))
    bias = -(at[:, None] - at[None]).abs() * 0.5
    return mean_square((x @ m.linear(x).mT + bias).softmax(-1) @ x)


@program
def rotary(m, tokens, x):
    rate = 1.0 / 10.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.outer(torch.arange(x.shape[1]).float(), rate)
    a, b = m.linear(x)[..., ::2], m.linear(x)[..., 1::2]
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return mean_square(torch.stack(turned, -1).flatten(-2).cumsum(1))


@program
def masked_mean(m, tokens, x):
    mask = (tokens != 0).unsqueeze(-1)
    return mean_square((m.linear(x) * mask).sum(1) / mask.sum(1).clamp(min=1))


@program
def last_token(m, tokens, x):
    last = (tokens != 0).sum(1).clamp(min=1) - 1
    return mean_square(m.linear(x)[torch.arange(len(x)), last])


@program
def attention_pooling(m, tokens, x):
    weights = (m.linear(x) @ m.score).softmax(1)
    return mean_square(torch.einsum("bt,btw->bw", weights, x))


@program
def max_over_time(m, tokens, x):
    return mean_square(m.linear(x).amax(1)) + mean_square(m.linear(x).max(1).values)


@program
def statistics(m, tokens, x):
    h = m.linear(x)
    return mean_square(torch.cat([h.mean(1), h.std(1), h.var(1, unbiased=False)], -1))


@program
def standardized(m, tokens, x):
    h = m.linear(x)
    return mean_square((h - h.mean((0, 1))) / (h.var((0, 1)) + 1e-5).sqrt() * x)


@program
def layer_norm(m, tokens, x):
    return mean_square(m.linear(m.norm(x)) * x)


@program
def batch_norm(m, tokens, x):
    return mean_square(m.batch_norm(m.linear(x).flatten(0, 1)).view_as(x) * x)


@program
def group_norm(m, tokens, x):
    return mean_square(m.group_norm(m.linear(x).mT).cumsum(-1))


@program
def convolution(m, tokens, x):
    return mean_square(F.gelu(m.conv(x.mT)).mT + x)


@program
def down_and_up(m, tokens, x):
    h = F.relu(m.strided(x.mT))
    return mean_square(m.transposed(h)[..., : x.shape[1]].mT - x)


@program
def resized_back(m, tokens, x):
    h = F.relu(m.strided(x.mT))
    return mean_square(F.interpolate(h, size=x.shape[1], mode="linear").mT - x)


@program
def resized(m, tokens, x):
    return mean_square(F.interpolate(m.conv(x.mT), scale_factor=2)[..., 1:])


@program
def spectrogram(m, tokens, x):
    h = F.max_pool2d(F.relu(m.image(x.unsqueeze(1))), 2)
    return mean_square(F.adaptive_avg_pool2d(h, (2, 2)).flatten(1))


@program
def average_pooling(m, tokens, x):
    return mean_square(F.avg_pool1d(m.conv(x.mT), 2)) + mean_square(
        F.avg_pool2d(m.image(x.unsqueeze(1)), 2)
    )


@program
def adaptive_pooling(m, tokens, x):
    h = m.conv(x.mT)
    return mean_square(F.adaptive_max_pool1d(h, 3) + F.adaptive_avg_pool1d(h, 3))


@program
def windows(m, tokens, x):
    return mean_square(m.linear(x).unfold(1, 4, 2).mean(-1))


@program
def patches(m, tokens, x):
    return mean_square(F.unfold(m.image(x.unsqueeze(1)), 2, stride=2).mT)


@program
def contrastive(m, tokens, x):
    h = F.normalize(m.linear(x).mean(1), dim=-1)
    return F.cross_entropy(h @ h.T / 0.1, torch.arange(len(x)))


@program
def pairs_of_rows(m, tokens, x):
    h = m.linear(x).mean(1)
    apart = torch.cdist(h, h + 0.1) + (h[:, None] - h[None]).abs().sum(-1)
    return apart.masked_fill(torch.eye(len(h), dtype=torch.bool), 0.0).mean()


@program
def triangles(m, tokens, x):
    time = x.shape[1]
    scores = m.linear(x) @ x.mT
    return mean_square(scores.tril()) + mean_square(torch.triu(torch.ones(time, time)) * scores)


@program
def shifted(m, tokens, x):
    h = m.linear(x)
    return mean_square(F.pad(h, (0, 0, 1, 0))[:, :-1] - h) + mean_square(h.roll(1, 1) * x.flip(1))


@program
def joined(m, tokens, x):
    first = m.score.expand(len(x), 1, -1)
    return mean_square(m.linear(torch.cat([first, x], 1))) + mean_square(
        torch.stack([x, m.linear(x)])
    )


@program
def classes(m, tokens, x):
    hot = F.one_hot(tokens, WORDS).float()
    return -(m.head(x).log_softmax(-1) * hot).sum(-1).mean()


@program
def gathered(m, tokens, x):
    logs = m.head(x).log_softmax(-1)
    return (
        -(logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) * (tokens != 0)).sum() / tokens.numel()
    )


@program
def best_few(m, tokens, x):
    return mean_square(m.linear(x).topk(3, 1).values) + mean_square(m.linear(x).sort(1).values * x)


@program
def half_of_them(m, tokens, x):
    losses = (m.linear(x) - x).square().mean((1, 2))
    return losses.topk(max(1, int(0.5 * len(losses)))).values.mean()


@program
def parts_of_rows(m, tokens, x):
    cut = int(0.7 * len(x))
    one, other = m.linear(x).split([cut, len(x) - cut])
    return mean_square(one) + other.abs().mean()


@program
def buckets(m, tokens, x):
    at = torch.bucketize(x[..., 0].contiguous(), torch.linspace(-1, 1, WORDS - 1))
    return mean_square(m.words(at) * x)


@program
def recurrent_sums(m, tokens, x):
    h = m.linear(x)
    weights = torch.arange(1, x.shape[1] + 1).reciprocal()[:, None]
    return mean_square(h.cumsum(1) * weights) + h.logcumsumexp(1).mean()


@program
def mixup(m, tokens, x):
    mixed = 0.7 * x + 0.3 * x.flip(0)
    return F.mse_loss(m.linear(mixed), x, reduction="sum") / len(x)


@program
def distillation(m, tokens, x):
    with torch.no_grad():
        teacher = m.head(x + 0.1).softmax(-1)
    return F.kl_div(m.head(x).log_softmax(-1), teacher, reduction="batchmean")


@program
def dropped(m, tokens, x):
    return mean_square(F.dropout(m.linear(x), 0.3, training=False) + x)


@program
def gated(m, tokens, x):
    return mean_square(F.glu(m.wide(x)) + x * torch.sigmoid(x.mean(1, keepdim=True)))


@program
def scattered(m, tokens, x):
    sums = torch.zeros(WORDS, WIDTH).index_add(0, tokens.flatten(), m.linear(x).flatten(0, 1))
    counts = torch.bincount(tokens.flatten(), minlength=WORDS).clamp(min=1)
    return mean_square(sums / counts[:, None])


@program
def pointers(m, tokens, x):
    scores = torch.einsum("btw,bsw->bts", m.linear(x), x)
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten() % x.shape[1])


@program
def pairwise_bias(m, tokens, x):
    time = x.shape[1]
    apart = torch.arange(time)[:, None] - torch.arange(time)[None]
    bias = m.places(apart.clamp(-8, 8) + 8).mean(-1)
    return mean_square((m.linear(x) @ x.mT + bias).softmax(-1))


@program
def strided_tokens(m, tokens, x):
    return mean_square(m.linear(x[:, ::2])) + mean_square(m.linear(x[:, 1::2]).sum(1))


@program
def chunks(m, tokens, x):
    one, other = m.linear(x).chunk(2, 1)
    return mean_square(one) + other.abs().mean()


@program
def one_way_of_both(m, tokens, x):
    return sum(part.mean() for part in torch.tensor_split(m.linear(x), 2, 1)).square()


@program
def repeated(m, tokens, x):
    return mean_square(m.linear(x).repeat_interleave(2, 1) * x.repeat(1, 2, 1))


@program
def meshes(m, tokens, x):
    rows, time = x.shape[:2]
    a, b = torch.meshgrid(torch.arange(rows), torch.arange(time), indexing="ij")
    return mean_square(m.linear(x) * (a + b)[..., None] / (rows + time))


@program
def pairs_of_halves(m, tokens, x):
    scaled = m.linear(x) * 0.5
    return mean_square(m.pairs(scaled, scaled * 2)) + mean_square(m.pairs(scaled, scaled * 2) + 1)


if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        begin = time.perf_counter()
        reasons = trained(name)
        print(f"{name:20} {len(reasons)} {time.perf_counter() - begin:5.1f} s")
        print("\n".join(f"    {reason}" for reason in reasons[1:]))
