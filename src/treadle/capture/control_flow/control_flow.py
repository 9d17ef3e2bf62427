"""``torch.cond``, ``map``, ``scan`` and ``while_loop`` while a step is traced.

::

    cond(p, f, g, x)        f and g are both part of the graph; y = where(taken(p), f(x), g(x))
    map(f, xs), scan(...)   as many copies of the body as there are slices
    while_loop(p, f, xs)    one operation, p and f as graphs: ``while_loops.py``
    associative_scan(f, xs) formulas of logarithmic depth: ``associative_scans.py``

Both branches of a ``cond`` are traced, and one is used; where their work is worth it, the step
computes that one alone (``passes/taken_branches.py``). This is exactly eager's result, forward
and backward, if the branches have no side effects: an elementwise selection drops the values of the
other branch, and its gradients, which may be NaN, are masked where they would reach a tensor from
outside. A branch with side effects (random numbers, writes, checks, unknown operations) is refused,
because eager would not run it.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.capture.control_flow.associative_scans import associative_scan
from treadle.capture.control_flow.bodies import OperandsFromOutside, Pure, require_closed, unfit
from treadle.capture.control_flow.while_loops import while_loop
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.transforms import in_transform
from treadle.graph.custom_ops.branches import taken as marked

MOST_COPIES = 256
"""Of the body of a ``map`` or ``scan``: more would be a graph of many equal parts."""


def instead_of(name: str) -> Callable[..., object]:
    """What the function of that name does in a trace."""
    return _INSTEAD[name]


def _cond(
    pred: object,
    true_fn: Callable[..., object],
    false_fn: Callable[..., object],
    operands: Sequence[object] = (),
) -> object:
    """Both branches, and a choice between their results."""
    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    if pred.numel() != 1:
        raise unfit("cond", f"its condition has {pred.numel()} elements")
    taken = _marked(pred.detach().reshape(()).to(torch.bool))
    results = [
        _branch(true_fn, operands, taken),
        _branch(false_fn, operands, taken.logical_not()),
    ]
    (yes, shape), (no, other) = map(flatten_containers, results)
    if str(shape) != str(other) or len(yes) != len(no):
        raise unfit("cond", "its branches return containers of different kinds")
    return unflatten([_chosen(taken, a, b) for a, b in zip(yes, no, strict=True)], shape)


def _marked(condition: Tensor) -> Tensor:
    """The condition, for the pass that runs one branch; inside ``vmap`` each sample has its own."""
    return condition if in_transform() else marked(condition)


def _chosen(taken: Tensor, yes: object, no: object) -> object:
    if not isinstance(yes, Tensor) or not isinstance(no, Tensor):
        if isinstance(yes, Tensor) or isinstance(no, Tensor) or yes != no:
            raise unfit("cond", f"its branches return {yes!r} and {no!r}")
        return yes
    types = [(value.dtype, tuple(value.shape), value.device) for value in (yes, no)]
    if types[0] != types[1]:
        shown = [f"{dtype} {list(shape)}" for dtype, shape, _ in types]
        raise unfit("cond", f"its branches return {shown[0]} and {shown[1]}")
    return torch.where(taken, yes, no)


def _branch(branch: Callable[..., object], operands: Sequence[object], taken: Tensor) -> object:
    gates = _Gates(taken)
    with Pure("cond", "a branch"):
        leaves, spec = flatten_containers(tuple(operands))
        operands = unflatten([gates.inside(leaf) for leaf in leaves], spec)
        with gates:
            result = branch(*operands)
        leaves, spec = flatten_containers(result)
        leaves = [gates.inside(leaf) for leaf in leaves]
    gates.require_closed(leaves)
    return unflatten(leaves, spec)


class _Gates(OperandsFromOutside):
    """Gradients leave a branch only where it is taken.

    before:  y = exp(x)                                    x is from outside
    after:   z = x.view_as(x); y = exp(z)                  grad of x is where(taken, grad of z, 0)
    """

    def __init__(self, taken: Tensor) -> None:
        super().__init__("cond", "a branch")
        self._taken = taken
        self._inside: dict[int, Tensor] = {}  # made in the branch
        self._gated: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of what is from outside

    def made(self, result: object) -> None:
        for leaf in flatten_containers(result)[0] if not isinstance(result, Tensor) else [result]:
            if isinstance(leaf, Tensor):
                self._inside[id(leaf)] = leaf

    def inside(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or id(leaf) in self._inside:
            return leaf
        if not torch.is_grad_enabled():
            return leaf
        known = self._gated.get(id(leaf))
        if known is None:
            gated = leaf.view_as(leaf)
            gated.register_hook(functools.partial(_masked, self._taken))
            self._inside[id(gated)] = gated
            known = self._gated[id(leaf)] = leaf, gated
        return known[1]

    def require_closed(self, results: Iterable[object]) -> None:
        """TR-151 where a gradient could leave the branch without a gate: a function of the user's
        got a tensor from outside by a way that nobody hears of."""
        gates = {gated.grad_fn for _, gated in self._gated.values()}
        why = "a branch uses a tensor from outside that is not an operand"
        require_closed(results, gates, lambda: unfit("cond", why))


def _masked(taken: Tensor, grad: Tensor) -> Tensor:
    return torch.where(taken, grad, torch.zeros_like(grad))


def _map(body: Callable[..., object], xs: object, *args: object) -> object:
    """The results for each slice, stacked."""
    leaves, spec = flatten_containers(xs)
    tensors = _of_one_length("map", leaves, 0)
    rows = [
        body(unflatten([tensor.select(0, at) for tensor in tensors], spec), *args)
        for at in range(tensors[0].shape[0])
    ]
    return _stacked(rows)


def _scan(
    body: Callable[..., tuple[object, object]],
    init: object,
    xs: object,
    *,
    dim: int = 0,
    reverse: bool = False,
) -> object:
    """The last carry, and what each step gives, stacked."""
    leaves, spec = flatten_containers(xs)
    if not leaves:
        return init, []
    tensors = _of_one_length("scan", leaves, dim)
    dim %= tensors[0].ndim
    count = tensors[0].shape[dim]
    carry, rows = init, list[object]()
    for at in reversed(range(count)) if reverse else range(count):
        carry, row = body(carry, unflatten([tensor.select(dim, at) for tensor in tensors], spec))
        rows.append(row)
    if reverse:
        rows.reverse()
    return carry, _stacked(rows, dim)


def _of_one_length(name: str, leaves: Sequence[object], dim: int) -> list[Tensor]:
    """The inputs, if they are tensors with equally many slices, and not too many."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    counts = {tensor.shape[dim] for tensor in tensors}
    if len(counts) != 1 or len(tensors) != len(leaves):
        raise unfit(name, "its inputs are not tensors of one length")
    (count,) = counts
    if not 0 < count <= MOST_COPIES:
        raise unfit(name, f"it has {count} slices, and treadle unrolls at most {MOST_COPIES}")
    return tensors


def _stacked(rows: Sequence[object], dim: int = 0) -> object:
    flat = [flatten_containers(row) for row in rows]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([_stack(column, dim) for column in columns], flat[0][1])


def _stack(column: Sequence[Any], dim: int) -> Tensor:
    return torch.stack(list(column), dim if dim <= column[0].ndim else 0)


_INSTEAD: Mapping[str, Callable[..., object]] = {
    "cond": _cond,
    "map": _map,
    "scan": _scan,
    "while_loop": while_loop,
    "associative_scan": associative_scan,
}
