"""Sharded updates: each rank has the optimizer's state for some rows.

::

    g' = wait(reduce_scatter(pad(g / ranks)))      the mean gradient of this rank's rows
    p', m', v' = update(p[rows], g'[own], m, v)    state for these rows alone
    p = wait(all_gather(pad(p')))                  the parameter is whole on every rank

(Rajbhandari et al., 2020, stages 1 and 2; Xu et al., 2020.) The communication volume equals that of
averaging whole gradients. A state tensor is a DTensor over the rows:
``torch.distributed.checkpoint`` knows what it is, and other numbers of ranks can load it.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.optimizers.registry import OptimizerUpdate
from treadle.compat.distributed.collectives import collective_op, group_named
from treadle.compat.distributed.sharded_tensors import is_sharded, rows_of


@final
@dataclass(frozen=True, slots=True)
class RowShards:
    """How the rows of one tensor are divided: ``chunk`` for each rank, fewer for the last ones.
    ``begin`` and ``end``: the rows of this rank. ``is_even``: whether all have equally many."""

    group: RankGroup
    mesh: DeviceMesh
    chunk: int
    begin: int
    end: int
    is_even: bool

    @staticmethod
    def of(parameter: Tensor, group: RankGroup, mesh: DeviceMesh) -> "RowShards":
        """The division of a tensor of at least one dim; ``mesh``: that of the ranks of
        ``group``."""
        rows = parameter.shape[0]
        chunk = -(-rows // group.ranks)
        begin = min(group.rank * chunk, rows)
        even = rows == chunk * group.ranks
        return RowShards(group, mesh, chunk, begin, min(begin + chunk, rows), even)

    def own(self, whole: Tensor) -> Tensor:
        """The rows of this rank."""
        return whole.narrow(0, self.begin, self.end - self.begin)

    def placed(self, own: Tensor, whole: Tensor) -> Tensor:
        """A DTensor of the type of ``whole`` that holds ``own`` here."""
        return rows_of(own, self.mesh, whole)

    def mean(self, grad: Tensor) -> Tensor:
        """This rank's rows of the mean of ``grad`` over ranks."""
        start, wait = collective_op("reduce_scatter_tensor"), collective_op("wait_tensor")
        scaled = self._padded(grad * (1.0 / self.group.ranks), self.chunk * self.group.ranks)
        reduced = wait(start(scaled, "sum", self.group.ranks, self.group.name))
        return reduced.narrow(0, 0, self.end - self.begin)

    def whole(self, own: Tensor, rows: int) -> Tensor:
        """All rows, from those of each rank."""
        start, wait = collective_op("all_gather_into_tensor"), collective_op("wait_tensor")
        padded = self._padded(own, self.chunk)
        gathered = wait(start(padded, self.group.ranks, self.group.name))
        return gathered.narrow(0, 0, rows)

    def _padded(self, x: Tensor, rows: int) -> Tensor:
        missing = rows - x.shape[0]
        if not missing:
            return x.contiguous()
        return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


@final
class Divisions:
    """How the updates of a step are divided among the ranks of ``group``, if they are."""

    def __init__(self, group: RankGroup | None, device: torch.device) -> None:
        self._group = group if group is not None and group.divides and group.ranks > 1 else None
        self._mesh: DeviceMesh | None = None
        if self._group is not None:
            self._mesh = DeviceMesh.from_group(group_named(self._group.name), device.type)

    def of(self, parameter: nn.Parameter, rule: OptimizerUpdate) -> RowShards | None:
        """``None`` if each rank computes the whole update: the parameter has no rows or is in parts
        already, or the new value of an element depends on others."""
        if self._group is None or self._mesh is None or not rule.elementwise:
            return None
        if is_sharded(parameter) or parameter.dim() == 0 or parameter.is_complex():
            return None
        return RowShards.of(parameter, self._group, self._mesh)
