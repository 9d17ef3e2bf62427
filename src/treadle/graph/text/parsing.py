"""A step from its text: ``parse(show(step, exact=True))`` shows the same and computes the same.

::

    line      =  dim | input | operation | result | write | "#" anything
    input     =  name ":" type  ["#" ["uneven"] ["sharded"] role [name of the user's]]
    operation =  name ":" type "=" call  ["#" note]
    call      =  target "(" arguments ")"  |  name "[" number "]"  |  "constant" path numbers
    result    =  "return" "[" arguments "]"  ["#" "[" quoted names "]"]
    write     =  name "<-" name  ["#" name of the user's]

``graph/text/exact.py`` defines how types, arguments and notes are written, ``size_text.py`` how
dims and sizes. Parts that ``show(step)`` leaves out have default values: contiguous, on the CPU,
forward. Values are recomputed, operation by operation, and a type that differs from the text is an
error. Every input has its own memory, and no pass has run.
"""

import operator
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from treadle.algebra.extents import same_sizes
from treadle.compat.fake import FakeTensorMode, symbolic_mode, without_words
from treadle.compat.operators.schemas import enum_given_as_number
from treadle.graph.analysis.dynamic import SampleMode, Symbols, pair
from treadle.graph.core.node_info import set_value, value_of, with_info
from treadle.graph.core.operators import OpOverload, is_mutable
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.core.types import show_type, type_of_tensor
from treadle.graph.core.values import compute
from treadle.graph.core.verify import PHASES, verify
from treadle.graph.text.exact import NOTES, operation_of, operation_text
from treadle.graph.text.type_text import TensorText, TypeReader, TypeText, fits
from treadle.util.literals import DOTTED
from treadle.util.scanner import Scanner

_VALUE = re.compile(r"[^\W\d]\w*(?:\.\d+)?")
_NOTE = re.compile(r"-?[\w.]+")
_REMEDY = 'give the text of step.graph("captured"), or a file that TREADLE_DUMP wrote'


def parse(text: str) -> StepGraph:
    """The step that ``text`` shows. ``ParseError`` TR-007 names the line and the column."""
    scanner = Scanner(text, _REMEDY)
    reader = _Reader(scanner)
    while not scanner.at_end():
        if not scanner.at_end_of_line() and not scanner.sees("#"):
            reader.line()
        elif scanner.sees("#"):
            scanner.rest()
        scanner.next_line()
    return reader.finished()


@dataclass
class _Reader:
    """A step that is being made, line by line."""

    scanner: Scanner
    owner: Any = field(default_factory=nn.Module)
    values: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    inputs: list[Input] = field(default_factory=list[Input])
    outputs: list[Output] = field(default_factory=list[Output])
    returned: list[fx.Node | None] = field(default_factory=list[fx.Node | None])
    ended: bool = False  # whether results were said
    constants: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        self.graph = fx.Graph(owning_module=self.owner)
        self._types = TypeReader(self.scanner)
        self._literals, self._sizes = self._types.literals, self._types.sizes

    @cached_property
    def mode(self) -> FakeTensorMode:
        """That of the values; all dims have been read."""
        dims = self._sizes.dims.values()
        if not dims:
            return FakeTensorMode(allow_non_fake_inputs=True)
        return SampleMode(Symbols(*symbolic_mode(dims)))

    @property
    def _samples(self) -> SampleMode | None:
        return self.mode if isinstance(self.mode, SampleMode) else None

    def finished(self) -> StepGraph:
        if not self.ended:
            raise self.scanner.error("the text ends without a return")
        self.graph.output(tuple(self.returned))
        step = StepGraph(self.graph, Signature(tuple(self.inputs), tuple(self.outputs)))
        verify(step)
        return step

    def line(self) -> None:
        at = self.scanner.place()
        if not self.values and not self.ended and self._sizes.line():
            return
        if self.scanner.take("return"):
            self._results()
            return
        name = self.scanner.word(_VALUE, "a value, or a return")
        if self.scanner.sees("["):
            raise self.scanner.error(f"{name}[...] has no size before it runs, and cannot be read")
        if self.scanner.take("<-"):
            self._write(self._known(name, at), at)
        else:
            self._definition(name, at)

    def _definition(self, name: str, at: int) -> None:
        self.scanner.need(":")
        if name in self.values:
            raise self.scanner.error(f"{name!r} is defined twice", at)
        if self.ended:
            raise self.scanner.error("an operation after the return", at)
        kind = self._types.type()
        is_operation = self.scanner.take("=")
        operation = self._operation(kind) if is_operation else self._input(name, kind, at)
        self.values[name] = operation

    # inputs and outputs

    def _input(self, name: str, kind: TypeText, at: int) -> fx.Node:
        if not isinstance(kind, TensorText):
            raise self.scanner.error("an input is one tensor", at)
        if len(self.inputs) < len(self.values):
            raise self.scanner.error("an input after an operation", at)
        role, users, parts = Role.BATCH, "", set[str]()
        if self.scanner.take("#"):
            place, word = self.scanner.place(), self.scanner.word()
            while word in ("uneven", "sharded"):
                parts.add(word)
                place, word = self.scanner.place(), self.scanner.word()
            if word not in set(Role):
                raise self.scanner.error(f"{word!r} is not a role: {', '.join(Role)}", place)
            role, users = Role(word), self._users_name()
        self.inputs.append(Input(role, users or name, "sharded" in parts, "uneven" in parts))
        node = self.graph.placeholder(name)
        node.name = node.target = name  # also where FX would take another
        with self.mode:
            set_value(node, self._empty(kind, at, self._samples))
        return node

    def _empty(self, kind: TensorText, at: int, mode: SampleMode | None = None) -> Tensor:
        try:
            with torch.no_grad():
                return kind.empty(mode)
        except (RuntimeError, AssertionError, TypeError) as error:  # no such device, no such size
            text = f"there is no such tensor: {_first_line(error)}"
            raise self.scanner.error(text, at) from error

    def _users_name(self) -> str:
        quoted = self.scanner.quoted()
        return self.scanner.rest() if quoted is None else quoted

    def _results(self) -> None:
        self.ended = True
        self.scanner.need("[")
        nodes = self.scanner.several("]", self._result)
        names: list[Any] = [f"out{len(self.outputs) + at}" for at in range(len(nodes))]
        if self.scanner.take("#"):
            place = self.scanner.place()
            self.scanner.need("[")
            names = self.scanner.several("]", self.scanner.quoted)
            if len(names) != len(nodes) or None in names:
                raise self.scanner.error(f"the names of {len(nodes)} results are expected", place)
        self.returned += nodes
        self.outputs += [Output(name) for name in names]

    def _result(self) -> fx.Node | None:
        return None if self.scanner.take("None") else self._value()

    def _write(self, target: fx.Node, at: int) -> None:
        self.ended = True
        if target.op != "placeholder":
            raise self.scanner.error("only an input can be written", at)
        writes = self.graph.find_nodes(op="placeholder").index(target)
        if any(output.writes == writes for output in self.outputs):
            raise self.scanner.error("this input is written twice", at)
        place = self.scanner.place()
        node = self._value()
        new, old = value_of(node), value_of(target)
        if not isinstance(new, Tensor) or not _may_be_written(new, old):
            raise self.scanner.error(
                f"{show_type(new)} cannot be written to {show_type(old)}", place
            )
        name = self._users_name() if self.scanner.take("#") else self.inputs[writes].name
        self.returned.append(node)
        self.outputs.append(Output(name, writes))

    # operations

    def _operation(self, kind: TypeText) -> fx.Node:
        at = self.scanner.place()
        word = self.scanner.word(DOTTED, "an operation")
        if word == "constant" and not (self.scanner.sees("(") or self.scanner.sees("[")):
            node = self._constant(kind)
        elif self.scanner.sees("["):
            node = self._item(word, at)
        else:
            node = self._call(word, at)
        if not fits(kind, value_of(node)):
            shown_type = show_type(value_of(node))
            raise self.scanner.error(
                f"the operation gives {shown_type}, which is not what is said", at
            )
        with_info(node, phase="forward")
        if self.scanner.take("#"):
            self._note(node)
        return node

    def _call(self, word: str, at: int) -> fx.Node:
        target = operation_of(word)
        if target is None:
            raise self.scanner.error(f"there is no operation {word!r}", at)
        self.scanner.need("(")
        args, kwargs = self.scanner.arguments(self._argument)
        return self._computed(self.graph.call_function(target, args, kwargs), at)

    def _computed(self, node: fx.Node, at: int) -> fx.Node:
        if is_mutable(node):
            raise self.scanner.error("an operation that writes to its argument", at)
        if isinstance(node.target, OpOverload):
            name = enum_given_as_number(node.target, node.args, node.kwargs)
            if name:
                said = f"{operation_text(node.target)} does not take a number as {name}"
                raise self.scanner.error(said, at)
        try:
            with without_words():
                set_value(node, compute(node, self.mode))
        except Exception as error:  # of any operation's
            text = f"{operation_text(node.target)} does not take this: {_first_line(error)}"
            raise self.scanner.error(text, at) from error
        return node

    def _item(self, word: str, at: int) -> fx.Node:
        maker = self._known(word, at)
        self.scanner.need("[")
        number = self.scanner.integer()
        self.scanner.need("]")
        items = value_of(maker)
        if not isinstance(items, tuple | list) or not 0 <= number < len(items):
            raise self.scanner.error(f"{word!r} has no result {number}", at)
        node = self.graph.call_function(operator.getitem, (maker, number))
        set_value(node, items[number])
        return node

    def _constant(self, kind: TypeText) -> fx.Node:
        at = self.scanner.place()
        path = self.scanner.word(DOTTED, "the name of a constant")
        if not isinstance(kind, TensorText):
            raise self.scanner.error("a constant is one tensor", at)
        value = self._literals.numbers(self._empty(kind, at))
        if path not in self.constants:
            self.constants[path] = self.mode.from_tensor(value)
            if self._samples is not None:
                pair(self.constants[path], self._samples.symbols.mode.from_tensor(value))
            _put(self.owner, path, value)
        node = self.graph.create_node("get_attr", path)
        set_value(node, self.constants[path])
        return node

    def _note(self, node: fx.Node) -> None:
        while not self.scanner.at_end_of_line():
            if self.scanner.take("at"):
                with_info(node, where=self.scanner.rest())
                return
            at = self.scanner.place()
            word = self.scanner.word()
            if word in PHASES:
                with_info(node, phase=word)
            elif word in NOTES:
                with_info(node, **{word: self._noted()})
            else:
                raise self.scanner.error(f"{word!r} is neither a phase nor a note", at)
            if not self.scanner.take(","):
                return

    def _noted(self) -> Any:
        if self.scanner.sees(",") or self.scanner.at_end_of_line():
            return True
        quoted = self.scanner.quoted()
        if quoted is not None:
            return quoted
        word = self.scanner.word(_NOTE, "a note")
        return int(word) if word.lstrip("-").isdecimal() else word

    # values

    def _known(self, name: str, at: int) -> fx.Node:
        if name not in self.values:
            raise self.scanner.error(f"there is no value {name!r} here", at)
        return self.values[name]

    def _value(self) -> fx.Node:
        at = self.scanner.place()
        return self._known(self.scanner.word(_VALUE, "a value"), at)

    def _argument(self) -> Any:
        size = self._sizes.size()
        if size is not None:
            return size
        if self.scanner.take("["):
            return self.scanner.several("]", self._argument)
        if self.scanner.take("("):
            return tuple(self.scanner.several(")", self._argument))
        at = self.scanner.place()
        name = self.scanner.match(_VALUE)
        if name in self.values:
            return self.values[name]
        self.scanner.at = at
        return self._literals.literal()


def _may_be_written(new: Tensor, old: Tensor) -> bool:
    """Whether ``new`` has the dtype, the shape and the device of ``old``."""
    left, right = type_of_tensor(new), type_of_tensor(old)
    same = (left.dtype, left.ndim, left.device) == (right.dtype, right.ndim, right.device)
    return same and same_sizes(left.shape, right.shape)


def _first_line(error: Exception) -> str:
    """Without where PyTorch was in its own code."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _put(owner: nn.Module, path: str, value: Tensor) -> None:
    """Make ``value`` the attribute ``path`` of a module."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(owner.named_children()):
            owner.add_module(parent, nn.Module())
        owner = owner.get_submodule(parent)
    owner.register_buffer(name, value)
