"""DTensors: tensors of which each rank of a mesh holds a part, or a summand.

::

    p                a weight f32[8, 16], Shard(0) over 4 ranks
    local_of(p)      f32[2, 16], what this rank holds; writes to it are writes to ``p``
    layout_of(p)     the mesh, Shard(0), f32[8, 16]
    layout.around(l) a DTensor like ``p`` whose part here is ``l``; nothing is sent
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from treadle.compat.distributed.collectives import AVAILABLE

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor


def _kinds() -> tuple[tuple[type["DTensor"], ...], tuple[type["AsyncCollectiveTensor"], ...]]:
    """DTensors, and results of collectives that are under way."""
    if not AVAILABLE:
        return (), ()
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return (DTensor,), (AsyncCollectiveTensor,)


_KINDS, _UNDER_WAY = _kinds()


@final
@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """What a DTensor says of itself beside its part here: ``spec`` has its mesh, the placement
    along each axis of the mesh, and the type of the whole."""

    spec: Any

    def around(self, local: Tensor) -> Tensor:
        """A DTensor that holds ``local`` itself, and wants no gradient."""
        return _KINDS[0](local, self.spec, requires_grad=False)

    def with_dtype(self, dtype: torch.dtype) -> "ShardedLayout":
        """The same with elements of ``dtype``."""
        meta = self.spec.tensor_meta
        return ShardedLayout(replace(self.spec, tensor_meta=meta._replace(dtype=dtype)))

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks of its mesh."""
        return frozenset(self.spec.mesh.mesh.flatten().tolist())

    @property
    def is_even(self) -> bool:
        """Whether the parts of all ranks are of one size."""
        sizes = list(self.spec.shape)
        for ranks, each in zip(self.spec.mesh.shape, self.spec.placements, strict=True):
            if each.is_replicate() or each.is_partial():
                continue
            if sizes[each.dim] % ranks:
                return False
            sizes[each.dim] //= ranks
        return True

    @property
    def is_split(self) -> bool:
        """Whether ranks hold parts of it, or summands; not if each has all of it."""
        return not all(each.is_replicate() for each in self.spec.placements)


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor."""
    return isinstance(value, _KINDS)


def layout_of(value: object) -> ShardedLayout | None:
    """``None`` for what is no DTensor."""
    if not isinstance(value, _KINDS):
        return None
    return ShardedLayout(value._spec)


def local_of(value: Tensor) -> Tensor:
    """What this rank holds of a DTensor, which is waited for if it is still on its way; any other
    tensor itself."""
    if not isinstance(value, _KINDS):
        return value
    local = value._local_tensor
    return local.wait() if isinstance(local, _UNDER_WAY) else local


def rows_of(local: Tensor, mesh: "DeviceMesh", whole: Tensor) -> Tensor:
    """A DTensor of the shape of ``whole`` whose rows are divided along a mesh of one dim; ``local``
    are those of this rank. Nothing is sent."""
    from torch.distributed.tensor import Shard

    return _KINDS[0].from_local(
        local, mesh, (Shard(0),), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def gathered(value: Tensor) -> Tensor:
    """All of a DTensor; a collective of the ranks of its mesh."""
    assert isinstance(value, _KINDS)
    return value.full_tensor()


def placed_like(whole: Tensor, like: Tensor) -> Tensor:
    """``whole``, which every rank has, as a DTensor placed like another; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    assert isinstance(like, _KINDS)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def sharded_entries() -> tuple[tuple[type, str], ...]:
    """Methods of a DTensor that ask no mode."""
    names = "to_local", "full_tensor", "redistribute"
    return tuple([(kind, name) for kind in _KINDS for name in names])


def draw_methods() -> tuple[tuple[type, str], ...]:
    """What DTensor calls to draw random numbers on devices where each rank draws its own part of
    one stream: it reads and sets the state of the device's generator."""
    if not AVAILABLE:
        return ()
    from torch.distributed.tensor._random import OffsetBasedRNGTracker

    return (OffsetBasedRNGTracker, "__init__"), (OffsetBasedRNGTracker, "_distribute_region")


def placed_as(value: Tensor, layout: ShardedLayout) -> Tensor:
    """``value``, a DTensor, with other placements on its mesh: sums and gathers are collectives."""
    assert isinstance(value, _KINDS)
    spec = layout.spec
    if (value.placements, value.device_mesh) == (spec.placements, spec.mesh):
        return value
    return value.redistribute(spec.mesh, spec.placements)
