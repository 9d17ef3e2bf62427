"""Which kernels are the same function on other buffers: by structure, before any text exists."""

from collections.abc import Mapping

from treadle.algebra.extents import same, size_key, surely_less
from treadle.algebra.index import Atom, Axis, FloorDiv, Index, Key, Mod, Value
from treadle.loop.expr import Apply, Const, Expr, Load, Local, Position, Reduce, formula_of
from treadle.loop.kernel import Definition, Kernel, LoopForm
from treadle.loop.nest import Item, arguments_of, dims_of, is_wide
from treadle.loop.program import Buffer
from treadle.loop.traverse import operands_of, walk


def kernel_key(kernel: Kernel, buffers: Mapping[str, Buffer]) -> Key:
    """Equal for kernels that differ in their buffers alone, and where the extent of the columns is
    an argument, in that extent."""
    names = arguments_of(kernel)
    numbers = _Numbers(kernel, {name: n for n, name in enumerate(names)})
    body = tuple(numbers.item(item) for item in kernel.body)
    extents = [kernel.rows.extent, kernel.cols.extent]
    free = kernel.scheduled.form is LoopForm.FLAT
    return (
        str(kernel.kind),
        () if free else tuple(size_key(extent) for extent in extents),
        tuple(same(extent, 1) for extent in extents if free),
        is_wide(kernel),
        tuple(map(str, dims_of(kernel, buffers))),
        tuple(str(buffers[name].dtype) for name in names),
        kernel.scheduled,
        body,
        numbers.formulas,
    )


class _Numbers:
    """Numbers instead of names: of buffers, axes and equal formulas, in the order of the body."""

    def __init__(self, kernel: Kernel, buffers: Mapping[str, int]) -> None:
        self._axes: dict[Axis, int] = {kernel.rows: 0, kernel.cols: 1}
        self._buffers = buffers
        self._of: dict[int, int] = {}
        self._known: dict[Key, int] = {}

    @property
    def formulas(self) -> Key:
        """What each number stands for."""
        return tuple(self._known)

    def item(self, item: Item) -> Key:
        """An item with numbers for its formulas."""
        axes = tuple(self._axes[axis] for axis in item.axes)
        if isinstance(item, Definition):
            return "define", item.name, self._number(item.expr), axes
        place = self._index(item.index)
        return "store", self._buffers[item.buffer], place, item.value.name, axes

    def _number(self, expr: Expr) -> int:
        for node in walk(expr):
            if id(node) not in self._of:
                key = self._key(node)
                self._of[id(node)] = self._known.setdefault(key, len(self._known))
        return self._of[id(expr)]

    def _key(self, node: Expr) -> Key:
        inside = tuple(self._of[id(operand)] for operand in operands_of(node))
        match node:
            case Const():
                return "const", f"{node.value!r}:{node.dtype}"
            case Local():
                return "local", node.name
            case Position():
                return "position", self._index(node.index)
            case Load():
                masked = node.mask is not None
                place = self._index(node.index)
                return "load", self._buffers[node.buffer], str(node.dtype), place, masked, inside
            case Apply():
                return "apply", node.fn, str(node.dtype), inside
            case Reduce():
                axes = tuple(self._axes[axis] for axis in node.axes)
                return "reduce", str(node.kind), axes, inside

    def _index(self, index: Index) -> Key:
        terms = tuple((self._atom(atom), size_key(scale)) for atom, scale in index.terms)
        return size_key(index.const), terms

    def _atom(self, atom: Atom) -> Key:
        match atom:
            case Axis():
                return "axis", self._axes[atom]
            case FloorDiv(index=inner, n=n) | Mod(index=inner, n=n):
                low, high = inner.bounds
                narrow = surely_less(-1, low), surely_less(high, 2**31)
                return type(atom).__name__, self._index(inner), size_key(n), narrow
            case Value():
                return "value", self._number(formula_of(atom)), size_key(atom.lo), size_key(atom.hi)
