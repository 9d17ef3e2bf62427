"""Gradients that are averaged over the ranks of a process group, where the step needs them.

::

    a wrapper's forward          ->  after the next backward, its parameters' gradients
    DataParallel(), a plain model ->  when an optimizer steps, or the step looks at a gradient

The second way accumulates without communication: the mean over ranks of a sum is the sum of the
means, so gradients are averaged only when they are read. A call that only accumulates leaves this
rank's own gradients in ``.grad``, and a later call averages them with its own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from treadle.capture.explain_errors import here
from treadle.compat.distributed.collectives import collective_op
from treadle.compat.distributed.sharded_tensors import layout_of, local_of
from treadle.util.errors import CaptureError


@final
@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group: its name for functional collectives, the number of its ranks, and the rank
    of this process. ``divides``: whether the ranks divide updates among them."""

    name: str
    ranks: int
    rank: int = 0
    divides: bool = False


@final
class GradientSync:
    """Which gradients are averaged, and when. ``everywhere``: the group for every parameter of a
    plain model."""

    def __init__(self, everywhere: RankGroup | None = None) -> None:
        self.everywhere = everywhere
        self._leaves: dict[int, Tensor] = {}
        self._expected: dict[int, RankGroup] = {}  # by what is traced in the parameter's place
        self._local: dict[int, None] = {}  # with something of this rank alone; the last added last
        self._accumulated: set[int] = set()  # by what is traced: a backward has added to these
        self._averages = False
        self._forwarded: set[int] = set()  # wrappers, by identity

    def is_first_forward(self, wrapper: object) -> bool:
        """Whether this is the first run of ``wrapper`` in this step; notes that it has run."""
        known = id(wrapper) in self._forwarded
        self._forwarded.add(id(wrapper))
        return not known

    def watch(self, leaf: Tensor, *, has_gradient: bool) -> RemovableHandle | None:
        """Note additions to ``leaf.grad`` before any hook of the user's runs. Returns the handle of
        the hook for that, if one is needed."""
        if has_gradient:
            self._added(leaf)
        if not (leaf.is_leaf and (leaf.is_floating_point() or leaf.is_complex())):
            return None
        self._leaves[id(leaf)] = leaf
        wants = leaf.requires_grad
        leaf.requires_grad_(True)  # hooks are for those alone, and it may want one later
        handle = leaf.register_post_accumulate_grad_hook(self._accumulates)
        leaf.requires_grad_(wants)
        return handle

    def expect(self, leaves: Iterable[Tensor], group: RankGroup | None) -> None:
        """From now on a backward averages the gradients of these parameters; ``None``: it averages
        none."""
        for leaf in leaves:
            if group is None:
                self._expected.pop(id(leaf), None)
            else:
                self._expected[id(leaf)] = group

    def expected_of(self, leaf: Tensor) -> RankGroup | None:
        """The ranks over which the wrapper that ran last averages the gradients of ``leaf``."""
        return self._expected.get(id(leaf))

    def has_accumulated(self, leaf: Tensor) -> bool:
        """Whether a backward of this step has added to ``leaf.grad``."""
        return id(leaf) in self._accumulated

    def _accumulates(self, leaf: Tensor) -> None:
        self._accumulated.add(id(leaf))
        self._added(leaf)

    def _added(self, leaf: Tensor) -> None:
        self._local.pop(id(leaf), None)
        self._local[id(leaf)] = None

    def after_backward(self) -> None:
        """Average the gradients of wrappers, in the order in which they became final."""
        for key in [key for key in self._local if key in self._leaves and key in self._expected]:
            self._average(self._leaves[key], self._expected[key])

    def looked_at(self, leaf: Tensor) -> None:
        """Called before ``leaf.grad`` is read."""
        if self.everywhere is not None and id(leaf) in self._local and not self._averages:
            self._average(leaf, self.everywhere)

    def was_set(self, leaf: Tensor) -> None:
        """Called after the step has set or cleared ``leaf.grad``."""
        if not self._averages and id(leaf) in self._leaves:
            self._added(leaf)

    @contextmanager
    def unlooked(self) -> Iterator[None]:
        """Inside, reads of gradients do not average them."""
        before, self._averages = self._averages, True
        try:
            yield
        finally:
            self._averages = before

    def unreduced(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """The parameters whose ``.grad`` is not a mean yet and has to become one, in the order in
        which it became final, so that the first ones need not wait for the rest of the backward
        pass."""
        if self.everywhere is None:
            return []
        wanted = {id(leaf): leaf for leaf in leaves}
        return [wanted[key] for key in self._local if key in wanted]

    def finish(self) -> None:
        """Called at the end of a step in which no optimizer steps: a later step finds averages."""
        for leaf in self.unreduced(self._leaves.values()):
            self.looked_at(leaf)

    def _average(self, leaf: Tensor, group: RankGroup) -> None:
        self._local.pop(id(leaf), None)
        with self.unlooked(), torch.no_grad():
            if leaf.grad is not None and leaf.grad.requires_grad:
                raise _differentiated()
            if leaf.grad is not None:
                leaf.grad = mean_over_ranks(leaf.grad, group)


def _differentiated() -> CaptureError:
    return CaptureError(
        "the step differentiates a gradient that ranks have to average (create_graph=True)",
        code="TR-541",
        where=here(),
        remedy=(
            "compute the penalty with torch.autograd.grad(loss, parameters, create_graph=True), "
            "and call backward once, without create_graph"
        ),
    )


def mean_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """The mean of ``x`` over the ranks of a group, divided first as ``DistributedDataParallel``
    does; of a DTensor that of the parts here."""
    layout = layout_of(x)
    if layout is not None:
        return layout.around(mean_over_ranks(local_of(x), group))
    if x.is_complex():
        return torch.view_as_complex(mean_over_ranks(torch.view_as_real(x), group))
    start, wait = collective_op("all_reduce"), collective_op("wait_tensor")
    return wait(start(x * (1.0 / group.ranks), "sum", group.name))


def from_first_rank(x: Tensor, group: RankGroup) -> Tensor:
    """The first rank's value of ``x``, or of its part of a DTensor."""
    layout = layout_of(x)
    if layout is not None:
        return layout.around(from_first_rank(local_of(x), group))
    if x.is_complex():
        return torch.view_as_complex(from_first_rank(torch.view_as_real(x), group))
    x = x.contiguous()
    start, wait = collective_op("broadcast"), collective_op("wait_tensor")
    return wait(start(x, 0, group.name))
