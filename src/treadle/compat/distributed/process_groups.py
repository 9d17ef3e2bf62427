"""What a process group has besides its collectives: ranks, a store, and a limit in time."""

from typing import Any, cast

import torch
from torch import distributed


def store_of(group: "distributed.ProcessGroup") -> "distributed.Store":
    """The key-value store of this group's own, which all its ranks reach."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


def host_of(store: "distributed.Store") -> str:
    """The host that holds the store; empty for one that is a file or memory of this process."""
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, distributed.TCPStore) else ""


def timeout_of(group: "distributed.ProcessGroup", device: torch.device) -> float:
    """After how many seconds a collective of the group on ``device`` gives up."""
    backend = cast(Any, group)._get_backend(device)
    return backend.options._timeout.total_seconds()


def ranks_of(group: "distributed.ProcessGroup") -> tuple[int, ...]:
    """The ranks of the group by their numbers in the whole world, in the group's order."""
    return tuple(distributed.get_process_group_ranks(group))
