"""Kernels to C++ text for OpenMP.

::

    rows kernel:     each thread takes rows; a row runs one loop over the columns per pass
    flat kernel:     (one row, nothing reduced) threads share the columns; the size is an argument
    columns kernel:  each thread takes blocks of columns and runs down the rows

Kernels of equal text share one function, and a launch runs many instances of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.codegen.common import bytes_moved, instances, reads_of, split_columns, writes_of
from treadle.codegen.cpp_columns import BLOCK, Columns
from treadle.codegen.cpp_expr import STORED_TYPES
from treadle.codegen.cpp_prelude import PRELUDE, ROUND_EACH
from treadle.codegen.cpp_rows import RowLoops, rows_text
from treadle.loop.expr import Reduce
from treadle.loop.kernel import Definition, Kernel, KernelKind
from treadle.loop.program import Buffer
from treadle.runtime.artifact import Language, Launch, Source, joined
from treadle.util.extents import dims_in, sample_of

_SMALL = 1 << 14  # elements below which one thread is faster
_LEAST = 16  # columns of the shortest inner loop worth a nest of its own
_UNITS = 4


@dataclass(frozen=True, slots=True)
class Rendered:
    """A kernel as text with ``NAME`` for its name, and how to call it."""

    text: str
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]


def render_kernel(kernel: Kernel, buffers: Mapping[str, Buffer]) -> Rendered:
    """The function of one kernel. Kernels that differ in buffers alone give equal text."""
    names = tuple(dict.fromkeys((*reads_of(kernel), *writes_of(kernel))))
    flat = is_flat(kernel)
    shared, lines = _loops(kernel, {name: f"b{n}" for n, name in enumerate(names)}, flat)
    pointers = [
        f"{STORED_TYPES[buffers[name].dtype]}* b{n} = "
        f"({STORED_TYPES[buffers[name].dtype]}*)p[i * {len(names)} + {n}];"
        for n, name in enumerate(names)
    ]
    work = kernel.rows.extent * kernel.cols.extent
    dims = dims_in([kernel.rows.extent, kernel.cols.extent, *_layouts(names, buffers)])
    own = [kernel.cols.extent] if flat else []
    condition = f"sizes[0] * instances > {_SMALL}" if flat else f"{work} * instances > {_SMALL}"
    text = "\n".join(
        [
            'extern "C" void NAME(void* const* p, const int64_t* sizes, int64_t instances) {',
            *(f"const int64_t {dim} = sizes[{len(own) + n}];" for n, dim in enumerate(dims)),
            *shared,
            f"#pragma omp parallel if ({condition})",
            "for (int64_t i = 0; i < instances; ++i) {",
            *pointers,
            *([f"const int64_t n = sizes[i * {len(own) + len(dims)}];"] if flat else []),
            *lines,
            "}",
            "}",
        ]
    )
    return Rendered(text, names, (*own, *dims))


def _layouts(names: Sequence[str], buffers: Mapping[str, Buffer]) -> Iterator[int]:
    for name in names:
        yield from (*buffers[name].shape, *buffers[name].strides)


def _loops(kernel: Kernel, names: Mapping[str, str], flat: bool) -> tuple[list[str], list[str]]:
    """What all threads share, and the loops."""
    if flat:
        return [], RowLoops(kernel, names, None).flat()
    if kernel.kind is KernelKind.COLUMNS:
        columns = Columns(kernel, names, split_columns(kernel, _LEAST, BLOCK))
        return columns.shared(), columns.text()
    rows = RowLoops(kernel, names, split_columns(kernel, _LEAST))
    return rows.shared(), rows_text(rows)


def is_flat(kernel: Kernel) -> bool:
    """One row and nothing reduced: the number of columns can be an argument."""
    reduced = any(isinstance(d, Definition) and isinstance(d.expr, Reduce) for d in kernel.body)
    return kernel.kind is KernelKind.ROWS and kernel.rows.extent == 1 and not reduced


def render_cpp(
    runs: Sequence[Sequence[Kernel]],
    buffers: Mapping[str, Buffer],
    offsets: Mapping[str, int],
    *,
    contract: bool = True,
) -> tuple[tuple[Source, ...], tuple[tuple[Launch, ...], ...]]:
    """All units, and for each run of kernels its launches, in order.

    A run is a stretch of the plan without library calls. ``contract``: let a product and a sum
    round once.
    """
    names: dict[str, str] = {}
    launches: list[tuple[Launch, ...]] = []
    for run in runs:
        rendered = [render_kernel(kernel, buffers) for kernel in run]
        groups = instances(run, [each.text for each in rendered], buffers, offsets)
        made: list[Launch] = []
        for group in groups:
            text = rendered[group[0]].text
            name = names.setdefault(text, f"treadle_{len(names)}")
            kernels = [run[position] for position in group]
            made.append(
                Launch(
                    function=name,
                    buffers=tuple(rendered[position].buffers for position in group),
                    sizes=tuple(rendered[position].sizes for position in group),
                    kernels=tuple(kernel.name for kernel in kernels),
                    bytes_moved=sample_of(sum(bytes_moved(kernel, buffers) for kernel in kernels)),
                    origin=_origin(kernels[0]),
                )
            )
        launches.append(tuple(made))
    head = PRELUDE if contract else ROUND_EACH + PRELUDE
    return sources_of({name: text for text, name in names.items()}, head), tuple(launches)


def _origin(kernel: Kernel) -> str:
    return next((origin.where or origin.module for origin in kernel.origins), "")


def sources_of(texts: Mapping[str, str], head: str = PRELUDE) -> tuple[Source, ...]:
    """Functions by name, spread over a few units of about equal length, each after ``head``."""
    count = min(_UNITS, max(1, len(texts) // 4))
    units: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name, text in sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])):
        least = sizes.index(min(sizes))
        units[least].append(name)
        sizes[least] += len(text)
    return tuple(
        joined(
            Language.CPP,
            head + "\n",
            {name: texts[name].replace("NAME", name, 1) + "\n" for name in unit},
        )
        for unit in units
        if unit
    )
