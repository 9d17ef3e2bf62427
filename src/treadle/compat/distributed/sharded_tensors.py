"""DTensors: tensors of which each rank of a mesh holds a part, or a summand.

::

    p                a weight f32[8, 16], Shard(0) over 4 ranks
    local_of(p)      f32[2, 16], what this rank holds; writes to it are writes to ``p``
    layout_of(p)     the mesh, Shard(0), f32[8, 16]
    layout.around(l) a DTensor like ``p`` whose part here is ``l``; nothing is sent
"""

import importlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, final

import torch
from torch import Tensor, nn

from treadle.compat.distributed.collectives import AVAILABLE

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = frozenset({Tensor, nn.Parameter})


def _kinds() -> tuple[type["DTensor"], ...]:
    """DTensors; none as long as nobody has imported them, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = None if module is None else vars(module).get("DTensor")
    return () if kind is None else (kind,)


def load_sharded_tensors() -> None:
    """Import DTensors, where this PyTorch has them."""
    if AVAILABLE:
        importlib.import_module("torch.distributed.tensor")


@final
@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """What a DTensor says of itself beside its part here: ``spec`` has its mesh, the placement
    along each axis of the mesh, and the type of the whole."""

    spec: Any

    def around(self, local: Tensor) -> Tensor:
        """A DTensor that holds ``local`` itself, and wants no gradient."""
        from torch.distributed.tensor import DTensor

        kind: Any = DTensor
        return kind(local, self.spec, requires_grad=False)

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


def is_sharded(value: object) -> TypeGuard["DTensor"]:
    """Whether it is a DTensor."""
    return type(value) not in _PLAIN and isinstance(value, _kinds())


def layout_of(value: object) -> ShardedLayout | None:
    """``None`` for what is no DTensor."""
    if not is_sharded(value):
        return None
    return ShardedLayout(value._spec)


def local_of(value: Tensor) -> Tensor:
    """What this rank holds of a DTensor, which is waited for if it is still on its way; any other
    tensor itself."""
    if not is_sharded(value):
        return value
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = value._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def rows_of(local: Tensor, mesh: "DeviceMesh", whole: Tensor) -> Tensor:
    """A DTensor of the shape of ``whole`` whose rows are divided along a mesh of one dim; ``local``
    are those of this rank. Nothing is sent."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        local, mesh, (Shard(0),), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def gathered(value: Tensor) -> Tensor:
    """All of a DTensor; a collective of the ranks of its mesh."""
    assert is_sharded(value)
    return value.full_tensor()


def placed_like(whole: Tensor, like: Tensor) -> Tensor:
    """``whole``, which every rank has, as a DTensor placed like another; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    assert is_sharded(like)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def sharded_entries() -> tuple[tuple[type, str], ...]:
    """Methods of a DTensor that ask no mode."""
    if not AVAILABLE:
        return ()
    from torch.distributed.tensor import DTensor

    names = "to_local", "full_tensor", "redistribute"
    return tuple([(DTensor, name) for name in names])


def draw_methods() -> tuple[tuple[type, str], ...]:
    """What DTensor calls to draw random numbers on devices where each rank draws its own part of
    one stream: it reads and sets the state of the device's generator."""
    if not AVAILABLE:
        return ()
    from torch.distributed.tensor._random import OffsetBasedRNGTracker

    return (OffsetBasedRNGTracker, "__init__"), (OffsetBasedRNGTracker, "_distribute_region")


def placed_as(value: Tensor, layout: ShardedLayout) -> Tensor:
    """``value``, a DTensor, with other placements on its mesh: sums and gathers are collectives."""
    assert is_sharded(value)
    spec = layout.spec
    if (value.placements, value.device_mesh) == (spec.placements, spec.mesh):
        return value
    return value.redistribute(spec.mesh, spec.placements)
