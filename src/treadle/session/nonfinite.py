"""The first value of a step that is NaN, or infinite.

::

    x            finite
    exp(x)       inf      <- the origin: nothing that it is made of is infinite
    inf - inf    NaN      <- what is found: nothing that it is made of is NaN

Infinite values alone are not an error: attention masks contain them. They are reported if one
reaches a result, a parameter or optimizer state.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, fx

from treadle.capture.captured import Captured
from treadle.capture.python_state.flatten import flatten
from treadle.graph.analysis.execute import values_of
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import operation_name
from treadle.graph.core.signature import StepGraph
from treadle.report.host_steps import HostStep

Kind = Literal["NaN", "inf"]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The value where a step stops being finite: ``count`` of its ``total`` elements are ``kind``.

    ``name``: the operation (``"div.Tensor"``), or the user's name of an input that is not finite
    itself (``"argument x"``, ``"0.weight"``). ``phase``: ``"input"``, ``"forward"``, ``"backward"``
    or ``"optimizer"``; ``module`` and ``where``: the path of the module and the user's line, empty
    if unknown; ``kernel``: the compiled function or library call that computes it, empty for inputs
    and if unknown. ``origin``: for a NaN, the source of the infinite value that caused it, if there
    is one. ``str`` describes all of it.
    """

    name: str
    kind: Kind
    count: int
    total: int
    phase: str
    module: str = ""
    where: str = ""
    kernel: str = ""
    origin: "NonFinite | None" = None

    def __str__(self) -> str:
        what = "input" if self.phase == "input" else f"result of {self.name} ({self.phase})"
        subject = f"{what} {self.name}" if self.phase == "input" else what
        lines = [f"{subject}: {self.count} of {self.total} values are {self.kind}"]
        lines += [f"  in module {self.module}"] if self.module else []
        lines += [f"  at {self.where}"] if self.where else []
        lines += [f"  computed by {self.kernel}"] if self.kernel else []
        if self.origin is not None:
            first, *rest = str(self.origin).splitlines()
            lines += [f"  caused by infinite values, which first appear here: {first}"]
            lines += [f"  {line}" for line in rest]
        return "\n".join(lines)


def first_nonfinite(
    captured: Captured, inputs: Sequence[Tensor], hosts: Sequence[HostStep]
) -> NonFinite | None:
    """The graph, operation by operation by PyTorch's kernels, on these inputs, which stay as they
    are, and so do the generators of random numbers. ``hosts``: the compiled steps, to name one."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    random = torch.get_rng_state()
    own = [(generator, generator.get_state()) for generator in captured.generators]
    try:
        found = _Search(captured.step).run(inputs)
    finally:
        torch.set_rng_state(random)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in own:
            generator.set_state(state)
    return None if found is None else _with_kernels(found, hosts)


@final
class _Search:
    """One run. ``_infinite``: of each node with an infinite value, where that began."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        entries = zip(step.placeholders, step.signature.inputs, strict=True)
        self._inputs = {node: entry.name for node, entry in entries}
        self._infinite: dict[fx.Node, NonFinite] = {}

    def run(self, inputs: Sequence[Tensor]) -> NonFinite | None:
        for node, value in values_of(self._step, [tensor.detach() for tensor in inputs]):
            if not _is_unset(node):
                found = self._look(node, _floats(value))
                if found is not None:
                    return found
        reached = (self._infinite.get(node) for node in self._step.returned if node is not None)
        return next((found for found in reached if found is not None), None)

    def _look(self, node: fx.Node, tensors: Sequence[Tensor]) -> NonFinite | None:
        """The NaN that begins at ``node``, if one does."""
        if all(bool(tensor.isfinite().all()) for tensor in tensors):
            return None
        origins = (self._infinite.get(operand) for operand in node.all_input_nodes)
        origin = next((found for found in origins if found is not None), None)
        total = sum(tensor.numel() for tensor in tensors)
        count = sum(int(tensor.isnan().sum()) for tensor in tensors)
        if count:
            return replace(self._place(node), count=count, total=total, origin=origin)
        count = sum(int(tensor.isinf().sum()) for tensor in tensors)
        found = replace(self._place(node), kind="inf", count=count, total=total)
        self._infinite[node] = origin or found
        return None

    def _place(self, node: fx.Node) -> NonFinite:
        if node in self._inputs:
            return NonFinite(self._inputs[node], "NaN", 0, 0, "input")
        known = info(node)
        name = operation_name(node.target)
        return NonFinite(name, "NaN", 0, 0, known.phase, known.module, known.where)


def _is_unset(node: fx.Node) -> bool:
    """Whether it is memory that nobody has written yet."""
    return operation_name(node.target).startswith(("empty", "new_empty"))


def _floats(value: Any) -> list[Tensor]:
    leaves: Iterable[object] = flatten(value)[0]
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and (leaf.is_complex() or (leaf.is_floating_point() and leaf.element_size() > 1))
    ]


def _with_kernels(found: NonFinite, hosts: Sequence[HostStep]) -> NonFinite:
    origin = None if found.origin is None else _with_kernels(found.origin, hosts)
    return replace(found, kernel=_kernel_of(found, hosts), origin=origin)


def _kernel_of(found: NonFinite, hosts: Sequence[HostStep]) -> str:
    """The first compiled step of its phase that holds such an operation, of its line if there is
    one; nothing where passes have put another in its place."""
    own = [host for host in hosts if host.phase == found.phase and _computes(host, found.name)]
    of_line = [host for host in own if host.where == found.where]
    return next((host.name for host in (*of_line, *own)), "")


def _computes(host: HostStep, operation: str) -> bool:
    return operation in host.info.operations or operation in _names(host)


def _names(host: HostStep) -> Iterator[str]:
    """Of a library call: ``aten.mm.default`` is ``mm``."""
    yield host.name.removeprefix("aten.").removesuffix(".default")
