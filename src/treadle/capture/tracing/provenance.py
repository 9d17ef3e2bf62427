"""The user's line and the module that create each node of a trace."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GradientNode

from treadle.capture.explain_errors import Line, running_line, show_line
from treadle.capture.python_state.flatten import flatten_containers
from treadle.compat.tracing import traced_nodes


@final
class Provenance:
    """The events of one run. ``lines`` and ``modules``: the line and the module from each of some
    nodes on."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.lines: list[tuple[int, Line]] = [(0, ("", 0))]
        self.modules: list[tuple[int, str]] = [(0, "")]
        self.listen: Callable[[], None] = lambda: None  # in a thread of the engine's
        self._names = {
            id(module): f"{prefix}.{name}".strip(".")
            for prefix, model in models.items()
            for name, module in model.named_modules()
        }
        self._inside = [""]  # modules, the innermost last
        self._backward_at: Line | None = None
        self._makers: dict[GradientNode, tuple[Line, str]] = {}
        self._followed: set[GradientNode] = set()

    def line(self) -> str:
        """The line that made the last node."""
        return show_line(self.lines[-1][1])

    def note_line(self) -> None:
        """The line of the user's that runs now makes the nodes from here on. While a backward runs,
        that is one of a hook: what PyTorch calls itself is of the operation whose gradient it
        computes."""
        line = running_line()
        if line != self._backward_at:
            self._note(line, self.modules[-1][1])

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """While inside, the line of the user's that runs now waits for a backward."""
        before, self._backward_at = self._backward_at, running_line()
        try:
            yield
        finally:
            self._backward_at = before

    def note_module(self) -> None:
        """The innermost module makes the nodes from here on."""
        self.modules.append((traced_nodes(), self._inside[-1]))

    def enter(self, module: nn.Module, args: object, /) -> None:
        """A hook before a module's ``forward``."""
        self._inside.append(self._names.get(id(module), self._inside[-1]))
        self.note_module()

    def leave(self, module: nn.Module, args: object, result: object, /) -> None:
        """A hook after it."""
        self._inside.pop()
        self.note_module()

    def note_made(self, result: object) -> None:
        """The line and the module that run now made these tensors: their gradients are their
        doing as well. Without gradients nothing has one, and a view of a view that was written to
        may not even be asked."""
        if not torch.is_grad_enabled():
            return
        results = [result] if isinstance(result, Tensor) else flatten_containers(result)[0]
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._makers.setdefault(tensor.grad_fn, (self.lines[-1][1], self._inside[-1]))

    def follow(self, roots: Sequence[object]) -> None:
        """When a gradient is computed, the line of its forward operation is the one that runs,
        and so is its module. What a composite operation did inside has those of what reads it."""
        tensors = [
            tensor for tensor in flatten_containers(list(roots))[0] if isinstance(tensor, Tensor)
        ]
        now = self.lines[-1][1], self._inside[-1]
        left = [(tensor.grad_fn, now) for tensor in tensors]
        while left:
            node, maker = left.pop()
            if node is None or node in self._followed:
                continue
            self._followed.add(node)
            maker = self._makers.get(node, maker)
            node.register_prehook(functools.partial(self._at_gradient, *maker))
            left += [(function, maker) for function, _ in node.next_functions]

    def _at_gradient(self, line: Line, module: str, _: object) -> None:
        self.listen()
        self._note(line, module)

    def _note(self, line: Line, module: str) -> None:
        if line != self.lines[-1][1]:
            self.lines.append((traced_nodes(), line))
        if module != self.modules[-1][1]:
            self.modules.append((traced_nodes(), module))
