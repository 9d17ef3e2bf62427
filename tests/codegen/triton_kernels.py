"""Kernels written by hand: the loops that training steps are made of."""

import torch

from treadle.algebra.index import Axis, Index, IndexLike
from treadle.loop.expr import (
    COMPARE,
    Apply,
    Const,
    Expr,
    Load,
    Local,
    Position,
    Reduce,
    ReduceKind,
)
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.traverse import value_index

BINARY = COMPARE | {
    "add",
    "sub",
    "mul",
    "div",
    "floordiv",
    "mod",
    "pow",
    "minimum",
    "maximum",
    "fmod",
}
F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


class Build:
    """Collects definitions and stores; ``k.define(expr, axes)`` gives the local."""

    def __init__(self, rows: int, cols: int, kind: KernelKind = KernelKind.ROWS) -> None:
        self.rows, self.cols, self.kind = Axis(rows), Axis(cols), kind
        self.body: list[Definition | Store] = []

    @property
    def both(self) -> tuple[Axis, ...]:
        return (self.rows, self.cols)

    @property
    def flat(self) -> Index:
        return self.rows * self.cols.extent + self.cols

    def define(self, expr: Expr, axes: tuple[Axis, ...] | None = None) -> Local:
        name = f"v{len(self.body)}"
        self.body.append(Definition(name, expr, self.both if axes is None else axes))
        return Local(name, expr.dtype)

    def store(
        self,
        buffer: str,
        value: Local,
        index: IndexLike | None = None,
        axes: tuple[Axis, ...] | None = None,
    ) -> None:
        place = Index.of(self.flat if index is None else index)
        self.body.append(Store(buffer, place, value, self.both if axes is None else axes))

    def kernel(self, name: str) -> Kernel:
        return Kernel(name, self.kind, self.rows, self.cols, tuple(self.body), ())

    def reduce(self, kind: ReduceKind, body: Expr, *, over_rows: bool = False) -> Local:
        inner, outer = (self.cols, self.rows)
        if over_rows or self.kind is KernelKind.COLUMNS:
            inner, outer = outer, inner
        return self.define(Reduce(kind, (inner,), body), (outer,))


def load(buffer: str, index: IndexLike, dtype: torch.dtype = F32, mask: Expr | None = None) -> Load:
    return Load(buffer, Index.of(index), dtype, mask)


def fn(name: str, *operands: Expr) -> Apply:
    boolean = name in [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "same",
        "and",
        "or",
        "xor",
        "not",
        "isnan",
        "isinf",
    ]
    return Apply(name, operands, torch.bool if boolean else operands[-1].dtype)


def cast(expr: Expr, dtype: torch.dtype) -> Apply:
    return Apply("cast", (expr,), dtype)


def f32(value: float) -> Const:
    return Const(value, F32)


def softmax(rows: int, cols: int) -> Kernel:
    k = Build(rows, cols)
    x = k.define(load("x", k.flat))
    top = k.reduce(ReduceKind.MAX, x)
    e = k.define(fn("exp", fn("sub", x, top)))
    total = k.reduce(ReduceKind.SUM, e)
    k.store("y", k.define(fn("div", e, total)))
    return k.kernel("softmax")


def layer_norm(rows: int, cols: int, dtype: torch.dtype = F32) -> Kernel:
    """y = (x - mean) * rsqrt(var + eps) * w + b, and the two statistics."""
    k = Build(rows, cols)
    raw: Expr = load("x", k.flat, dtype)
    x = k.define(raw if dtype is F32 else cast(raw, F32))
    mean = k.define(fn("mul", k.reduce(ReduceKind.SUM, x), f32(1 / cols)), (k.rows,))
    d = k.define(fn("sub", x, mean))
    square = k.reduce(ReduceKind.SUM, fn("mul", d, d))
    rstd = k.define(fn("rsqrt", fn("add", fn("mul", square, f32(1 / cols)), f32(1e-5))), (k.rows,))
    scaled = fn("mul", fn("mul", d, rstd), load("w", k.cols))
    y: Expr = fn("add", scaled, load("b", k.cols))
    k.store("y", k.define(y if dtype is F32 else cast(y, dtype)))
    k.store("mean", mean, k.rows, (k.rows,))
    k.store("rstd", rstd, k.rows, (k.rows,))
    return k.kernel("layer_norm")


def adamw(n: int, suffix: str = "") -> Kernel:
    """One AdamW update; ``step`` is a 0-dim tensor that stays as it is."""
    k = Build(1, n)

    def old(name: str) -> Load:
        return load(name + suffix, k.cols)

    g = k.define(old("g"))
    m = k.define(fn("add", fn("mul", old("m"), f32(0.9)), fn("mul", g, f32(0.1))))
    v = k.define(fn("add", fn("mul", old("v"), f32(0.999)), fn("mul", fn("mul", g, g), f32(0.001))))
    step = k.define(load("step", 0), ())
    c1 = k.define(fn("sub", f32(1.0), fn("pow", f32(0.9), step)), ())
    c2 = k.define(fn("sub", f32(1.0), fn("pow", f32(0.999), step)), ())
    size = fn("add", fn("sqrt", fn("div", v, c2)), f32(1e-8))
    move = fn("mul", fn("div", fn("div", m, c1), size), f32(1e-3))
    p = k.define(fn("sub", fn("mul", old("p"), f32(1 - 1e-5)), move))
    for name, value in (("m", m), ("v", v), ("p", p)):
        k.store(name + suffix, value, k.cols)
    return k.kernel(f"adamw{suffix}")


def counting_update(n: int) -> Kernel:
    """The update that also counts: every program must see the step before it is raised."""
    k = Build(1, n)
    step = k.define(fn("add", load("step", 0), f32(1.0)), ())
    p = k.define(fn("sub", load("p", k.cols), fn("div", load("g", k.cols), step)))
    k.store("p", p, k.cols)
    k.store("step", step, 0, ())
    return k.kernel("counting")


def whole_numbers(n: int) -> Kernel:
    """Products and sums that wrap at 64 bits, halves that are swapped, a comparison."""
    k = Build(1, n)
    half = Const(1 << 32, I64)
    place = fn("add", load("x", k.cols, I64), Position(Index.of(k.cols)))
    x = k.define(fn("mul", place, load("key", 0, I64)))
    square = k.define(fn("add", fn("mul", x, x), x))
    high = k.define(fn("floordiv", square, half))
    low = Apply("bitand", (high, Const((1 << 32) - 1, I64)), I64)
    swapped = k.define(Apply("bitor", (fn("mul", square, half), low), I64))
    k.store("y_high", high, k.cols)
    k.store("y_swapped", swapped, k.cols)
    kept = Apply("lt", (low, Const(3 << 30, I64)), torch.bool)
    k.store("y_kept", k.define(cast(kept, F32)), k.cols)
    return k.kernel("whole_numbers")


def column_sums(rows: int, cols: int) -> Kernel:
    """Gradients of a layer norm's weight and bias: two sums over the rows."""
    k = Build(rows, cols, KernelKind.COLUMNS)
    g = k.define(cast(load("g", k.flat, BF16), F32))
    x = k.define(fn("mul", g, load("x", k.flat)))
    dw, db = k.reduce(ReduceKind.SUM, x), k.reduce(ReduceKind.SUM, g)
    k.store("dw", dw, k.cols, (k.cols,))
    k.store("db", db, k.cols, (k.cols,))
    return k.kernel("column_sums")


def norm_backward(rows: int, cols: int, dtype: torch.dtype = F32) -> Kernel:
    """dx = r * (g * w - x * r * mean(g * w * x * r)), dw = sum of g * x * r, db = sum of g, and
    what is made of them: m = bf16(dw), n = dw + w; and the largest x * r of each column."""
    k = Build(rows, cols, KernelKind.BOTH)
    weight = k.define(cast(load("w", k.cols, BF16), F32), (k.cols,))
    g = k.define(cast(load("g", k.flat, dtype), F32) if dtype is not F32 else load("g", k.flat))
    x = k.define(fn("mul", load("x", k.flat), load("r", k.rows)))
    k.store("again", k.define(cast(x, BF16)))
    gw = k.define(fn("mul", g, weight))
    dw = k.reduce(ReduceKind.SUM, fn("mul", g, x), over_rows=True)
    db = k.reduce(ReduceKind.SUM, g, over_rows=True)
    top = k.reduce(ReduceKind.MAX, x, over_rows=True)
    mean = k.define(fn("mul", k.reduce(ReduceKind.SUM, fn("mul", gw, x)), f32(1 / cols)), (k.rows,))
    k.store("m", k.define(cast(dw, BF16), (k.cols,)), k.cols, (k.cols,))
    k.store("n", k.define(fn("add", dw, weight), (k.cols,)), k.cols, (k.cols,))
    k.store("db", db, k.cols, (k.cols,))
    dx = k.define(fn("mul", fn("sub", gw, fn("mul", x, mean)), load("r", k.rows)))
    k.store("top", top, k.cols, (k.cols,))
    k.store("dx", dx)
    k.store("mean", mean, k.rows, (k.rows,))
    return k.kernel("norm_backward")


def one_hot(rows: int, cols: int) -> Kernel:
    """y[r, c] = a[r] where label[r] is c, or 3 where it is c / 2, else b[c]"""
    k = Build(rows, cols)
    label = load("label", k.rows, I64)
    here = fn("eq", label, Position(Index.of(k.cols)))
    twice = fn("eq", Position(Index.of(k.cols) // 2 + 1), label)
    rest = fn("where", twice, f32(3.0), load("b", k.cols))
    k.store("y", k.define(fn("where", here, load("a", k.rows), rest)))
    return k.kernel("one_hot")


def every_reduction(rows: int, cols: int, kind: KernelKind) -> Kernel:
    k = Build(rows, cols, kind)
    outer = k.rows if kind is KernelKind.ROWS else k.cols
    x = k.define(load("x", k.flat))
    whole = k.define(load("i", k.flat, I64))
    for each in (
        ReduceKind.SUM,
        ReduceKind.MAX,
        ReduceKind.MIN,
        ReduceKind.ARGMAX,
        ReduceKind.ARGMIN,
        ReduceKind.PROD,
    ):
        k.store(f"f_{each}", k.reduce(each, x), outer, (outer,))
        if each is not ReduceKind.PROD:
            k.store(f"i_{each}", k.reduce(each, whole), outer, (outer,))
    big = k.reduce(ReduceKind.ANY, fn("gt", x, f32(2.0)))
    k.store("any", big, outer, (outer,))
    return k.kernel("every_reduction")


def total_norm(n: int) -> Kernel:
    """scale = 1 / max(1, |g|); g <- g * scale, over one long row: the split form."""
    k = Build(1, n)
    g = k.define(load("g", k.cols))
    square = k.reduce(ReduceKind.SUM, fn("mul", g, g))
    scale = k.define(fn("reciprocal", fn("maximum", fn("sqrt", square), f32(1.0))), ())
    k.store("y", k.define(fn("mul", g, scale)), k.cols)
    k.store("scale", scale, 0, ())
    return k.kernel("total_norm")


def embedding(rows: int, cols: int, vocabulary: int) -> Kernel:
    """y[r, c] = table[ids[r], c] where ids[r] != 0"""
    k = Build(rows, cols)
    token = load("ids", k.rows, I64)
    row = value_index(token, 0, vocabulary - 1)
    mask = fn("ne", token, Const(0, I64))
    k.store("y", k.define(load("table", row * cols + k.cols, F32, mask)))
    return k.kernel("embedding")


def functions(n: int, names: tuple[str, ...], dtype: torch.dtype = F32) -> Kernel:
    """One store per function of ``x`` (and ``z``)."""
    k = Build(1, n)
    x, z = k.define(load("x", k.cols, dtype)), k.define(load("z", k.cols, dtype))
    for name in names:
        value = k.define(fn(name, x, z) if name in BINARY else fn(name, x))
        k.store(f"y_{name}", value, k.cols)
    return k.kernel("functions")


def transpose(rows: int, cols: int) -> Kernel:
    """y[r, c] = x[c, r] + (r * cols + c) % 7, with a padded border that reads zero"""
    k = Build(rows, cols)
    spot = k.define(Position((k.flat + 3) % 7))
    inside = fn("lt", k.define(Position(Index.of(k.cols))), Position(Index.of(cols - 2)))
    x = load("x", k.cols * rows + k.rows, F32, inside)
    k.store("y", k.define(fn("add", x, cast(spot, F32))))
    return k.kernel("transpose")


def float8(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """q[r, c] = float8(x[r, c]); y[r, c] = float32(q[r, c]); z[r, c] = float32(given[c, r])"""
    k = Build(rows, cols)
    q = k.define(cast(load("x", k.flat, F32), dtype))
    k.store("q", q)
    k.store("y", k.define(cast(q, F32)))
    k.store("z", k.define(cast(load("given", k.cols * rows + k.rows, dtype), F32)))
    return k.kernel("float8")
