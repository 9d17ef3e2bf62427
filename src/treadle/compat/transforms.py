"""Tensors within ``torch.func``."""

from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch.autograd import forward_ad


def unwrapped(tensor: Tensor) -> Tensor:
    """What the wrappers of ``torch.func`` around a tensor hold, inside all of them."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs."""
    return functorch.maybe_current_level() is not None


def tensor_entries() -> tuple[tuple[object, str], ...]:
    """Functions of a tensor first that ``torch.func`` calls without asking any mode."""
    return (
        (eager_transforms, "_wrap_for_grad"),
        (functorch_vmap, "_add_batch_dim"),
        (forward_ad, "make_dual"),
    )
