"""Where the bytes of tensors are, and results whose bytes are nobody else's."""

from collections.abc import Iterable

from torch import Tensor


def memory_start(tensor: Tensor) -> int:
    """The address of the first byte of its storage, which views share; 0 if there are no bytes."""
    return tensor.untyped_storage().data_ptr()


def with_own_memory(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """The results, those copied that have the memory of an input or of an earlier result."""
    taken = {memory_start(tensor) for tensor in inputs}
    tensors: list[Tensor] = []
    for tensor in results:
        start = memory_start(tensor)
        tensors.append(tensor.clone() if start in taken and start else tensor)
        taken.add(start)
    return tensors
