"""Small steps that work, each with points at which a mistake may stand::

x, y = points.batch(x, y)
loss = points.loss(loss_of(points.output(model(x)), y))
loss.backward()
points.after_backward(model)
optimizer.step()
return points.result(loss.detach())
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Points:
    """Where mistakes stand; here are none."""

    def __init__(self, **mistakes: Callable[..., Any]) -> None:
        self.mistakes = mistakes

    def at(self, point: str, value: Any, *others: Any) -> Any:
        mistake = self.mistakes.get(point)
        return value if mistake is None else mistake(value, *others)


@dataclass
class Working:
    """A step that works. ``holder.points`` are those of the next call."""

    step: Callable[..., Any]
    model: nn.Module
    optimizers: list[Any]
    batch: tuple[Any, ...]
    holder: Any
    labels: bool = True  # whether the second argument is one of classes
    schedulers: list[Any] = field(default_factory=list)


class Holder:
    def __init__(self) -> None:
        self.points = Points()


def working(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_of: Callable[..., Tensor] = F.cross_entropy,
    optimizer: Any = None,
    **kwargs: Any,
) -> Working:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    holder = Holder()

    def step(x, y):
        points = holder.points
        x, y = points.at("batch", (x, y))
        out = points.at("output", model(x), model)
        loss = points.at("loss", loss_of(out, y), out)
        loss.backward()
        points.at("after_backward", model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return points.at("result", loss.detach())

    return Working(step, model, [optimizer], batch, holder, **kwargs)


ROWS, WIDTH, CLASSES = 4, 6, 3


def _labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape or (ROWS,))


def _x(*shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, WIDTH))


def _mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 5), *middle, nn.Linear(5, CLASSES))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = kind(WIDTH, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x)
        return self.out(hidden[:, -1])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.out = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x)
        return self.out(mean + torch.randn_like(mean))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) @ self.table.weight.T


def _conv(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


def _two_optimizers() -> Working:
    model = _mlp(nn.Tanh())
    one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.Adam(model[2].parameters(), lr=0.01)
    holder = Holder()

    def step(x, y):
        points = holder.points
        x, y = points.at("batch", (x, y))
        out = points.at("output", model(x), model)
        loss = points.at("loss", F.cross_entropy(out, y), out)
        one.zero_grad()
        other.zero_grad()
        loss.backward()
        points.at("after_backward", model, one)
        one.step()
        other.step()
        return points.at("result", loss.detach())

    return Working(step, model, [one, other], (_x(), _labels()), holder)


def _accumulating() -> Working:
    model = _mlp(nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    holder = Holder()

    def step(x, y):
        points = holder.points
        x, y = points.at("batch", (x, y))
        total = 0.0
        for part, label in zip(x.chunk(2), y.chunk(2), strict=True):
            out = points.at("output", model(part), model)
            loss = points.at("loss", F.cross_entropy(out, label) / 2, out)
            loss.backward()
            total = total + loss.detach()
        points.at("after_backward", model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return points.at("result", total)

    return Working(step, model, [optimizer], (_x(), _labels()), holder)


def _scaled() -> Working:
    model = _mlp(nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    holder = Holder()

    def step(x, y):
        points = holder.points
        x, y = points.at("batch", (x, y))
        out = points.at("output", model(x), model)
        loss = points.at("loss", F.cross_entropy(out, y), out)
        scaler.scale(loss).backward()
        points.at("after_backward", model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return points.at("result", loss.detach())

    return Working(step, model, [optimizer], (_x(), _labels()), holder)


def _scheduled() -> Working:
    made = working(_mlp(nn.SiLU()), (_x(), _labels()))
    made.schedulers.append(torch.optim.lr_scheduler.StepLR(made.optimizers[0], 2))
    inner, schedule = made.step, made.schedulers[0]

    def step(x, y):
        loss = inner(x, y)
        schedule.step()
        return loss

    return replace(made, step=step)


def _clipped() -> Working:
    model = _mlp(nn.Softplus())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    holder = Holder()

    def step(x, y):
        points = holder.points
        x, y = points.at("batch", (x, y))
        out = points.at("output", model(x), model)
        loss = points.at("loss", F.cross_entropy(out, y, label_smoothing=0.1), out)
        optimizer.zero_grad()
        loss.backward()
        points.at("after_backward", model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return points.at("result", loss.detach())

    return Working(step, model, [optimizer], (_x(), _labels()), holder)


def _adam(model: nn.Module, **kwargs: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01, **kwargs)


def _with_adam(model: nn.Module, batch: tuple[Any, ...], *rest: Any, **kwargs: Any) -> Working:
    return working(model, batch, *rest, optimizer=_adam(model), **kwargs)


def _image(channels: int = 2) -> Tensor:
    return torch.randn(ROWS, channels, 4, 4)


def _binary(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y)


def _divergence(out: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(out.log_softmax(-1), y, reduction="batchmean")


def _chosen(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(out.log_softmax(-1), y)


MAKE: dict[str, Callable[[], Working]] = {
    "untrained": lambda: working(
        _mlp(nn.ReLU()), (_x(), _labels()),
        optimizer=torch.optim.SGD(_mlp(nn.ReLU()).parameters(), lr=0.1),
    ),
    "mlp": lambda: working(_mlp(nn.ReLU()), (_x(), _labels())),
    "adam": lambda: _with_adam(_mlp(nn.Tanh()), (_x(), _labels())),
    "nll": lambda: working(_mlp(nn.Sigmoid()), (_x(), _labels()), _chosen),
    "dropout": lambda: working(_mlp(nn.Dropout(0.5)), (_x(), _labels())),
    "layer_norm": lambda: _with_adam(_mlp(nn.LayerNorm(5)), (_x(), _labels())),
    "batch_norm": lambda: working(_mlp(nn.BatchNorm1d(5)), (_x(), _labels())),
    "conv": lambda: working(_conv(nn.BatchNorm2d(4)), (_image(), _labels())),
    "groups": lambda: working(_conv(nn.GroupNorm(2, 4)), (_image(), _labels())),
    "attention": lambda: _with_adam(Attention(), (_x(ROWS, 5, WIDTH), _labels())),
    "tokens": lambda: working(Tokens(), (torch.randint(11, (ROWS, 5)), _labels())),
    "lstm": lambda: working(Recurrent(nn.LSTM), (_x(ROWS, 3, WIDTH), _labels())),
    "gru": lambda: working(Recurrent(nn.GRU), (_x(ROWS, 3, WIDTH), _labels())),
    "regression": lambda: working(
        _mlp(nn.ELU()), (_x(), _x(ROWS, CLASSES)), F.mse_loss, labels=False
    ),
    "binary": lambda: working(
        _mlp(nn.ReLU()), (_x(), torch.rand(ROWS, CLASSES)), _binary, labels=False
    ),
    "divergence": lambda: working(
        _mlp(nn.ReLU()), (_x(), _x(ROWS, CLASSES).softmax(-1)), _divergence, labels=False
    ),
    "noisy": lambda: working(Noisy(), (_x(), _x()), F.smooth_l1_loss, labels=False),
    "tied": lambda: working(Tied(), (_x(), _labels())),
    "two_optimizers": _two_optimizers,
    "accumulating": _accumulating,
    "scaled": _scaled,
    "scheduled": _scheduled,
    "clipped": _clipped,
}  # fmt: skip
