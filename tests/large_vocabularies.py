"""A model with a large vocabulary, and what may be its loss."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from treadle.capture.step import capture
from treadle.compiler.cleaning import cleaned
from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.signature import StepGraph
from treadle.options import Options

V, D, B, T = 97, 16, 3, 7
ROW = V * 4
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], object]


class Model(nn.Module):
    def __init__(self, *, vocabulary: int = V, width: int = D, bias=False, tied=False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.norm(self.embed(x)))


def batch(rows=(B, T), vocabulary=V):
    torch.manual_seed(1)
    x, y = torch.randint(vocabulary, rows), torch.randint(vocabulary, rows)
    y.view(-1)[3::5] = -100
    return x, y


def make_step(model, loss: Loss, *, half=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = loss(model, x, y)
        (found[0] if isinstance(found, tuple) else found).backward()
        optimizer.step()
        return found

    return step, optimizer


def captured(loss: Loss, model=None, rows=(B, T), *, half=False, skip=()) -> StepGraph:
    model = model or Model()
    step, optimizer = make_step(model, loss, half=half)
    found = capture(
        step, models={"m": model}, optimizers={"o": optimizer}, args=batch(rows), kwargs={}
    )
    return cleaned(found.step, Options(skip=skip))


def values(step: StepGraph, rows=(B, T), dtype=None):
    """An input for each placeholder: a batch, and small numbers."""
    torch.manual_seed(2)
    given = iter(batch(rows))
    found = []
    for node in step.placeholders:
        like = tensor_of(node)
        floating = like.dtype.is_floating_point
        found.append(0.3 * torch.randn(like.shape, dtype=like.dtype) if floating else next(given))
    return found


def plain(m, x, y):
    return F.cross_entropy(m(x).view(-1, V), y.view(-1))


def smoothed(m, x, y):
    given = y.clamp(min=3).view(-1)
    return F.cross_entropy(m(x).view(-1, V), given, label_smoothing=0.1, ignore_index=3)


def weighted(m, x, y):
    return F.cross_entropy(m(x).view(-1, V), y.view(-1), weight=torch.arange(V) / V)


def summed(m, x, y):
    return F.cross_entropy(m(x).view(-1, V), y.view(-1), reduction="sum") / 4


def z_loss(m, x, y):
    logits = m(x).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + 1e-4 * logits.logsumexp(-1).square().mean()


def softcap(m, x, y):
    logits = 30.0 * torch.tanh(m(x) / 30.0)
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


def shifted_logits(m, x, y):
    logits = 30.0 * torch.tanh(m(x) / 30.0)
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1))


def both_ends_cut(m, x, y):
    return F.cross_entropy(m(x)[:, 1:-1].reshape(-1, V), y[:, 2:].reshape(-1))


def shifted_labels(m, x, y):
    labels = F.pad(y, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(m(x).float().view(-1, V), labels.reshape(-1))


def each_row(m, x, y):
    losses = F.cross_entropy(m(x).view(-1, V), y.view(-1), reduction="none")
    return (losses * (y.view(-1) != -100)).sum() / 7, losses.detach()


def by_hand(m, x, y):
    logits = m(x)
    picked = logits.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return (logits.logsumexp(-1) - picked).mean()


def one_hot(m, x, y):
    wanted = F.one_hot(y.clamp(min=0), V).float()
    return -(wanted * F.log_softmax(m(x), -1)).sum(-1).mean()


def with_accuracy(m, x, y):
    logits = m(x).view(-1, V)
    right = (logits.argmax(-1) == y.view(-1)).float().mean()
    return F.cross_entropy(logits, y.view(-1)), right


def best_of_each_row(m, x, y):
    logits = m(x).view(-1, V)
    return F.cross_entropy(logits, y.view(-1)), logits.detach().max(-1).values


def fewer_columns(m, x, y):
    return F.cross_entropy(m(x)[..., :91].reshape(-1, 91), y.clamp(max=90).view(-1))


def squares(m, x, y):
    return m(x).square().mean()


def distilled(m, x, y):
    teacher = torch.softmax(m(x).detach() * 2, -1)
    return F.kl_div(F.log_softmax(m(x), -1), teacher, reduction="batchmean")


HANDLED = (
    plain, smoothed, weighted, summed, z_loss, softcap, shifted_logits, both_ends_cut,
    shifted_labels, each_row, by_hand, one_hot, with_accuracy, best_of_each_row, fewer_columns,
    squares, distilled,
)  # fmt: skip
