"""Every declaration of dims against what the operator does to its elements."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from treadle.algebra.extents import Size
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import schema_of
from treadle.graph.core import dim_maps
from treadle.graph.core.dim_maps import DECLARED, MOVES, FactorTable, dim_map
from treadle.graph.core.node_info import set_value
from treadle.graph.rewrite.matching import NoMatch
from treadle.util.nested import leaves

aten = torch.ops.aten
SIZES = st.sampled_from((0, 1, 1, 2, 3, 4, 6))
FLOAT8 = torch.float8_e4m3fn
SETTINGS = settings(max_examples=25, deadline=None)


def numbers(*shape: int, dtype=torch.float64) -> torch.Tensor:
    """Whole numbers, whose sums and products are exact."""
    return torch.randint(-9, 10, shape).to(dtype)


def node_of_call(target, args, kwargs=None) -> fx.Node:
    graph = fx.Graph()

    def placeholder(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder("x")
        set_value(node, leaf)
        return node

    def nodes(value):
        return (
            [placeholder(each) for each in value] if isinstance(value, list) else placeholder(value)
        )

    node = graph.call_function(target, tuple(map(nodes, args)), kwargs or {})
    set_value(node, run(target, args, kwargs))
    return node


def run(target, args, kwargs=None):
    torch.manual_seed(0)
    return target(*args, **(kwargs or {}))


# Calls of every operator that declares what it does.


def shapes(least=0, most=4):
    return st.lists(SIZES, min_size=least, max_size=most)


def dim_in(draw, count):
    return draw(st.integers(-max(count, 1), max(count, 1) - 1))


@st.composite
def reshaped(draw):
    """Sizes that are split and joined at random."""
    parts = draw(st.lists(st.sampled_from((1, 2, 3)), max_size=4))
    if draw(st.booleans()) and parts:
        parts[0] = draw(st.sampled_from((0, 1, 4, 6)))
    return [numbers(*grouped(draw, parts)), grouped(draw, parts)]


def grouped(draw, parts):
    found, at = [], 0
    while at < len(parts):
        count = draw(st.integers(1, len(parts) - at))
        found.append(math.prod(parts[at : at + count]))
        at += count
        if draw(st.booleans()):
            found.append(1)
    return found if math.prod(found) == math.prod(parts) else parts


@st.composite
def any_reshape(draw):
    shape = draw(shapes(1))
    return [numbers(*shape), draw(st.permutations(shape))]


@st.composite
def alone(draw):
    return [numbers(*draw(shapes()))]


@st.composite
def with_dim(draw, *more, least=1):
    shape = draw(shapes(least))
    return [numbers(*shape), dim_in(draw, len(shape)), *more]


@st.composite
def full_dim(draw, *more):
    """A dim that has elements, for what chooses one."""
    args = draw(with_dim())
    shape = [max(size, 1) for size in args[0].shape]
    return [numbers(*shape), args[1], *more]


@st.composite
def with_dims(draw, *more):
    shape = [max(size, 1) for size in draw(shapes())]
    dims = draw(st.lists(st.sampled_from(range(len(shape))), unique=True)) if shape else []
    return [numbers(*shape), *more, dims, draw(st.booleans())]


@st.composite
def unsqueezed(draw):
    shape = draw(shapes())
    return [numbers(*shape), draw(st.integers(-len(shape) - 1, len(shape)))]


@st.composite
def squeezed(draw):
    shape = draw(shapes(1))
    return [numbers(*shape), draw(st.lists(st.sampled_from(range(len(shape))), unique=True))]


@st.composite
def turned(draw):
    shape = draw(shapes())
    return [numbers(*shape), draw(st.permutations(range(len(shape))))]


@st.composite
def swapped(draw):
    shape = draw(shapes())
    return [numbers(*shape), dim_in(draw, len(shape)), dim_in(draw, len(shape))]


@st.composite
def expanded(draw):
    shape = draw(shapes())
    wide = [draw(SIZES) if size == 1 else size for size in shape]
    return [numbers(*shape), [*draw(shapes(0, 2)), *wide]]


@st.composite
def cut(draw, what):
    x, dim = draw(with_dim())
    size = x.shape[dim]
    match what:
        case "size" | "chunks":
            return [x, draw(st.integers(1, 3)), dim]
        case "sizes":
            first = draw(st.integers(0, size))
            return [x, [first, size - first], dim]
        case "slice":
            return [
                x,
                dim,
                draw(st.integers(-7, 7)),
                draw(st.integers(-7, 7)),
                draw(st.integers(1, 2)),
            ]
        case "select":
            x = torch.cat(
                [
                    x,
                    x.narrow(dim, 0, 0).new_ones(
                        [1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)]
                    ),
                ],
                dim,
            )
            return [x, dim, draw(st.integers(0, size))]
        case _:
            wide = list(x.shape)
            wide[dim] += 3
            start = draw(st.integers(0, 3))
            return [x, wide, dim, start, start + size, 1]


@st.composite
def joined(draw, *, stacked=False):
    shape = draw(shapes(0 if stacked else 1))
    dim = draw(st.integers(0, len(shape) if stacked else len(shape) - 1))
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = list(shape)
        if not stacked:
            sizes[dim] = draw(SIZES)
        pieces.append(numbers(*sizes))
    return [pieces, dim]


@st.composite
def of_indices(draw, *, source=None):
    """``gather`` and ``scatter``: an index may have fewer elements than what it is of."""
    shape = [max(size, 1) for size in draw(shapes(1))]
    dim = dim_in(draw, len(shape))
    fewer = [draw(st.sampled_from((size, max(size - 1, 1)))) for size in shape]
    index = torch.randint(0, shape[dim], fewer)
    if source is None:
        return [numbers(*shape), dim, index]
    return [numbers(*shape), dim, index, numbers(*fewer) if source else 2.0]


@st.composite
def softmax_gradient(draw):
    x, dim = draw(with_dim())
    return [x, numbers(*x.shape), dim, torch.float64]


@st.composite
def product(draw, *, batch, added):
    b, m, k, n = (draw(SIZES) for _ in range(4))
    lead = [b] if batch else []
    factors = [numbers(*lead, m, k), numbers(*lead, k, n)]
    wide = [*lead, m, n]
    kept = draw(st.integers(0, len(wide)))
    bias = [draw(st.sampled_from((1, size))) for size in wide[kept:]]
    return [numbers(*bias), *factors] if added else factors


@st.composite
def scaled_product(draw):
    """With one scale for all, or one for each row and each column; of one product or more, since
    PyTorch leaves the sum of none as its memory was."""
    m, k, n = draw(SIZES), max(draw(SIZES), 1), draw(SIZES)
    x, y = numbers(m, k, dtype=FLOAT8), numbers(n, k, dtype=FLOAT8).t()
    wide = draw(st.booleans())
    scales = (numbers(m, 1), numbers(1, n)) if wide else (numbers(), numbers(1))
    args = [x, y, *(each.float() for each in scales), None, None, torch.float32]
    try:
        aten._scaled_mm.default(*args)
    except RuntimeError:
        pytest.skip("this PyTorch has no such product on CPUs")
    return args


CALLS = {
    **dict.fromkeys(dim_maps.RESHAPES, reshaped() | any_reshape()),
    aten.unsqueeze.default: unsqueezed(),
    aten.squeeze.default: alone(),
    aten.squeeze.dim: with_dim(least=0),
    aten.squeeze.dims: squeezed(),
    aten.t.default: shapes(0, 2).map(lambda shape: [numbers(*shape)]),
    aten.transpose.int: swapped(),
    aten.permute.default: turned(),
    aten.expand.default: expanded(),
    **dict.fromkeys(dim_maps.COPIES, alone()),
    aten._to_copy.default: alone(),
    aten.view.dtype: alone().map(lambda args: [*args, torch.int64]),
    torch.ops.prims.convert_element_type.default: alone().map(lambda args: [*args, torch.float32]),
    aten.split.Tensor: cut("size"),
    aten.unsafe_split.Tensor: cut("size"),
    aten.chunk.default: cut("chunks"),
    aten.unsafe_chunk.default: cut("chunks"),
    aten.split_with_sizes.default: cut("sizes"),
    aten.unsafe_split_with_sizes.default: cut("sizes"),
    aten.slice.Tensor: cut("slice"),
    aten.select.int: cut("select"),
    aten.unbind.int: with_dim(),
    aten.slice_backward.default: cut("slice_backward"),
    aten.cat.default: joined(),
    aten.stack.default: joined(stacked=True),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), with_dims()),
    **dict.fromkeys((aten.amax.default, aten.amin.default), with_dims()),
    aten.logsumexp.default: with_dims().filter(lambda a: a[1]),  # of no dims it raises
    **dict.fromkeys((aten.any.dim, aten.all.dim, aten.prod.dim_int), full_dim(True) | full_dim()),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), full_dim(True) | full_dim()),
    **dict.fromkeys((aten.max.dim, aten.min.dim), full_dim(True) | full_dim()),
    **dict.fromkeys((aten.var.correction, aten.std.correction), with_dims().map(lambda a: a[:2])),
    aten.linalg_vector_norm.default: with_dims(2),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), with_dim(False)),
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
        softmax_gradient(),
    ),
    aten.cumsum.default: with_dim(),
    aten.topk.default: full_dim().map(lambda args: [args[0], 1, args[1]]),
    aten.gather.default: of_indices(),
    aten.scatter.src: of_indices(source=True),
    aten.scatter_add.default: of_indices(source=True),
    aten.scatter.value: of_indices(source=False),
    aten.mm.default: product(batch=False, added=False),
    aten.addmm.default: product(batch=False, added=True),
    aten.bmm.default: product(batch=True, added=False),
    aten.baddbmm.default: product(batch=True, added=True),
    aten._scaled_mm.default: scaled_product(),
}  # fmt: skip


def test_every_declaration_is_compared():
    assert set(CALLS) == DECLARED


@pytest.mark.parametrize("target", sorted(CALLS, key=str), ids=str)
def test_declarations_are_what_operators_do(target):
    @SETTINGS
    @given(CALLS[target])
    def check(args):
        compare(target, args)

    check()


def compare(target, args):
    """The results are where they are said to be, and made of no more than is said."""
    node = node_of_call(target, args)
    known = dim_map(node)
    tensors = [each for each in leaves(args) if isinstance(each, torch.Tensor)]
    results = tensors_of(node.meta["val"])
    assert len(known.operands) == len(tensors)
    assert len(known.results) == len(results)
    for (_, dims), tensor in zip(known.operands, tensors, strict=True):
        assert known.table.shape(dims) == tuple(tensor.shape)
    for dims, result in zip(known.results, results, strict=True):
        assert known.table.shape(dims) == tuple(result.shape)
    if target in MOVES:
        assert_moved(known, tensors[0], results[0], target)
    for at, (_, dims) in enumerate(known.operands):
        for factor in flat(dims):
            assert_apart(known, target, args, at, factor)


def tensors_of(value):
    return [each for each in leaves([value]) if isinstance(each, torch.Tensor)]


def flat(dims):
    return [factor for dim in dims for factor in dim]


def by_factors(known, dims, tensor):
    """The tensor with a dim for each factor."""
    return tensor.reshape(known.table.sizes(flat(dims)))


def assert_moved(known, operand, result, target):
    """Every element of the result is the one with the same index of every factor."""
    ((_, before),), after = known.operands, known.result
    if not set(flat(before)) <= set(flat(after)):
        assert target in dim_maps.RESHAPES  # the factors of a part of the dims are not known
        return
    source = by_factors(known, before, operand)
    kept = [factor for factor in flat(after) if factor in flat(before)]
    source = source.permute([flat(before).index(factor) for factor in kept])
    for at, factor in enumerate(flat(after)):
        if factor not in kept:
            source = source.unsqueeze(at)
    found = by_factors(known, after, result)
    assert torch.equal(found, source.expand(found.shape))


def assert_apart(known, target, args, operand, factor):
    """Other elements at one index of a factor change nothing at its other indices."""
    dims = known.operands[operand][1]
    (size,) = known.table.sizes([factor])
    for index in {0, size - 1} if size > 1 else ():
        others = [each for each in range(size) if each != index]
        changed = replaced(args, operand, partial(changed_at, known, dims, factor, index))
        before, after = tensors_of(run(target, args)), tensors_of(run(target, changed))
        for found, one, other in zip(known.results, before, after, strict=True):
            if factor in flat(found):
                place = flat(found).index(factor)
                kept = [
                    by_factors(known, found, each).index_select(place, torch.tensor(others))
                    for each in (one, other)
                ]
                torch.testing.assert_close(*kept, equal_nan=True)


def changed_at(known, dims, factor, index, tensor):
    other = by_factors(known, dims, tensor.clone())
    part = other.select(flat(dims).index(factor), index)
    if tensor.dtype is torch.int64:
        part.zero_()
    else:
        part.copy_(torch.randint(-50, 50, part.shape).to(tensor.dtype))
    return other.reshape(tensor.shape)


def replaced(args, at, change):
    """The arguments with another tensor in the place of one."""
    count = iter(range(1000))

    def leaf(each):
        return change(each) if isinstance(each, torch.Tensor) and next(count) == at else each

    return [list(map(leaf, each)) if isinstance(each, list) else leaf(each) for each in args]


@pytest.mark.parametrize(
    "target",
    sorted(DECLARED - MOVES - {aten.slice_backward.default}, key=str),
    ids=str,
)
def test_part_of_a_factor_gives_part_of_the_result(target):
    """What chunks of rows rely on: the call on some indices gives those of the result."""

    @SETTINGS
    @given(CALLS[target])
    def check(args):
        node = node_of_call(target, args)
        known = dim_map(node)
        results = tensors_of(node.meta["val"])
        for factor in flat(known.operands[0][1]):
            places = [
                dims.index((factor,)) if (factor,) in dims else None for _, dims in known.operands
            ]
            if (
                None in places
                or 0 in known.table.sizes([factor])
                or not all((factor,) in d for d in known.results)
            ):
                continue
            part = args
            for at, place in enumerate(places):
                part = replaced(part, at, lambda x, place=place: x.narrow(place, 0, 1))
            found = tensors_of(run(target, part))
            for dims, one, whole in zip(known.results, found, results, strict=True):
                wanted = whole.narrow(dims.index((factor,)), 0, 1)
                torch.testing.assert_close(one, wanted, equal_nan=True)

    check()


# Operators that work element by element say so among their facts.


def elementwise():
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::") or schema.is_mutable:
            continue
        packet = getattr(aten, schema.name.removeprefix("aten::"), None)
        op = getattr(packet, schema.overload_name or "default", None)
        if isinstance(op, torch._ops.OpOverload) and facts_of(op).elementwise:
            yield op


def argument(each, shape):
    kind = str(each.type)
    match kind:
        case "Tensor":
            return numbers(*shape)
        case "number" | "float":
            return 2.0
        case "int":
            return 1
        case _ if each.has_default_value():
            return each.default_value
        case "bool":
            return False
        case _:
            return None


def test_elementwise_operators_are_what_they_say():
    compared = set()
    for op in elementwise():
        wide = [(2, 1, 3), (3,), (4, 1)]
        given = [each for each in schema_of(op).arguments if not each.kwarg_only]
        args = [argument(each, wide[at % 3]) for at, each in enumerate(given)]
        try:
            results = tensors_of(run(op, args))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue
        if results:
            compare(op, args)
            compared.add(op)
    assert len(compared) > 150


# What declarations say, and what they do not.


def shown(target, *args):
    """``[a] [b c], [c] -> [a]``"""
    known = dim_map(node_of_call(target, list(args)))
    letters = {}

    def text(dims):
        for factor in flat(dims):
            letters.setdefault(factor, "abcdefgh"[len(letters)])
        return " ".join("[" + " ".join(letters[factor] for factor in dim) + "]" for dim in dims)

    before = ", ".join(text(dims) for _, dims in known.operands)
    return f"{before} -> {', '.join(map(text, known.results))}"


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        (aten.permute.default, (numbers(2, 3), [1, 0]), "[a] [b] -> [b] [a]"),
        (aten.view.default, (numbers(2, 12, 8), [24, 8]), "[a] [b] [c] -> [a b] [c]"),
        (aten.view.default, (numbers(24, 8), [2, 12, 8]), "[a b] [c] -> [a] [b] [c]"),
        (aten.view.default, (numbers(5, 4, 6), [5, 6, 4]), "[a] [b] [c] -> [a] [d] [e]"),
        (aten.view.default, (numbers(6, 4), [3, 8]), "[a b] [c] -> [a] [b c]"),
        (aten.unsqueeze.default, (numbers(2, 3), 1), "[a] [b] -> [a] [] [b]"),
        (aten.expand.default, (numbers(1, 3), [4, 3]), "[] [a] -> [b] [a]"),
        (aten.add.Tensor, (numbers(4, 3), numbers(3)), "[a] [b], [b] -> [a] [b]"),
        (aten.sum.dim_IntList, (numbers(2, 3), [1]), "[a] [b] -> [a]"),
        (aten.sum.dim_IntList, (numbers(2, 3), [1], True), "[a] [b] -> [a] []"),
        (aten._softmax.default, (numbers(2, 3), 1, False), "[a] [b] -> [a] [c]"),
        (aten.slice.Tensor, (numbers(2, 3), 1, 1, 3), "[a] [b] -> [a] [c]"),
        (aten.select.int, (numbers(2, 3), 0, 1), "[a] [b] -> [b]"),
        (aten.stack.default, ([numbers(2, 3)] * 2, 1), "[a] [b], [a] [b] -> [a] [c] [b]"),
        (aten.cat.default, ([numbers(2, 3), numbers(2, 4)], 1), "[a] [b], [a] [c] -> [a] [d]"),
        (aten.max.dim, (numbers(2, 3), 1), "[a] [b] -> [a], [a]"),
        (aten.mm.default, (numbers(2, 3), numbers(3, 4)), "[a] [b], [b] [c] -> [a] [c]"),
        (
            aten.addmm.default,
            (numbers(4), numbers(2, 3), numbers(3, 4)),
            "[a], [b] [c], [c] [a] -> [b] [a]",
        ),
    ],
)  # fmt: skip
def test_text_of_declarations(target, args, text):
    assert shown(target, *args) == text


@st.composite
def moves_of(draw, shape):
    """A call that moves elements of a value of that shape: its operator and what else it takes."""
    count = len(shape)
    kind = draw(st.sampled_from(("view", "permute", "unsqueeze", "squeeze", "expand", "clone")))
    match kind:
        case "view":
            return aten.reshape.default, [
                grouped(draw, [part for n in shape for part in halves(n)])
            ]
        case "permute":
            return aten.permute.default, [draw(st.permutations(range(count)))]
        case "unsqueeze":
            return aten.unsqueeze.default, [draw(st.integers(0, count))]
        case "expand":
            return aten.expand.default, [[draw(SIZES) if n == 1 else n for n in shape]]
        case "squeeze":
            return aten.squeeze.default, []
        case _:
            return aten.clone.default, []


def halves(size):
    return [2, size // 2] if size and size % 2 == 0 else [size]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_chains_of_moves_are_followed(data):
    shape = data.draw(shapes())
    value = torch.arange(math.prod(shape)).reshape(shape)
    first, table = value, FactorTable()
    origin = dims = table.dims_of(shape)
    for _ in range(data.draw(st.integers(1, 5))):
        target, args = data.draw(moves_of(value.shape))
        try:
            dims = table.through(node_of_call(target, [value, *args]), dims)
        except NoMatch:
            return
        value = run(target, [value, *args])
        assert table.shape(dims) == tuple(value.shape)
    before, after = table.factors(origin), table.factors(dims)
    source = first.reshape(table.sizes(before))
    source = source.permute([before.index(each) for each in after if each in before])
    for at, each in enumerate(after):
        source = source if each in before else source.unsqueeze(at)
    assert torch.equal(source.expand(table.sizes(after)).reshape(value.shape), value)


def test_sizes_of_a_call_are_followed_as_formulas():
    batch, tokens = Size.dim("batch", 1, 64, 4), Size.dim("tokens", 2, 512, 16)
    table = FactorTable()
    dims = table.dims_of([batch, tokens, 12])
    node = fx.Graph().placeholder("x")
    joined = table.grouped(node, dims, [batch * tokens, 12])
    assert joined == ((0, 1), (2,))
    apart = table.grouped(node, joined, [batch, tokens, 3, 4])
    assert table.shape(apart) == (batch, tokens, 3, 4)
    with pytest.raises(NoMatch, match="puts parts of several dims together"):
        table.grouped(node, dims, [batch * 2, tokens, 6])


def test_refusals():
    with pytest.raises(NoMatch, match="is not known"):
        dim_map(node_of_call(aten.tril.default, [numbers(3, 3)]))
    with pytest.raises(NoMatch, match="has other sizes than its operand"):
        dim_map(node_of_call(aten.view.dtype, [numbers(3, 4), torch.float32]))
