"""A step as the compiler sees it: every fact has one text, and there is nothing else.

::

    fact   =  input | node | constant | result
    node   =  op  target  name  arguments  {key: value, ...}  type
    type   =  dtype  shape  strides  offset  storage  device  layout

The result of a compile depends only on the facts, so their digest names it. Source lines are not
facts: the step has the *number* of each line instead, and only output for people gets the lines
back, from the current run.
"""

import enum
import functools
import hashlib
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from treadle.algebra.extents import Size
from treadle.algebra.polynomial import to_data
from treadle.compat.operators.schemas import schema_of
from treadle.compat.tensors import storage_of
from treadle.graph.analysis.data_dependent import DataDependentOp
from treadle.graph.analysis.dynamic import is_sized, layout_of, offset_of
from treadle.graph.core.copying import copied
from treadle.graph.core.node_info import drop_notes, info, known_value, notes, with_info
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.signature import StepGraph
from treadle.util.errors import TreadleError, VerifyError
from treadle.util.generators import GeneratorRef

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_REFERENCE = re.compile("\u27e6(\\d+)\u27e7")


@dataclass(frozen=True, slots=True)
class SourceLines:
    """The user's lines of one run by number; ``⟦2⟧`` in a text stands for the third of them."""

    lines: tuple[str, ...] = ()

    def fill(self, text: str) -> str:
        """``text`` with every reference replaced by its line."""
        return _REFERENCE.sub(lambda reference: self.lines[int(reference[1])], text)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Errors from inside show the lines."""
        try:
            yield
        except TreadleError as error:
            error.rewrite(self.fill)
            raise


@dataclass(frozen=True, slots=True)
class CanonicalStep:
    """A step that has nothing but facts, the digests of these, and the lines it was written in."""

    step: StepGraph
    digest: str
    constants: str
    lines: SourceLines


def canonical(step: StepGraph) -> CanonicalStep:
    """A copy of ``step`` in which nothing is left that its digests do not tell.

    Notes on nodes that have no canonical text are dropped. ``VerifyError`` for arguments and
    values that have none.
    """
    numbers: dict[str, int] = {}
    holder: Any = nn.Module()
    graph, _ = copied(step.graph, holder)
    facts = _Facts()
    constants: list[str] = []
    for node in graph.nodes:
        _keep_facts(node, numbers)
        if node.op == "get_attr":
            constants.append(_take_constant(step.graph.owning_module, holder, str(node.target)))
    candidate = StepGraph(graph, step.signature, list(step.history))
    texts = [
        repr(step.signature),
        *(f"{kind.__module__}.{kind.__qualname__}" for kind in step.history),
        *(facts.of_node(node) for node in graph.nodes),
    ]
    return CanonicalStep(candidate, _digest(texts), _digest(constants), SourceLines(tuple(numbers)))


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _keep_facts(node: fx.Node, numbers: dict[str, int]) -> None:
    """Drop the notes of users' passes that have no text; the line of a node becomes its number."""
    drop_notes(node, [key for key, value in notes(node).items() if not _has_text(value)])
    line = info(node).where
    number = f"\u27e6{numbers.setdefault(line, len(numbers))}\u27e7" if line else ""
    with_info(node, where=number, asked_at=None)


def _has_text(value: object) -> bool:
    try:
        text_of_value(value)
    except VerifyError:
        return False
    return True


def _take_constant(owner: nn.Module | None, holder: nn.Module, path: str) -> str:
    """Put a constant into the module of the copy, alone; its value as a text."""
    value = operator.attrgetter(path)(owner)
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in holder._modules:
            holder.add_module(parent, nn.Module())
        holder = holder.get_submodule(parent)
    vars(holder)[name] = value
    if not isinstance(value, torch.Tensor):
        return f"{path}: {type(value).__qualname__}"  # lowering refuses it, with the user's line
    return f"{path}: {_contents(value)}"


def _contents(value: torch.Tensor) -> str:
    """Layout and digest of all bytes of a tensor that is there."""
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy()
    layout = value.dtype, tuple(value.shape), tuple(value.stride()), str(value.device)
    return f"{layout} {hashlib.sha256(raw.data).hexdigest()}"


class _Facts:
    """Nodes as texts; storages are numbered in the order in which they first appear."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}

    def of_node(self, node: fx.Node) -> str:
        known = repr(info(node)), tuple(sorted(notes(node).items()))
        text = text_of_value((tuple(node.args), dict(node.kwargs), known))
        target = _target(node.target)
        value = self._value(known_value(node)) if node.op != "output" else ""
        return f"{node.op} {target} {node.name} {text} {value}"

    def _value(self, value: object) -> str:
        match value:
            case torch.Tensor():
                return self._tensor(value)
            case tuple() | list():
                kind = type(value).__name__
                return f"{kind}({', '.join(map(self._value, value))})"
            case _:
                return text_of_value(value)

    def _tensor(self, value: torch.Tensor) -> str:
        if value.layout is not torch.strided:
            return text_of_value((value.dtype, tuple(value.shape), value.layout, value.device))
        storage = storage_of(value)
        number = self._storages.setdefault(storage, len(self._storages))
        known = vars(value).get("constant")  # of a fake tensor: what it is known to be
        where = *layout_of(value), offset_of(value)
        flags = value.requires_grad, value.is_conj(), value.is_neg()
        text = _sized_text if is_sized(value) else _plain_text
        before, after = text(value.dtype, *where, value.device, *flags)
        return f"({before}, {number}, {after}, {'' if known is None else _contents(known)!r},)"


def _sized_text(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    device: torch.device,
    *flags: bool,
) -> tuple[str, str]:
    """What is said of a tensor before and after the number of its storage."""
    before, after = (dtype, shape, strides, offset), (device, *flags)
    return ", ".join(map(text_of_value, before)), ", ".join(map(text_of_value, after))


_plain_text = functools.lru_cache(maxsize=4096)(_sized_text)
"""Of sizes that are numbers: the values of a graph have few types."""


@functools.cache
def _schema_text(op: OpOverload) -> str:
    return str(schema_of(op))


def _target(target: object) -> str:
    if isinstance(target, OpOverload):
        return _schema_text(target)
    if isinstance(target, DataDependentOp):
        return f"at run time {_target(target.op)} {target.unsized}"
    if callable(target):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def text_of_value(value: object) -> str:
    """The one text of an argument, a note or a fact: values that differ have texts that differ.

    ``(1, 1.0, "1", True)``  ->  ``(1, 1.0, '1', True)``. ``VerifyError`` for kinds without a text.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is fx.Node:
        return f"%{value.name}"  # pyright: ignore[reportAttributeAccessIssue]
    if kind is tuple:  # these before what asks one class after another
        inside = ", ".join(map(text_of_value, value))  # pyright: ignore[reportArgumentType]
        return f"({inside},)"
    match value:
        case Size():
            return f"size {to_data(value.formula)!r}"
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case int() | float() | complex() | str() | bytes():  # kinds derived from these
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"device {value}"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return f"symbol {value}"
        case tuple() | list():
            inside = ", ".join(map(text_of_value, value))
            return f"({inside},)" if isinstance(value, tuple) else f"[{inside}]"
        case GeneratorRef():
            return str(value)
        case slice():
            return f"slice {text_of_value((value.start, value.stop, value.step))}"
        case Mapping():
            pairs = (f"{text_of_value(k)}: {text_of_value(v)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        case set() | frozenset():
            return "{" + ", ".join(sorted(map(text_of_value, value))) + "}"
        case _:
            raise VerifyError(f"{type(value).__qualname__} has no canonical text: {value!r}")
