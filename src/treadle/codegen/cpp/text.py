"""Kernels to C++ text for OpenMP; how the loops run is ``cpp_rows.py`` and ``cpp_columns.py``.

Kernels that differ in buffers alone share one function, and a launch runs many instances of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.codegen.cpp.columns import Columns
from treadle.codegen.cpp.expr import STORED_TYPES
from treadle.codegen.cpp.prelude import PRELUDE
from treadle.codegen.cpp.rows import RowLoops, rows_text
from treadle.codegen.printer import launch_of
from treadle.loop.kernel import Kernel, KernelKind, KernelLaunch, LoopForm
from treadle.loop.nest import arguments_of, dims_of
from treadle.loop.program import Buffer
from treadle.runtime.store.artifact import Launch, Source, joined
from treadle.targets.cpu import CPP

_UNITS = 4


@dataclass(slots=True)
class CppPrinter:
    """The C++ of one plan. ``contract``: whether a product and a sum may round once."""

    buffers: Mapping[str, Buffer]
    contract: bool
    texts: dict[int, str] = field(default_factory=dict[int, str])

    def launch(self, launch: KernelLaunch) -> Launch:
        """How the host starts these kernels; their function is printed where it is new."""
        kernel = launch.kernels[0]
        name = f"treadle_{launch.function}"
        if launch.function not in self.texts:
            text = function_text(name, kernel, self.buffers, contract=self.contract)
            self.texts[launch.function] = text
        sizes = tuple(sizes_of(kernel, self.buffers) for kernel in launch.kernels)
        return launch_of(launch, name, sizes, self.buffers)

    def sources(self) -> tuple[Source, ...]:
        """A few units of about equal length, which compile side by side."""
        return _units({f"treadle_{number}": text for number, text in self.texts.items()}, PRELUDE)


def sizes_of(kernel: Kernel, buffers: Mapping[str, Buffer]) -> tuple[int, ...]:
    """What a function is told of sizes: the columns of a flat kernel, and the dims of the call."""
    own = (kernel.cols.extent,) if _is_flat(kernel) else ()
    return (*own, *dims_of(kernel, buffers))


def _is_flat(kernel: Kernel) -> bool:
    return kernel.scheduled.form is LoopForm.FLAT


def function_text(
    name: str, kernel: Kernel, buffers: Mapping[str, Buffer], *, contract: bool
) -> str:
    """The function of one kernel, called ``name``."""
    names = arguments_of(kernel)
    flat = _is_flat(kernel)
    shared, lines = _loops(kernel, {buffer: f"b{n}" for n, buffer in enumerate(names)}, contract)
    pointers = [
        f"{STORED_TYPES[buffers[buffer].dtype]}* b{n} = "
        f"({STORED_TYPES[buffers[buffer].dtype]}*)p[i * {len(names)} + {n}];"
        for n, buffer in enumerate(names)
    ]
    dims = dims_of(kernel, buffers)
    work = "sizes[0]" if flat else f"{kernel.rows.extent * kernel.cols.extent}"
    return "\n".join(
        [
            f'extern "C" void {name}(void* const* p, const int64_t* sizes, int64_t instances) {{',
            *(f"const int64_t {dim} = sizes[{flat + n}];" for n, dim in enumerate(dims)),
            *shared,
            f"#pragma omp parallel if ({work} * instances > {kernel.scheduled.serial_below})",
            "for (int64_t i = 0; i < instances; ++i) {",
            *pointers,
            *([f"const int64_t n = sizes[i * {1 + len(dims)}];"] if flat else []),
            *lines,
            "}",
            "}\n",
        ]
    )


def _loops(kernel: Kernel, names: Mapping[str, str], contract: bool) -> tuple[list[str], list[str]]:
    """What all threads share, and the loops."""
    if kernel.kind is KernelKind.COLUMNS:
        return [], Columns(kernel, names, contract=contract).text()
    rows = RowLoops(kernel, names, contract=contract)
    return rows.shared(), rows_text(rows)


def _units(texts: Mapping[str, str], head: str) -> tuple[Source, ...]:
    count = min(_UNITS, max(1, len(texts) // 4))
    units: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name, text in sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])):
        least = sizes.index(min(sizes))
        units[least].append(name)
        sizes[least] += len(text)
    return tuple(
        joined(CPP, head + "\n", {name: texts[name] for name in unit}) for unit in units if unit
    )
