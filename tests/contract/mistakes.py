"""What people get wrong in steps that work (``working_steps``): a batch, or what stands at a point.

Each is either PyTorch's error, or the user's, or runs, or is refused with a remedy that ``fixed``
follows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from contract.working_steps import CLASSES, Working

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Mistake:
    """``batch``: what the call is given instead; ``points``: what stands in the step. ``fixed``
    follows the remedy. ``of``: whether it can be made in a step."""

    batch: Callable[..., Batch] = lambda x, y: (x, y)
    points: dict[str, Callable[..., Any]] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)
    fixed: "Mistake | None" = None
    of: Callable[[Working], bool] = lambda made: True


def _floats(made: Working) -> bool:
    return made.batch[0].is_floating_point()


def _classes(made: Working) -> bool:
    return made.labels


def _numbers(made: Working) -> bool:
    return not made.labels


HELD = ([],)


def append(loss, out):
    HELD[0].append(loss.detach())
    return loss


def seed(batch):
    torch.manual_seed(0)
    return batch


def hook(model, optimizer):
    next(model.parameters()).register_hook(lambda grad: grad)


def clock(loss, out):
    return loss + 0 * time.time()


def size(loss, out):
    return loss + torch.zeros(int(loss.detach().abs()) + 1).sum()


def anomaly(loss, out):
    with torch.autograd.detect_anomaly():
        loss.backward(retain_graph=True)
    return loss


def write_on_leaf(out, model):
    next(model.parameters()).add_(1)
    return out


def write_late(loss, out):
    out.detach().mul_(2)
    return loss


def freed(loss, out):
    loss.backward()
    return loss


def item_backward(loss, out):
    loss.item().backward()
    return loss


def attribute(out, model):
    return model.nothing(out)


def key(out, model):
    return {"x": out}["y"]


def own_error(out, model):
    raise ValueError(f"{len(out)} rows are too few")


def branch(loss, out):
    if loss.item() > 1e6:
        return loss * 0
    return loss


def show(loss, out):
    print(loss)
    return loss


def as_array(loss, out):
    return loss + out.numpy().sum()


def memory(loss, out):
    return loss + 0 * out.data_ptr()


def no_attribute(loss, out):
    return loss.means()


def wrong_keyword(out, model):
    return F.dropout(out, probability=0.5)


def adds_meta(out, model):
    return out + torch.zeros(1, device="meta")


def norm_dtype(out, model):
    weight = torch.ones(out.shape[-1]).double()
    return F.layer_norm(out, out.shape[-1:], weight)


MISTAKES: dict[str, Mistake] = {
    "narrow": Mistake(lambda x, y: (x[..., :-1], y), of=_floats),
    "flat": Mistake(lambda x, y: (x.flatten(), y)),
    "none": Mistake(lambda x, y: (None, y)),
    "list": Mistake(lambda x, y: (x.tolist(), y)),
    "array": Mistake(lambda x, y: (x.numpy(), y)),
    "double": Mistake(lambda x, y: (x.double(), y), of=_floats),
    "half_target": Mistake(lambda x, y: (x, y.bool()), of=_classes),
    "whole": Mistake(lambda x, y: (x.long(), y), of=_floats),
    "broken_tokens": Mistake(lambda x, y: (x.float(), y), of=lambda made: not _floats(made)),
    "far_token": Mistake(lambda x, y: (x + 11, y), of=lambda made: not _floats(made)),
    "complex": Mistake(lambda x, y: (x, y * (1 + 1j)), of=_numbers),
    "meta": Mistake(lambda x, y: (x.to("meta"), y)),
    "meta_target": Mistake(lambda x, y: (x, y.to("meta"))),
    "missing": Mistake(lambda x, y: (x,)),
    "more": Mistake(lambda x, y: (x, y, y)),
    "keyword": Mistake(named={"z": 1}),
    "twice": Mistake(named={"x": 1}),
    "far_label": Mistake(lambda x, y: (x, y + CLASSES), of=_classes),
    "negative_label": Mistake(lambda x, y: (x, y - CLASSES), of=_classes),
    "int32": Mistake(lambda x, y: (x, y.int()), of=_classes),
    "float_labels": Mistake(lambda x, y: (x, y.float()), of=_classes),
    "fewer_labels": Mistake(lambda x, y: (x, y[:-1])),
    "square_labels": Mistake(lambda x, y: (x, y[:, None])),
    "no_rows": Mistake(lambda x, y: (x[:0], y[:0])),
    "sparse": Mistake(lambda x, y: (x.to_sparse(), y), of=_floats, fixed=Mistake()),
    "with_graph": Mistake(
        lambda x, y: (x.requires_grad_() * 1.0, y), of=_floats,
        fixed=Mistake(lambda x, y: ((x.requires_grad_() * 1.0).detach(), y)),
    ),
    "append": Mistake(
        points={"loss": append}, fixed=Mistake(points={"loss": lambda loss, out: loss})
    ),
    "seed": Mistake(points={"batch": seed}, fixed=Mistake()),
    "hook": Mistake(points={"after_backward": hook}, fixed=Mistake()),
    "clock": Mistake(points={"loss": clock}, fixed=Mistake()),
    "size": Mistake(points={"loss": size}, fixed=Mistake()),
    "anomaly": Mistake(points={"loss": anomaly}, fixed=Mistake()),
    "write_on_leaf": Mistake(points={"output": write_on_leaf}),
    "write_late": Mistake(points={"loss": write_late}),
    "freed": Mistake(points={"loss": freed}),
    "item_backward": Mistake(points={"loss": item_backward}),
    "not_scalar": Mistake(points={"loss": lambda loss, out: out}),
    "detached": Mistake(points={"loss": lambda loss, out: loss.detach()}),
    "detached_output": Mistake(points={"output": lambda out, model: out.detach()}),
    "attribute": Mistake(points={"output": attribute}),
    "key": Mistake(points={"output": key}),
    "own_error": Mistake(points={"output": own_error}),
    "branch": Mistake(points={"loss": branch}),
    "show": Mistake(points={"loss": show}),
    "as_array": Mistake(points={"loss": as_array}),
    "no_attribute": Mistake(points={"loss": no_attribute}),
    "wrong_keyword": Mistake(points={"output": wrong_keyword}),
    "adds_meta": Mistake(points={"output": adds_meta}),
    "nothing": Mistake(points={"result": lambda loss: None}),
    "text": Mistake(points={"result": lambda loss: f"{loss:.3f}"}),
    "generator": Mistake(
        points={"result": lambda loss: (each for each in [loss])}, fixed=Mistake()
    ),
    "view": Mistake(points={"output": lambda out, model: out.view(7, -1)}),
    "dim": Mistake(points={"output": lambda out, model: out.softmax(5)}),
    "largest of none": Mistake(points={"output": lambda out, model: out[:0].max() + out}),
    "least of none": Mistake(points={"output": lambda out, model: out[:0].min(0)[0] + out}),
    "product": Mistake(points={"output": lambda out, model: out @ out[:, :2]}),
    "mixed": Mistake(points={"output": lambda out, model: out @ torch.eye(out.shape[-1]).double()}),
    "cat": Mistake(points={"output": lambda out, model: torch.cat([out, out[:1]], 1)}),
    "rate": Mistake(points={"output": lambda out, model: F.dropout(out, 3.0)}),
    "norm_dtype": Mistake(points={"output": norm_dtype}),
    "index": Mistake(points={"output": lambda out, model: out[:, 99]}),
    "eval": Mistake(points={"output": lambda out, model: (model.eval(), out)[1]}),
}  # fmt: skip
