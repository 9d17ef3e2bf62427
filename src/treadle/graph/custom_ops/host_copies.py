"""``treadle::to_host``, ``from_host`` and ``arrived``: a value that is on the host meanwhile.

::

    h = to_host(x)           starts: ``h`` may not be read yet
    w = arrived(h, x)        ``w`` is ``x``, on the host; until here ``x`` is needed
    s = from_host(w, device) starts: ``s`` may not be read yet
    y = arrived(s, w)        ``y`` is ``x``

A start and its wait are two nodes, as of a collective: what stands between them runs during the
copy. Where the step runs on the host itself, these are copies there.
"""

import torch
from torch import Tensor, fx

from treadle.compat.operators.custom_op import CustomOp

_WHY = "a copy between the device and the host"


def _on_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


def _on_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


TO_HOST = CustomOp(
    "to_host(Tensor x) -> Tensor",
    fake=_on_host,
    kernel=lambda x: x.to("cpu", copy=True),
    holds=lambda: 0,
    library=_WHY,
)
FROM_HOST = CustomOp(
    "from_host(Tensor x, Device device) -> Tensor",
    fake=_on_device,
    kernel=lambda x, device: x.to(device, copy=True),
    holds=lambda: 0,
    library=_WHY,
)
ARRIVED = CustomOp(
    "arrived(Tensor started, Tensor source) -> Tensor",
    fake=lambda started: torch.empty_like(started),
    kernel=lambda started, source: started.clone(),
    holds=lambda: 0,
    library="the end of a copy between the device and the host",
)
HOST_COPIES = (TO_HOST, FROM_HOST, ARRIVED)


def is_on_host(node: fx.Node) -> bool:
    """Whether the value of a node is on the host meanwhile, and takes no memory of the device."""
    if node.target is ARRIVED.op:
        started = node.args[0]
        return isinstance(started, fx.Node) and started.target is TO_HOST.op
    return node.target is TO_HOST.op
