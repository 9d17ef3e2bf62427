"""Values whose sizes are known only at the call: a sample of each value, and its symbolic twin.

A graph of a step with dynamic shapes looks like any other: its fake values have the sizes of one
sample, so that passes can count and compare. Each value of dynamic sizes has a *twin*, the fake
value with symbols of the ``ShapeEnv`` that the step was traced under, and sizes among the arguments
are ``Size``. ``layout_of`` gives shape and strides as ``Size``.

All values of such a graph belong to one ``SampleMode``, which has the twins and the ``Symbols``.
They are reachable from any value or from the graph; two graphs share nothing, even with equal dims.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from treadle.algebra.dims import Dim, SizeExpression
from treadle.algebra.extents import (
    Size,
    as_int,
    ceil_div,
    dim_of,
    dims_in,
    sample_of,
    size_of,
    with_dims,
)
from treadle.algebra.guards import GuardSet
from treadle.algebra.polynomial import Atom, Quotient
from treadle.compat.fake import (
    FakeTensor,
    FakeTensorMode,
    enable_python_dispatcher,
    new_symbol,
)
from treadle.graph.analysis.size_floats import SizeFloats
from treadle.graph.core.arguments import (
    Argument,
    given_of,
    map_argument,
    types_of,
    without_generator,
)
from treadle.graph.core.copying import copied
from treadle.graph.core.node_info import Value, info, known_value, set_value, value_of
from treadle.util.errors import LoweringError, VerifyError

Layout = tuple[tuple[int, ...], tuple[int, ...]]

KnownSymbols = Mapping[str, tuple[SymInt, Size]]
"""By the name of a symbol: the ``SymInt`` and the ``Size`` of the same dim."""


class Symbols:
    """The dims of a trace, as PyTorch's symbols and as ours, and what they were found to be.

    ``mode``: the fake mode whose ``ShapeEnv`` knows the symbols. ``guards``: for which sizes the
    trace, and all that is made of it, is right.
    """

    def __init__(self, mode: FakeTensorMode, known: KnownSymbols) -> None:
        self.mode = mode
        self.guards = GuardSet()
        self._known = dict(known)
        self._sizes = {name: size for name, (_, size) in known.items()}
        self._ints = {dim: symint for symint, size in known.values() for dim in size.formula.dims}
        self._noted = 0
        self._replayed: dict[object, object] = {}
        self._computed: dict[object, Size] = {}  # by PyTorch's expressions, which have no form
        self._formulas: dict[object, int] = {}  # by others

    @property
    def dims(self) -> list[Dim]:
        """Those of arguments, and those that are computed of these."""
        return list(self._ints)

    def with_samples(self, sizes: Mapping[str, Size]) -> "Symbols":
        """The same dims with other samples or bounds, by name. Nothing is guarded yet."""
        known = {
            symbol: (symint, sizes.get(dim.name, size))
            for symbol, (symint, size) in self._known.items()
            for dim in size.formula.dims
        }
        others = Symbols(self.mode, known)
        others._computed = {
            expr: sizes.get(dim_of(size).name, size) for expr, size in self._computed.items()
        }
        others._ints |= {
            dim: self._ints[dim_of(self._computed[expr])]
            for expr, size in others._computed.items()
            for dim in size.formula.dims
        }
        return others

    def size(self, value: int | SymInt) -> int:
        """A number of the trace as one of ours."""
        if isinstance(value, int):
            return value
        expr = value.node.expr
        if expr not in self._formulas:
            self._formulas[expr] = self._from(expr)
        return self._formulas[expr]

    def computed(self, function: SizeExpression) -> SymInt | None:
        """A Python computation on sizes, as a symbol of its own; ``None`` if it is not a size."""
        dim = function.dim()
        if dim is None:
            return None
        if dim not in self._ints:
            number, name = new_symbol(self.mode, dim)
            size = size_of(dim)
            self._known[name] = number, size
            self._sizes[name], self._ints[dim] = size, number
        return self._ints[dim]

    def note_computed(self, number: SymInt, function: SizeExpression) -> None:
        """``number``, an expression without a form, is what Python computes of sizes."""
        dim = function.dim()
        if dim is not None:
            self._computed[number.node.expr] = size_of(dim)
            self._formulas.clear()
            self._ints.setdefault(dim, number)

    def symbols_in(self, values: Iterable[int]) -> list[SymInt]:
        """The symbols of all dims that change any of these numbers."""
        return [self._ints[dim_of(size)] for size in dims_in(values)]

    def symint(self, value: int) -> int | SymInt:
        """One of our numbers as the trace writes it."""
        if not isinstance(value, Size):
            return value
        total: Any = 0
        for atoms, coefficient in value.formula.terms:
            total = total + reduce(operator.mul, [self._atom(a) for a in atoms], coefficient)
        return total

    def remembered(self, key: object, make: Callable[[], object]) -> object:
        """What ``make`` gave for an equal ``key`` before: layers of a model repeat each other."""
        if key not in self._replayed:
            self._replayed[key] = make()
        return self._replayed[key]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, PyTorch may compute with the symbols; what it asks of them is guarded."""
        with torch.no_grad(), self.mode:
            yield
        self.note()

    def _atom(self, atom: Atom) -> int | SymInt:
        if isinstance(atom, Dim):
            return self._ints[atom]
        over = self.symint(as_int(atom.over))
        under: Any = self.symint(as_int(atom.under))
        combine = operator.floordiv if isinstance(atom, Quotient) else operator.mod
        return combine(over, under)

    def _from(self, expr: Any) -> int:
        """A sympy expression over the symbols as a number of ours."""
        if expr in self._computed:
            return self._computed[expr]
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._sizes[str(expr)]
        name = _name_of(expr)
        if name in _ROUNDED and _name_of(expr.args[0]) == "IntTrueDiv":
            return _ROUNDED[name](*map(self._from, expr.args[0].args))
        parts = [self._from(argument) for argument in expr.args] if not expr.is_Pow else []
        combine = self._combines(name)
        if combine is not None:
            return reduce(combine, parts)
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return reduce(operator.mul, [self._from(expr.base)] * int(expr.exp))
        raise LoweringError(f"treadle cannot express a size of the step: {expr}", code="TR-305")

    def _ratio(self, expr: Any) -> tuple[int, int]:
        """A sympy expression as a number of ours and what it is divided by, a positive one."""
        if _name_of(expr) == "ToFloat":
            return self._ratio(expr.args[0])
        if _name_of(expr) == "IntTrueDiv" and expr.args[1].is_Integer and expr.args[1] > 0:
            return self._from(expr.args[0]), int(expr.args[1])
        if expr.is_Float and float(expr).is_integer():
            return int(expr), 1
        return self._from(expr), 1

    def _combines(self, name: str) -> Callable[[int, int], int] | None:
        """What a kind of sympy expression does with two numbers; ``None`` if it is not known."""
        match name:
            case "Max":
                return self.guards.larger_of
            case "Min":
                return self.guards.smaller_of
            case _:
                return _SUMS.get(name)

    def note(self) -> None:
        """Guard what PyTorch has asked of its symbols since this was done last."""
        env = self.mode.shape_env
        assert env is not None, "a mode without symbols"
        asked = [guard.expr for guard in env.guards[self._noted :]]
        self._noted += len(asked)
        relations = [
            part for expr in asked for part in (expr.args if _name_of(expr) == "And" else (expr,))
        ]
        for relation in relations:
            if _name_of(relation) not in _RELATIONS:
                raise LoweringError(f"the step asks whether {relation}", code="TR-305")
            (left, under), (right, below) = map(self._ratio, relation.args)
            _RELATIONS[_name_of(relation)](self.guards, left * below, right * under)
        for symbol, other in env.replacements.items():
            self.guards.equal(self._from(symbol), self._from(other))


def _name_of(expr: object) -> str:
    return type(expr).__name__


_ROUNDED: Mapping[str, Callable[[int, int], int]] = {
    "CeilToInt": ceil_div,
    "FloorToInt": operator.floordiv,
    "TruncToInt": operator.floordiv,
}
"""A quotient of two numbers that is rounded at once, as in ``math.ceil(n / 32)``."""
_SUMS: Mapping[str, Callable[[int, int], int]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


def _less_swapped(guards: GuardSet, left: int, right: int) -> bool:
    return guards.less(right, left)


_RELATIONS: Mapping[str, Callable[[GuardSet, int, int], bool]] = {
    "Equality": GuardSet.equal,
    "Unequality": GuardSet.equal,
    "StrictLessThan": GuardSet.less,
    "LessThan": _less_swapped,
    "StrictGreaterThan": _less_swapped,
    "GreaterThan": GuardSet.less,
}
"""The guard that says which way a relation of sympy's goes: ``a <= b`` is ``not b < a``."""


class SampleMode(FakeTensorMode):
    """The fake mode of a graph's samples: knows the twin of each, and the symbols of the twins."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.symbols = symbols
        self.twins: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def _sample_mode_of(value: Tensor) -> SampleMode | None:
    """The mode of a sample; ``None`` for any other tensor."""
    mode = value.fake_mode if isinstance(value, FakeTensor) else None
    return mode if isinstance(mode, SampleMode) else None


def _twin_and_symbols(value: Tensor) -> tuple[Tensor, Symbols] | None:
    mode = value.fake_mode if isinstance(value, FakeTensor) else None
    if not isinstance(mode, SampleMode):  # most are of graphs whose sizes are all known
        return None
    twin = mode.twins.get(value)
    return None if twin is None else (twin, mode.symbols)


def is_sized(value: Tensor) -> bool:
    """Whether calls decide some of its shape, strides or offset."""
    return _twin_and_symbols(value) is not None


def twin_of(value: Value) -> Value:
    """The fake value with symbols, of a value or a tuple of them; itself where it has none."""
    if isinstance(value, tuple | list):
        return type(value)(twin_of(item) for item in value)
    known = _twin_and_symbols(value) if isinstance(value, Tensor) else None
    return value if known is None else known[0]


def pair(value: object, twin: Any) -> None:
    """From now on ``twin`` is the twin of ``value``; both may be tuples. What has no symbols is
    no twin."""
    if isinstance(value, tuple | list):
        for item, other in zip(value, twin, strict=True):
            pair(item, other)
    elif isinstance(value, Tensor) and isinstance(twin, FakeTensor):
        mode = _sample_mode_of(value)
        if mode is not None and twin.fake_mode is mode.symbols.mode:
            mode.twins[value] = twin


def layout_of(value: Tensor) -> Layout:
    """Shape and strides, with a ``Size`` wherever the call decides."""
    known = _twin_and_symbols(value)
    if known is None:
        return tuple(value.shape), tuple(value.stride())
    twin, symbols = known
    return tuple(map(symbols.size, twin.shape)), tuple(map(symbols.size, twin.stride()))


def offset_of(value: Tensor) -> int:
    """The place of the first element in its storage, in elements."""
    known = _twin_and_symbols(value)
    if known is None:
        return int(value.storage_offset())
    twin, symbols = known
    return symbols.size(twin.storage_offset())


def symbols_of(values: object) -> Symbols | None:
    """The symbols behind the first value that has a twin."""
    for value in _tensors(values):
        known = _twin_and_symbols(value)
        if known is not None:
            return known[1]
    return None


def symbols_of_graph(graph: fx.Graph) -> Symbols | None:
    """The symbols behind a graph of samples; ``None`` where all shapes are known. A size may have
    come from an argument that is not an input, since nothing reads its elements."""
    return symbols_of([known_value(node) for node in graph.nodes])


def guards_of(graph: fx.Graph) -> GuardSet:
    """For which sizes what is made of a graph is right: a set without guards, for one whose
    shapes are known."""
    symbols = symbols_of_graph(graph)
    return GuardSet() if symbols is None else symbols.guards


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


def sample_mode_of(values: object) -> SampleMode:
    """The mode of the first sample among ``values``."""
    modes = (_sample_mode_of(value) for value in _tensors(values))
    return next(mode for mode in modes if mode is not None)


@contextmanager
def in_mode(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, operations run on fake tensors of ``mode``, without gradients; symbolic ones by the
    kernels that traces use, as some of PyTorch's in C++ need the numbers of sizes."""
    kernels = nullcontext() if mode.shape_env is None else enable_python_dispatcher()
    with torch.no_grad(), mode, kernels:
        yield


def twin_result(node: fx.Node, mode: object) -> object:
    """What ``node`` gives for its operands' twins; ``None`` if no operand has one. ``mode``: of the
    graph's values, which knows the sizes of what has no operands."""
    symbols = symbols_of([value_of(operand) for operand in node.all_input_nodes])
    if symbols is None and isinstance(mode, SampleMode):
        symbols = mode.symbols
    if symbols is None:
        return None

    def traced(leaf: object) -> object:
        return symbols.symint(leaf) if isinstance(leaf, Size) else without_generator(leaf)

    args, kwargs = given_of(node, lambda operand: twin_of(value_of(operand)), traced)
    assert callable(node.target), node
    with in_mode(symbols.mode):
        return node.target(*args, **kwargs)


def sample_with_twin(
    mode: SampleMode,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A sample of this type; sizes may be a ``Size``."""
    symbols = mode.symbols
    with in_mode(symbols.mode):
        symbolic = [list(map(symbols.symint, sizes)) for sizes in (shape, strides)]
        twin = torch.empty_strided(*symbolic, dtype=dtype, device=device)
    with in_mode(mode):
        plain = [list(map(sample_of, sizes)) for sizes in (shape, strides)]
        sample = torch.empty_strided(*plain, dtype=dtype, device=device)
    pair(sample, twin)
    return sample


def sampled(graph: fx.Graph, mode: SampleMode) -> None:
    """A graph traced with symbols becomes one of samples and twins, in place.

    ::

        before:  n = sym_size(x, 0); m = n * 2; y = view(x, [m, -1])      val: symbolic
        after:   y = view(x, [2*S, -1])                                   val: sample, with a twin
    """
    symbols = mode.symbols
    numbers: dict[fx.Node, int | SymInt] = {}
    others: set[fx.Node] = set()  # floats and answers: an integer may be made of them

    def size(number: fx.Node | SymInt) -> int:
        return symbols.size(numbers[number] if isinstance(number, fx.Node) else number)

    def evaluate(node: fx.Node) -> None:
        args, kwargs = given_of(node, lambda operand: twin_of(value_of(operand)), in_trace)
        with in_mode(symbols.mode):
            twin = node.target(*args, **kwargs)  # type: ignore[operator]
        set_value(node, twin)
        set_value(node, _sample(node, mode))
        pair(value_of(node), twin)

    def in_trace(leaf: object) -> object:
        return symbols.symint(leaf) if isinstance(leaf, Size) else leaf

    floats = SizeFloats(size, evaluate)

    def plain(leaf: Argument) -> Argument:
        if isinstance(leaf, fx.Node):
            if leaf in others:
                raise LoweringError(
                    "the step computes a float or a boolean from a size",
                    code="TR-305",
                    where=info(leaf).where,
                )
            return symbols.size(numbers[leaf]) if leaf in numbers else leaf
        return symbols.size(leaf) if isinstance(leaf, SymInt) else leaf

    for node in list(graph.nodes):
        if node.op == "output":
            node.args = map_argument(plain, node.args)
            continue
        twin = known_value(node)
        if isinstance(twin, SymFloat | SymBool):
            others.add(node)
            continue
        if isinstance(twin, SymInt | int) and node.op == "call_function":
            numbers[node] = twin
            if isinstance(twin, SymInt) and not _has_form(symbols, twin):
                made = floats.computed(node)
                if made is not None:
                    symbols.note_computed(twin, made)
            continue
        if any(operand in others for operand in node.all_input_nodes):
            floats.take(node)
        node.args = map_argument(plain, node.args)
        node.kwargs = map_argument(plain, node.kwargs)
        set_value(node, _sample(node, mode))
        pair(value_of(node), twin)
    gone = {*numbers, *others}
    for node in reversed([node for node in graph.nodes if node in gone]):
        graph.erase_node(node)


def _has_form(symbols: Symbols, number: SymInt) -> bool:
    try:
        symbols.size(number)
    except (LoweringError, VerifyError, KeyError):
        return False
    return True


def _sample(node: fx.Node, mode: SampleMode) -> Any:
    twin = known_value(node)
    if node.op == "call_function":
        args, kwargs = types_of(node)
        with in_mode(mode):
            return node.target(*args, **kwargs)  # type: ignore[operator]
    if not isinstance(twin, Tensor):
        return twin
    shape, strides = (
        [sample_of(mode.symbols.size(n)) for n in sizes] for sizes in (twin.shape, twin.stride())
    )
    with in_mode(mode):
        return torch.empty_strided(shape, strides, dtype=twin.dtype, device=twin.device)


def resampled(graph: fx.Graph, symbols: Symbols, sizes: Mapping[str, Size]) -> fx.Graph:
    """A copy of a graph of samples, which ``symbols`` are behind, where its dims have other samples
    or bounds."""
    mode = SampleMode(symbols.with_samples(sizes))
    new_graph, _ = copied(graph)
    for new, old in zip(new_graph.nodes, graph.nodes, strict=True):
        new.args, new.kwargs = map_argument(
            lambda x: with_dims(x, sizes) if isinstance(x, Size) else x, (new.args, new.kwargs)
        )
        if new.op != "output":
            twin = twin_of(value_of(old))
            set_value(new, twin)
            set_value(new, _sample(new, mode))
            pair(value_of(new), twin)
    return new_graph


def dims_of_graph(graph: fx.Graph) -> list[Dim]:
    """The dims of the values of a graph, by name; none where all shapes are known."""
    if symbols_of_graph(graph) is None:
        return []
    values = [known_value(node) for node in graph.nodes]
    sizes = [size for value in _tensors(values) for size in layout_of(value)[0]]
    return [dim for size in dims_in(sizes) for dim in size.formula.dims]
