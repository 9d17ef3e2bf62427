"""``torch.cond``, ``map``, ``scan`` and ``while_loop`` while a step is traced.

::

    cond(p, f, g, x)        f and g are both part of the graph; y = where(taken(p), f(x), g(x))
    map(f, xs), scan(...)   a batch, a loop over the slices, or copies: ``scans.py``
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

import torch
from torch import Tensor

from treadle.capture.control_flow.associative_scans import associative_scan
from treadle.capture.control_flow.bodies import OperandsFromOutside, Pure, require_closed, unfit
from treadle.capture.control_flow.scans import map_over, scan
from treadle.capture.control_flow.while_loops import while_loop
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.transforms import in_transform
from treadle.graph.custom_ops.branches import taken as marked


def instead_of(name: str) -> Callable[..., object]:
    """The replacement of the function of that name during a trace."""
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
        """TR-151 if a gradient could leave the branch without a gate, because a function of the
        user's got a tensor from outside that was not intercepted."""
        gates = {gated.grad_fn for _, gated in self._gated.values()}
        why = "a branch uses a tensor from outside that is not an operand"
        require_closed(results, gates, lambda: unfit("cond", why))


def _masked(taken: Tensor, grad: Tensor) -> Tensor:
    return torch.where(taken, grad, torch.zeros_like(grad))


_INSTEAD: Mapping[str, Callable[..., object]] = {
    "cond": _cond,
    "map": map_over,
    "scan": scan,
    "while_loop": while_loop,
    "associative_scan": associative_scan,
}
