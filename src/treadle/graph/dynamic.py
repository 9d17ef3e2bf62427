"""Values whose sizes are known at the call only: a sample of each value, and beside it its twin.

A graph of a step with dynamic shapes looks like any other: its fake values have the sizes of one
sample, so that passes can count and compare. Each value of dynamic sizes has a *twin*, the fake
value with symbols of the ``ShapeEnv`` that the step was traced under, and sizes among the arguments
are ``Size``. ``layout_of`` gives shape and strides as ``Size``.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from treadle.util.errors import LoweringError
from treadle.util.extents import Size, as_int, dims_in, sample_of, with_dims
from treadle.util.formulas import Dim, Quotient
from treadle.util.generators import without_generators

Layout = tuple[tuple[int, ...], tuple[int, ...]]

_TWINS: Any = WeakTensorKeyDictionary()
_SYMBOLS: "WeakKeyDictionary[Any, Symbols]" = WeakKeyDictionary()
_BY_DIM: "WeakValueDictionary[Dim, Symbols]" = WeakValueDictionary()


class Symbols:
    """The dims of a trace, as PyTorch's symbols and as ours.

    ``mode``: the fake mode whose ``ShapeEnv`` knows the symbols; ``known`` maps the name of a
    symbol there to the ``SymInt`` and the ``Size`` of the same dim.
    """

    def __init__(self, mode: Any, known: Mapping[str, tuple[SymInt, Size]]) -> None:
        self.mode = mode
        self._sizes = {name: size for name, (_, size) in known.items()}
        self._ints = {dim: symint for symint, size in known.values() for dim in size.formula.dims}
        self._noted = 0
        self._replayed: dict[Any, Any] = {}
        _SYMBOLS[mode] = self
        for dim in self._ints:
            _BY_DIM[dim] = self

    @contextmanager
    def sampling(self, sizes: Mapping[str, Size]) -> Iterator[None]:
        """Inside, the symbols stand for these sizes: the same dims with other samples."""
        old = self._sizes
        by_name = {dim.name: symbol for symbol, each in old.items() for dim in each.formula.dims}
        ints = {dim.name: symint for dim, symint in self._ints.items()}
        replayed, self._replayed = self._replayed, {}
        self._sizes = old | {by_name[name]: size for name, size in sizes.items()}
        for dim in [dim for size in sizes.values() for dim in size.formula.dims]:
            self._ints[dim] = ints[dim.name]
            _BY_DIM[dim] = self
        try:
            yield
        finally:
            self._sizes, self._replayed = old, replayed

    def size(self, value: int | SymInt) -> int:
        """A number of the trace as one of ours."""
        return value if isinstance(value, int) else self._from(value.node.expr)

    def symint(self, value: int) -> int | SymInt:
        """One of our numbers as the trace writes it."""
        if not isinstance(value, Size):
            return value
        total: Any = 0
        for atoms, coefficient in value.formula.terms:
            total = total + reduce(operator.mul, [self._atom(a) for a in atoms], coefficient)
        return total

    def symints(self, tree: Any) -> Any:
        """Nested arguments with every ``Size`` as the trace writes it."""
        return map_aggregate(tree, lambda x: self.symint(x) if isinstance(x, Size) else x)

    def remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gave for an equal ``key`` before: layers of a model repeat each other."""
        if key not in self._replayed:
            self._replayed[key] = make()
        return self._replayed[key]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, PyTorch may compute with the symbols; what it asks of them is noted."""
        with torch.no_grad(), self.mode:
            yield
        self.note()

    def _atom(self, atom: Any) -> Any:
        if atom in self._ints:
            return self._ints[atom]
        over: Any = self.symint(as_int(atom.over))
        under: Any = self.symint(as_int(atom.under))
        return over // under if isinstance(atom, Quotient) else over % under

    def _from(self, expr: Any) -> int:
        """A sympy expression over the symbols as a number of ours."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._sizes[str(expr)]
        parts = [self._from(each) for each in expr.args] if not expr.is_Pow else []
        name = type(expr).__name__
        if name in _SUMS:
            return reduce(_SUMS[name], parts)
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return reduce(operator.mul, [self._from(expr.base)] * int(expr.exp))
        raise LoweringError(f"a size of the step is {expr}, which has no form", code="TR-305")

    def note(self) -> None:
        """Ask again what PyTorch has asked of its symbols, for the ``Domain`` in force to note."""
        env = self.mode.shape_env
        relations = [guard.expr for guard in env.guards[self._noted :]]
        self._noted += len(relations)
        for relation in relations:
            if type(relation).__name__ not in _RELATIONS:
                raise LoweringError(f"the step asks whether {relation}", code="TR-305")
            left, right = (self._from(each) for each in relation.args)
            _RELATIONS[type(relation).__name__](left, right)
        for symbol, other in env.replacements.items():
            _ = self._from(symbol) == self._from(other)


_SUMS: Mapping[str, Callable[[int, int], int]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
}


def twin_of(value: Any) -> Any:
    """The fake value with symbols, of a value or a tuple of them; itself where it has none."""
    if isinstance(value, tuple | list):
        return type(value)(twin_of(each) for each in value)
    return _TWINS.get(value, value) if isinstance(value, Tensor) else value


def pair(value: Any, twin: Any) -> None:
    """From now on ``twin`` is the twin of ``value``; both may be tuples."""
    if isinstance(value, tuple | list):
        for each, other in zip(value, twin, strict=True):
            pair(each, other)
    elif isinstance(value, Tensor) and twin is not value:
        _TWINS[value] = twin


def layout_of(value: Tensor) -> Layout:
    """Shape and strides, with a ``Size`` wherever the call decides."""
    twin = _TWINS.get(value)
    if twin is None:
        return tuple(value.shape), tuple(value.stride())
    symbols = _SYMBOLS[twin.fake_mode]
    return tuple(map(symbols.size, twin.shape)), tuple(map(symbols.size, twin.stride()))


def offset_of(value: Tensor) -> int:
    """The place of the first element in its storage, in elements."""
    twin = _TWINS.get(value)
    if twin is None:
        return int(value.storage_offset())
    return _SYMBOLS[twin.fake_mode].size(twin.storage_offset())


def symbols_of(values: Any) -> "Symbols | None":
    """The symbols behind the first value that has a twin."""
    for value in _tensors(values):
        twin = _TWINS.get(value)
        if twin is not None:
            return _SYMBOLS[twin.fake_mode]
    return None


def symbols_in(sizes: Any) -> "Symbols | None":
    """The symbols behind the first ``Size`` in nested tuples and lists of numbers."""
    if isinstance(sizes, Size):
        return next(_BY_DIM[dim] for dim in sizes.formula.dims)
    if isinstance(sizes, tuple | list):
        return next((found for each in sizes if (found := symbols_in(each))), None)
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


def mode_of(values: Any) -> Any:
    """The fake mode of the first tensor among ``values``."""
    return next(value.fake_mode for value in _tensors(values))  # type: ignore[attr-defined]


@contextmanager
def in_mode(mode: Any) -> Iterator[None]:
    with torch.no_grad(), mode:
        yield


def twin_result(node: fx.Node) -> Any:
    """What ``node`` gives for its operands' twins; ``None`` if no operand has one."""
    vals = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    vals = without_generators(vals)
    symbols = symbols_of(vals)
    if symbols is None:
        return None
    args, kwargs = map_aggregate(vals, lambda leaf: _as_traced(symbols, leaf))  # type: ignore[misc]
    assert callable(node.target), node
    with in_mode(symbols.mode):
        return node.target(*args, **kwargs)


def _as_traced(symbols: Symbols, leaf: Any) -> Any:
    if isinstance(leaf, Size):
        return symbols.symint(leaf)
    return twin_of(leaf) if isinstance(leaf, Tensor) else leaf


def sampled(graph: fx.Graph, symbols: Symbols, sample_mode: Any) -> None:
    """A graph traced with symbols becomes one of samples and twins, in place.

    ::

        before:  n = sym_size(x, 0); m = n * 2; y = view(x, [m, -1])      val: symbolic
        after:   y = view(x, [2*S, -1])                                   val: sample, with a twin
    """
    numbers: dict[fx.Node, int] = {}

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return numbers.get(leaf, leaf)
        return symbols.size(leaf) if isinstance(leaf, SymInt) else leaf

    for node in list(graph.nodes):
        if node.op == "output":
            node.args = map_aggregate(node.args, plain)
            continue
        twin = node.meta.get("val")
        if isinstance(twin, SymFloat | SymBool):
            raise LoweringError(
                "the step computes a float or a truth value from a size",
                code="TR-305",
                where=node.meta.get("where", ""),
            )
        if isinstance(twin, SymInt | int) and node.op == "call_function":
            numbers[node] = symbols.size(twin)
            continue
        node.args = map_aggregate(node.args, plain)
        node.kwargs = map_aggregate(node.kwargs, plain)
        node.meta["val"] = _sample(node, symbols, sample_mode)
        pair(node.meta["val"], twin)
    for node in reversed(list(numbers)):
        graph.erase_node(node)


def _sample(node: fx.Node, symbols: Symbols, mode: Any) -> Any:
    twin = node.meta.get("val")
    if node.op == "call_function":
        args = map_arg(node.args, lambda each: each.meta["val"])
        kwargs = map_arg(node.kwargs, lambda each: each.meta["val"])
        with in_mode(mode):
            return node.target(*args, **kwargs)  # type: ignore[operator]
    if not isinstance(twin, Tensor):
        return twin
    shape, strides = (
        [sample_of(symbols.size(n)) for n in sizes] for sizes in (twin.shape, twin.stride())
    )
    with in_mode(mode):
        return torch.empty_strided(shape, strides, dtype=twin.dtype, device=twin.device)


def resampled(graph: fx.Graph, sizes: Mapping[str, Size]) -> fx.Graph:
    """A copy of a graph of samples for other samples of the same dims; read it ``sampling``."""
    symbols = _BY_DIM[dims_of_graph(graph)[0]]
    made = fx.Graph(owning_module=graph.owning_module)
    made.output(made.graph_copy(graph, {}))
    mode = sample_mode(graph)
    with symbols.sampling(sizes):
        for new, old in zip(made.nodes, graph.nodes, strict=True):
            new.args, new.kwargs = map_aggregate(
                (new.args, new.kwargs),
                lambda x: with_dims(x, sizes) if isinstance(x, Size) else x,
            )
            new.meta = dict(old.meta)
            if new.op != "output":
                twin = twin_of(old.meta["val"])
                new.meta["val"] = twin
                new.meta["val"] = _sample(new, symbols, mode)
                pair(new.meta["val"], twin)
    return made


@contextmanager
def sampling(graph: fx.Graph, sizes: Mapping[str, Size]) -> Iterator[None]:
    """Inside, the dims of a graph have other samples."""
    with _BY_DIM[dims_of_graph(graph)[0]].sampling(sizes):
        yield


def sample_mode(graph: fx.Graph) -> Any:
    """The fake mode of the samples of a graph."""
    return mode_of([node.meta.get("val") for node in graph.nodes])


def dims_of_graph(graph: fx.Graph) -> list[Dim]:
    """The dims of the inputs of a graph, by name; none where all shapes are known."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    sizes = [size for value in _tensors(values) for size in layout_of(value)[0]]
    return [dim for size in dims_in(sizes) for dim in size.formula.dims]
