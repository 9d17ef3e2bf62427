"""Batches padded to a few sizes, so that few programs serve them."""

import bisect
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.nn import functional as F

from treadle.session.variants.shapes import Dynamic, Found, found_in
from treadle.util.errors import TreadleError, require

_NO_LABEL = -100  # what PyTorch's losses ignore unless they are told otherwise


def pad_to_bucket(
    batch: Mapping[str, Tensor],
    shapes: Dynamic,
    /,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    labels: str | Collection[str] = "labels",
    ignore_index: int = _NO_LABEL,
    fill: Mapping[str, float] | None = None,
) -> dict[str, Tensor]:
    """Pad the tensors of a batch at the end of their dims, to the largest size of their bucket.

    ::

        shapes = treadle.dynamic(
            {"tokens": ("batch", "time"), "labels": ("batch", "time")},
            batch=(1, 64), time=(1, 128, 256, 512),
        )
        step(**treadle.pad_to_bucket({"tokens": tokens, "labels": labels}, shapes))

    - ``batch``: tensors by the names in ``shapes``, or by the key in ``"batch['tokens']"``. Other
      tensors are returned unchanged.
    - ``sizes``: for each dim, the sizes to pad to, instead of its buckets:
      ``{"time": (128, 512)}``.
    - ``labels``: one name or several, which are padded with ``ignore_index``.
    - ``fill``: the padding value of other tensors, by name. Default: zeros, and ``False`` in masks.

    A mean that ignores those labels, such as that of ``cross_entropy``, is the mean over the real
    labels. Padding does not change the loss if no real position attends to a padded one (causal
    attention, or a mask). Sizes that ``shapes`` does not declare raise TR-113; a size larger than
    the last of ``sizes`` raises TR-001.
    """
    ignored = {labels} if isinstance(labels, str) else set(labels)
    named = {name: _argument(name, shapes) for name in batch}
    present = {path: shapes.arguments[path] for path in named.values() if path is not None}
    pairs = [(path, batch[name]) for name, path in named.items() if path is not None]
    found = found_in(Dynamic(present, shapes.ranges), pairs)
    ends = {name: _end(name, size, shapes, sizes or {}) for name, size in found.sizes.items()}
    padded = dict(batch)
    for at, (name, _) in enumerate((n, path) for n, path in named.items() if path is not None):
        value = (fill or {}).get(name, ignore_index if name in ignored else 0)
        padded[name] = _padded(batch[name], at, found, ends, value)
    return padded


def _argument(name: str, shapes: Dynamic) -> str | None:
    """What ``shapes`` calls an entry of the batch."""
    if name in shapes.arguments:
        return name
    inside = [path for path in shapes.arguments if path.endswith(f"[{name!r}]")]
    several = TreadleError(
        f"{name} may be any of {', '.join(inside)}",
        code="TR-001",
        remedy="name the entries of the batch as treadle.dynamic does",
    )
    require(len(inside) < 2, several)
    return inside[0] if inside else None


def _end(name: str, size: int, shapes: Dynamic, sizes: Mapping[str, Sequence[int]]) -> int:
    """To which size a dim is padded."""
    if name not in sizes:
        return shapes.bucket(name, size)[1] if len(shapes.ranges[name]) > 2 else size
    known = sorted(sizes[name])
    at = bisect.bisect_left(known, size)
    beyond = TreadleError(
        f"{name} is {size}, larger than the last of {', '.join(map(str, known))}",
        code="TR-001",
        remedy="add a larger size, or truncate the batch",
    )
    require(at < len(known), beyond)
    return known[at]


def _padded(tensor: Tensor, at: int, found: Found, ends: Mapping[str, int], value: float) -> Tensor:
    missing = [0] * tensor.ndim
    for dim, name in found.leaves[at]:
        missing[dim] = ends[name] - int(tensor.shape[dim])
    if not any(missing):
        return tensor
    behind = [each for count in reversed(missing) for each in (0, count)]
    return F.pad(tensor, behind, value=value)
