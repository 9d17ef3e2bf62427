"""``torch.while_loop`` while a step is traced: one operation, with its functions as separate
graphs.

::

    before:  i, h = while_loop(lambda i, h: i < n, lambda i, h: (i + 1, tanh(h @ w)), (i0, h0))
    after:   i, h = treadle::while_loop([i0, h0], [n, w], ...,
                 condition = "carried_0, carried_1, other_0, other_1 -> lt(carried_0, other_0)",
                 body      = "carried_0, ...  -> add(carried_0, 1), tanh(mm(carried_1, other_1))")

Both functions run once (``loop_functions.py``). Which carried tensors need a gradient may depend
on the body, so it is traced again until the same tensors need a gradient before and after an
iteration.
"""

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from treadle.capture.control_flow.bodies import unfit
from treadle.capture.control_flow.loop_functions import (
    LoopFunctions,
    TracedFunction,
    in_graph,
    require_dense,
    require_same,
    shown_type,
)
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.pytree import TreeSpec
from treadle.compat.transforms import in_transform
from treadle.graph.custom_ops.while_loops import while_loop as loop_operation
from treadle.util.errors import with_article

_NAME = "while_loop"


def while_loop(
    cond_fn: Callable[..., object], body_fn: Callable[..., object], carried_inputs: Sequence[object]
) -> object:
    """``body_fn(*carried)`` as long as ``cond_fn(*carried)``, in the graph of a step."""
    if in_transform():
        raise unfit(_NAME, "it is inside a torch.func transform")
    leaves, spec = flatten_containers(tuple(carried_inputs))
    carried = [_carried(leaf) for leaf in leaves]
    if not carried:
        raise unfit(_NAME, "it carries no tensor")
    names = [f"carried_{at}" for at in range(len(carried))]
    flags = [tensor.requires_grad and torch.is_grad_enabled() for tensor in carried]
    while True:
        functions = LoopFunctions(_NAME, carried, names, flags)
        condition = functions.traced("its condition", lambda v: cond_fn(*unflatten(v, spec)))
        body = functions.traced("its body", lambda v: body_fn(*unflatten(v, spec)))
        _require_alike(carried, spec, body)
        after = [flag or leaf.requires_grad for flag, leaf in zip(flags, body.leaves, strict=True)]
        if after == flags:
            break
        flags = after
    _require_condition(condition)
    return unflatten(_operation(functions, carried, condition, body), spec)


def _operation(
    functions: LoopFunctions,
    carried: list[Tensor],
    condition: TracedFunction,
    body: TracedFunction,
) -> list[Tensor]:
    """The loop, in the step's graph."""
    flags = functions.flags
    runs: list[tuple[TracedFunction, Sequence[Tensor]]] = [(condition, []), (body, [])]
    if any(flags):
        runs.append(functions.backward(body, list(compress(body.leaves, flags))))
    others, texts = functions.texts(runs)
    flags += [False] * (len(carried) + len(others) - len(flags))
    backward = [] if any(flags) else [""]
    return in_graph(loop_operation, carried, others, flags, *texts, *backward)


def _carried(leaf: object) -> Tensor:
    if not isinstance(leaf, Tensor):
        words = (
            f"it carries {with_article(type(leaf).__name__)}, whose value is known only after the "
            "last iteration"
        )
        raise unfit(_NAME, f"{words}: carry it as torch.tensor(value)")
    require_dense(_NAME, leaf, "it carries")
    return leaf


def _require_condition(condition: TracedFunction) -> None:
    """Require one boolean, which eager reads before each iteration."""
    (leaf, *more) = condition.leaves or [None]
    if more or not isinstance(leaf, Tensor):
        raise unfit(
            _NAME, f"its condition is not a tensor but {leaf!r}, the same in every iteration"
        )
    if leaf.dtype is not torch.bool or leaf.numel() != 1:
        raise unfit(_NAME, f"its condition is {shown_type(leaf)}, not a single boolean")


def _require_alike(carried: Sequence[Tensor], spec: TreeSpec, body: TracedFunction) -> None:
    """Require that the body returns the types that it takes."""
    if str(body.spec) != str(spec) or len(body.leaves) != len(carried):
        raise unfit(_NAME, "its body does not return the containers that it receives")
    require_same(_NAME, carried, body.leaves)
