"""Programs and kernels from their texts, as ``exact_text.py`` writes them."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch

from loop.exact_text import USUAL_DEVICE, optional_fields
from loop.formula_parsing import NAME, FormulaReader
from treadle.algebra.strides import contiguous_strides
from treadle.compat.operators.operator_facts import Effect
from treadle.loop.kernel import Definition, Kernel, KernelKind, KernelSchedule, LoopForm, Store
from treadle.loop.program import (
    Buffer,
    BufferKind,
    Call,
    Compute,
    Origin,
    Program,
    Step,
    TensorRef,
)
from treadle.util.literals import LiteralReader
from treadle.util.scanner import Scanner

T = TypeVar("T")
_REMEDY = "give the text of exact_program(program) or exact_kernel(kernel)"
_DEVICE = re.compile(r"[a-z]+(?::\d+)?")
_UNNAMED = re.compile(r"_(?=[,\s])")
_OF_ORIGIN = optional_fields(Origin)
_FACTS = {*_OF_ORIGIN, *optional_fields(Call)}


def parse_program(text: str) -> Program:
    """The program that ``text`` shows; ``ParseError`` TR-007 names the line and the column."""
    scanner = Scanner(text.strip("\n"), _REMEDY)
    return _Reader(scanner).program()


def parse_kernel(text: str) -> Kernel:
    """The kernel that ``text`` shows; ``ParseError`` TR-007 names the line and the column."""
    scanner = Scanner(text.strip("\n"), _REMEDY)
    return _Reader(scanner).kernel()


class _Reader:
    """Reads what programs and kernels are made of."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self._formulas = FormulaReader(scanner)
        self._literals = LiteralReader(scanner, {})

    # programs

    def program(self) -> Program:
        self.scanner.need("program")
        device = self.scanner.word(_DEVICE, "a device") if self.scanner.take("on") else ""
        self.scanner.next_line()
        self._formulas.dims_and_axes()
        buffers: dict[str, Buffer] = {}
        constants: dict[str, torch.Tensor] = {}
        while not self.scanner.take("inputs"):
            buffer = self._buffer()
            buffers[buffer.name] = buffer
            if self.scanner.take("="):
                constants[buffer.name] = self._constant(buffer)
            self.scanner.next_line()
        inputs = tuple(self._listed(self._name)) if not self.scanner.at_end_of_line() else ()
        self.scanner.next_line()
        steps = self._steps()
        self.scanner.need("[")
        results = tuple(self.scanner.several("]", self._result))
        self.scanner.next_line()
        if not self.scanner.at_end():
            raise self.scanner.error("the text should end here")
        return Program(buffers, steps, inputs, results, constants, device)

    def _steps(self) -> tuple[Step, ...]:
        """Up to the ``return``."""
        steps: list[Step] = []
        while not self.scanner.take("return"):
            if self.scanner.take("compute"):
                steps.append(self._compute())
            elif self.scanner.take("call"):
                steps.append(self._call())
            elif self.scanner.at_end() or not self.scanner.at_end_of_line():
                raise self.scanner.error("a compute, a call or a return is expected here")
            self.scanner.next_line()
        return tuple(steps)

    def _buffer(self) -> Buffer:
        at = self.scanner.place()
        word = self.scanner.word(what="a buffer, or the inputs")
        if word not in set(BufferKind):
            raise self.scanner.error(f"{word!r} is no kind of a buffer", at)
        name = self._name()
        self.scanner.need(":")
        dtype, shape, strides = self._type()
        device = USUAL_DEVICE
        if self.scanner.take("on"):
            device = self.scanner.word(_DEVICE, "a device")
        unsized = self.scanner.take("unsized")
        return Buffer(name, dtype, shape, strides, BufferKind(word), device, unsized)

    def _constant(self, buffer: Buffer) -> torch.Tensor:
        made = torch.empty_strided(
            buffer.shape, buffer.strides, dtype=buffer.dtype, device=buffer.device
        )
        return self._literals.numbers(made)

    def _compute(self) -> Compute:
        output = self._ref()
        origin, _ = self._origin_and_facts()
        self.scanner.next_line()
        return Compute(output, self._formulas.array(), origin)

    def _call(self) -> Call:
        at = self.scanner.place()
        outputs = self._listed(self._output)
        if not self.scanner.take("="):
            self.scanner.at, outputs = at, []
        op = self.scanner.word(NAME, "an operation")
        self.scanner.need("(")
        args, kwargs = self.scanner.arguments(self._argument)
        origin, facts = self._origin_and_facts()
        facts["effects"] = self._effects(facts.get("effects", ""), at)
        return Call(op, args, kwargs, tuple(outputs), origin, **facts)

    def _effects(self, text: str, at: int) -> Effect:
        names = text.split("|") if text else []
        if not all(name in Effect.__members__ for name in names):
            raise self.scanner.error(f"{text!r} are no effects", at)
        return reduce(or_, (Effect[name] for name in names), Effect.NONE)

    def _output(self) -> str | None:
        return None if self.scanner.match(_UNNAMED) else self._name()

    def _origin_and_facts(self) -> tuple[Origin, dict[str, Any]]:
        """``from ['n'], where 'net.py:7', out 'aten.mm.out'``."""
        self.scanner.need("from")
        self.scanner.need("[")
        nodes = tuple(self.scanner.several("]", self._literals.literal))
        facts: dict[str, Any] = {}
        while self.scanner.take(","):
            at = self.scanner.place()
            name = self.scanner.word()
            if name not in _FACTS:
                raise self.scanner.error(f"{name!r} is no fact of a step", at)
            facts[name] = self._ref() if name == "into" else self._literals.literal()
        where = {key: facts.pop(key) for key in _OF_ORIGIN if key in facts}
        return Origin(nodes, **where), facts

    # arguments

    def _argument(self) -> Any:
        if self.scanner.take("ref"):
            return self._ref()
        if self.scanner.take("["):
            return self.scanner.several("]", self._argument)
        if self.scanner.take("("):
            return tuple(self.scanner.several(")", self._argument))
        if self.scanner.sees("{"):
            return self._formulas.sizes.size()
        return self._literals.literal()

    def _result(self) -> TensorRef | None:
        if self.scanner.take("None"):
            return None
        self.scanner.need("ref")
        return self._ref()

    def _ref(self) -> TensorRef:
        name = self._name()
        self.scanner.need(":")
        dtype, shape, strides = self._type()
        offset = self._formulas.sizes.size() if self.scanner.take("at") else 0
        return TensorRef(name, dtype, shape, strides, offset)

    def _type(self) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
        dtype = self._formulas.dtype()
        self.scanner.need("[")
        shape = tuple(self.scanner.several("]", self._formulas.sizes.size))
        if not self.scanner.take("strides"):
            return dtype, shape, contiguous_strides(shape)
        self.scanner.need("[")
        at = self.scanner.place()
        strides = tuple(self.scanner.several("]", self._formulas.sizes.size))
        if len(strides) != len(shape):
            raise self.scanner.error(f"{len(strides)} strides of {len(shape)} dims", at)
        return dtype, shape, strides

    def _name(self) -> str:
        quoted = self.scanner.quoted()
        return self.scanner.word(NAME) if quoted is None else quoted

    def _listed(self, item: Callable[[], T]) -> list[T]:
        """One or more, with commas between them."""
        found = [item()]
        while self.scanner.take(","):
            found.append(item())
        return found

    # kernels

    def kernel(self) -> Kernel:
        at = self.scanner.place()
        word = self.scanner.word(what="a kind of kernel")
        if word not in set(KernelKind):
            raise self.scanner.error(f"{word!r} is no kind of kernel", at)
        self.scanner.need("kernel")
        name = self._name()
        self.scanner.next_line()
        self._formulas.dims_and_axes()
        self.scanner.need("loops")
        rows = self._formulas.axis()
        self.scanner.need(",")
        cols = self._formulas.axis()
        self.scanner.next_line()
        body = tuple(self._items())
        origins: list[Origin] = []
        while self.scanner.sees("from"):
            origins.append(self._origin_and_facts()[0])
            self.scanner.next_line()
        schedule = self._schedule() if self.scanner.take("schedule") else None
        scratch = tuple(self._listed(self._name)) if self.scanner.take("scratch") else ()
        if scratch:
            self.scanner.next_line()
        if not self.scanner.at_end():
            raise self.scanner.error("the text should end here")
        return Kernel(name, KernelKind(word), rows, cols, body, tuple(origins), schedule, scratch)

    def _items(self) -> list[Definition | Store]:
        items: list[Definition | Store] = []
        while True:
            if self.scanner.take("define"):
                items.append(self._definition())
            elif self.scanner.take("store"):
                items.append(self._store())
            else:
                return items
            self.scanner.next_line()

    def _definition(self) -> Definition:
        name = self.scanner.word(re.compile(r"[^\s(]+"))
        self.scanner.need("(")
        axes = tuple(self.scanner.several(")", self._formulas.axis))
        self.scanner.next_line()
        return Definition(name, self._formulas.lines(), axes)

    def _store(self) -> Store:
        buffer = self._name()
        self.scanner.need("[")
        index = self._formulas.index()
        self.scanner.need("]")
        self.scanner.need("=")
        self.scanner.need("%")
        value = self._formulas.local()
        self.scanner.need("(")
        return Store(buffer, index, value, tuple(self.scanner.several(")", self._formulas.axis)))

    def _schedule(self) -> KernelSchedule:
        at = self.scanner.place()
        facts: dict[str, Any] = dict(self._listed(self._fact))
        self.scanner.next_line()
        known = {each.name for each in fields(KernelSchedule)}
        if not facts.keys() <= known or facts.get("form") not in set(LoopForm):
            raise self.scanner.error("this is no schedule of a kernel", at)
        form = LoopForm(facts.pop("form"))
        return KernelSchedule(form, **facts)

    def _fact(self) -> tuple[str, Any]:
        return self.scanner.word(), self._argument()


__all__ = ["parse_kernel", "parse_program"]
