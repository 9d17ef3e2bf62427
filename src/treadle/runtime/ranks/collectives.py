"""Collectives into treadle's memory, and the waits for them.

::

    treadle_c10d::all_reduce.out(x, "sum", "0", out=r)       starts; ``r`` and ``x`` are in use
    treadle_c10d::wait.out(r, [x], out=r)                    from here on both are as any other

A start returns when the backend has received the tensors. On a GPU, a wait blocks the stream, and
not the host. ``x`` is an argument of the wait, so that its bytes are not reused until then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, distributed

from treadle.compat.distributed.collectives import (
    AVAILABLE,
    all_gather,
    collective_op,
    group_named,
    reduce_scatter,
    reduction_named,
)
from treadle.compat.operators.custom_op import CustomOp
from treadle.runtime.execute.in_flight import IN_FLIGHT
from treadle.runtime.ranks.group_store import Awaited
from treadle.runtime.ranks.peers import Peers, peers_of


@final
@dataclass(frozen=True, slots=True)
class _Started:
    """A collective in flight; ``peers``: the other ranks, if the host itself waits for them."""

    work: "distributed.Work"
    awaited: Awaited
    peers: Peers | None

    @staticmethod
    def now(
        out: Tensor, work: "distributed.Work", kind: str, group: "distributed.ProcessGroup"
    ) -> "_Started":
        if group.size() == 1:
            return _Started(work, _ALONE, None)
        peers = peers_of(group, out.device)
        awaited = peers.started(f"{kind} of {out.numel()} elements")
        return _Started(work, awaited, peers if out.is_cpu else None)

    @property
    def needs_others(self) -> bool:
        return True

    def wait(self) -> None:
        """Wait until it is over; ``GroupFailure`` if a rank is gone."""
        if self.peers is None:
            self.work.wait()
        else:
            self.peers.wait(self.work, self.awaited)


_ALONE = Awaited(0, 0, "", 0.0)


def _note(
    out: Tensor,
    work: "distributed.Work | None",
    kind: str,
    group: "distributed.ProcessGroup",
) -> None:
    """Note a collective in flight, if this rank is in the group."""
    if work is not None and not out.numel():
        work.wait()  # there is no address to find it by
    elif work is not None:
        IN_FLIGHT.add(out, _Started.now(out, work, kind, group))


def _flat(x: Tensor) -> Tensor:
    """The elements in memory order: a sum does not depend on shapes."""
    return x.as_strided((x.numel(),), (1,)) if x.numel() else x.reshape(0)


def _put(x: Tensor, out: Tensor) -> Tensor:
    """Copy ``x`` into the memory of ``out``, in memory order."""
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return _flat(out)


def _all_reduce(x: Tensor, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    target, group = _put(x, out), group_named(group_name)
    op = reduction_named(reduce_op)
    work = distributed.all_reduce(target, op=op, group=group, async_op=True)
    _note(out, work, "all_reduce", group)
    return out


def _broadcast(x: Tensor, src: int, group_name: str, *, out: Tensor) -> Tensor:
    target, group = _put(x, out), group_named(group_name)
    work = distributed.broadcast(target, group=group, group_src=src, async_op=True)
    _note(out, work, "broadcast", group)
    return out


def _reduce_scatter(
    x: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor
) -> Tensor:
    group, op = group_named(group_name), reduction_named(reduce_op)
    work = reduce_scatter(_flat(out), _flat(x), op=op, group=group, async_op=True)
    _note(out, work, "reduce_scatter", group)
    return out


def _all_gather(x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    work = all_gather(_flat(out), _flat(x), group=group, async_op=True)
    _note(out, work, "all_gather", group)
    return out


def _all_to_all(
    x: Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    group_name: str,
    *,
    out: Tensor,
) -> Tensor:
    group = group_named(group_name)
    work = distributed.all_to_all_single(
        out, x, list(output_sizes), list(input_sizes), group=group, async_op=True
    )
    _note(out, work, "all_to_all", group)
    return out


def _wait(started: Tensor, inputs: Sequence[Tensor], *, out: Tensor) -> Tensor:
    if not IN_FLIGHT.wait(started):  # what PyTorch allocated waits by PyTorch's own
        collective_op("wait_tensor")(started)
    if out.data_ptr() != started.data_ptr():
        out.copy_(started)
    return out


_KERNELS: Mapping[str, Callable[..., Tensor]] = {
    "all_reduce.out(Tensor x, str reduce_op, str group_name": _all_reduce,
    "reduce_scatter_tensor.out(Tensor x, str reduce_op, int group_size, str group_name": (
        _reduce_scatter
    ),
    "all_gather_into_tensor.out(Tensor x, int group_size, str group_name": _all_gather,
    "broadcast.out(Tensor x, int src, str group_name": _broadcast,
    "all_to_all_single.out(Tensor x, int[] output_sizes, int[] input_sizes, str group_name": (
        _all_to_all
    ),
    "wait.out(Tensor started, Tensor[] inputs": _wait,
}

if AVAILABLE:
    for _start, _kernel in _KERNELS.items():
        _schema = f"{_start}, *, Tensor(a!) out) -> Tensor(a!)"
        CustomOp(_schema, kernel=_kernel, namespace="treadle_c10d")
