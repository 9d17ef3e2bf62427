"""``parse(show(step, exact=True))`` shows the same and computes the same."""

from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from testing import trace
from treadle.algebra.extents import Size, same
from treadle.capture.step import capture
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Output, Role, Signature
from treadle.graph.core.verify import verify
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.graph.text.size_text import SizeReader, dim_lines
from treadle.report.made_up import made_up_inputs
from treadle.util.errors import ParseError, VerifyError
from treadle.util.scanner import Scanner

X = torch.randn(4, 8)
aten = torch.ops.aten


def same_bits(new, old):
    if new is None or old is None:
        return new is old
    assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
    return torch.equal(new.isnan(), old.isnan()) and torch.equal(new.nan_to_num(), old.nan_to_num())


def check_both(step, inputs):
    """The text comes back, and so do the numbers."""
    text = show(step, exact=True)
    found = parse(text)
    verify(found)
    assert show(found, exact=True) == text
    assert found.signature == step.signature
    torch.manual_seed(0)
    old = run_step(step, inputs)
    torch.manual_seed(0)
    new = run_step(found, inputs)
    assert all(map(same_bits, new, old))
    return found


def test_an_exact_text():
    def program(w, x):
        (y,) = (x.t().mm(w),)
        return y.sum(dtype=torch.float64), w - 0.5 * y, y.max(dim=1).values

    weight, turned = torch.randn(4, 2), torch.randn(4, 4).t()
    step = trace(program, weight, turned, writes={1: 0}, roles={"w": Role.PARAMETER})
    node = step.graph.find_nodes(op="call_function", target=aten.mm.default)[0]
    with_info(node, where="net.py:7: y = x @ w  # a, b", module="h.0", region=3)
    check_both(step, (weight, turned))
    assert show(step, exact=True) == dedent("""\
        w: f32[4, 2]  # parameter
        x: f32[4, 4] strides [1, 4]  # batch
        t: f32[4, 4] = t(x)  # forward
        mm: f32[4, 2] = mm(t, w)  # forward, module h.0, region 3, at net.py:7: y = x @ w  # a, b
        sum: f64[] = sum(mm, dtype=torch.float64)  # forward
        mul: f32[4, 2] = mul.Tensor(mm, 0.5)  # forward
        sub: f32[4, 2] = sub.Tensor(w, mul)  # forward
        max: (f32[4], i64[4]) = max.dim(mm, 1)  # forward
        getitem: f32[4] = max[0]  # forward
        getitem.1: i64[4] = max[1]  # forward
        return [sum]  # ['out0']
        w <- sub  # out1
        return [getitem]  # ['out2']""")


def test_what_ranks_have_parts_of_and_what_is_a_piece():
    step = trace(lambda w, v, x: (x + w) * v, *[torch.randn(4)] * 3)
    inputs = [
        Input(Role.PARAMETER, "layer.w", sharded=True),
        Input(Role.STATE, "momentum", sharded=True, uneven=True),
        Input(Role.BATCH, "x"),
    ]
    step.signature = Signature(tuple(inputs), step.signature.outputs)
    with_info(step.returned[0], piece=3)
    check_both(step, [torch.randn(4)] * 3)
    lines = show(step, exact=True).splitlines()
    assert lines[0] == "w: f32[4]  # sharded parameter layer.w"
    assert lines[1] == "v: f32[4]  # uneven sharded state momentum"
    assert lines[4].endswith("# forward, piece 3")


def test_the_short_text_with_usual_values():
    step = parse("""
        # what a person writes
        w: f32[3]  # parameter lin.weight
        x: f32[3]
        mul: f32[3] = mul.Tensor(w, x)

        return [mul, None]
        w <- mul
    """)
    assert step.signature.inputs == (Input(Role.PARAMETER, "lin.weight"), Input(Role.BATCH, "x"))
    outputs = Output("out0"), Output("out1"), Output("lin.weight", 0)
    assert step.signature.outputs == outputs
    results = run_step(step, [torch.ones(3), torch.full((3,), 2.0)])
    assert results[1] is None
    assert torch.equal(results[2], torch.full((3,), 2.0))


def test_constants_have_their_numbers():
    many = torch.randn(5, 7)

    def program(x):
        few = torch.tensor([1.5, -0.0])
        odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
        return x + few.sum(), x * torch.tensor(many.tolist()).sum(), odd + x[0, :3]

    text = show(trace(program, X), exact=True)
    assert "= constant _tensor_constant0 [1.5, -0.0]  # forward" in text
    step = check_both(trace(program, X), (X,))
    assert torch.equal(run_step(step, (X,))[1], X * many.sum())


def test_awkward_arguments():
    def program(x, inf):
        a = aten.nan_to_num(x, float("inf"), float("-inf"), -0.0)
        b = aten._to_copy(x, dtype=torch.bfloat16, device=torch.device("cpu"))
        c = aten.div.Tensor_mode(x, inf, rounding_mode="floor")
        d = aten.clone(x[1:3, None], memory_format=torch.contiguous_format)
        return a, b, c, d, aten.where(x > 0, torch.zeros_like(x), x)

    other = torch.randn(4, 8)
    step = trace(program, X, other)
    text = show(check_both(step, (X, other)), exact=True)
    assert "nan_to_num(x, float('inf'), float('-inf'), -0.0)" in text
    assert "rounding_mode='floor'" in text


def test_names_of_users_that_could_be_misread():
    step = trace(lambda x: (x.neg(), x.exp()), X, writes={1: 0})
    inputs = (Input(Role.PARAMETER, "a # b'c"),)
    step.signature = type(step.signature)(inputs, (Output("it's"), Output("\n ", 0)))
    check_both(step, (X,))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        nn.Flatten(), nn.Linear(6, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_whole_steps(name):
    torch.manual_seed(1)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(5, 6), torch.randint(0, 3, (5,))
    captured = capture(
        train_step,
        models={"": model},
        optimizers={"": optimizer},
        args=batch,
        kwargs={},
        place=torch.device("cpu"),
    )
    check_both(captured.step, made_up_inputs(captured.step))


DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
UNARY = (
    aten.neg.default, aten.t.default, aten.exp.default, aten.clone.default, aten.abs.default,
    aten.logical_not.default, aten.sign.default, aten.alias.default, aten.sum.default,
    aten.relu.default,
)  # fmt: skip
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.lt.Tensor, aten.mm.default)


def possible(choices, values):
    """Those of the calls whose operands have dtypes and shapes that the operation takes."""
    calls = []
    for op, *places in choices:
        chosen = [at % len(values) for at in places[: 1 if op in UNARY else 2]]
        try:
            values.append(op(*(values[at] for at in chosen)))
        except (RuntimeError, IndexError):
            continue
        calls.append((op, chosen))
    return calls


@st.composite
def programs(draw):
    """Operations on 2-dim inputs of odd sizes; what does not fit its operands
    is left out."""
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 5, 7)), min_size=2, max_size=2)))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    turned = draw(st.booleans())
    inputs = [torch.arange(shape[0] * shape[1]).view(shape).to(each) for each in dtypes]
    inputs = [each.t().contiguous().t() if turned else each for each in inputs]
    kinds = st.tuples(st.sampled_from((*UNARY, *BINARY)), st.integers(0, 99), st.integers(0, 99))
    choices = draw(st.lists(kinds, max_size=8))
    results = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
    inputs = [inputs[at % len(inputs)].clone() for at in range(3)]
    calls = possible(choices, list(inputs))

    def program(x, y, z):
        values = [x, y, z]
        for op, places in calls:
            values.append(op(*(values[at] for at in places)))
        return [values[each % len(values)] for each in results]

    step = trace(program, *inputs)
    types = [(e.dtype, e.shape) for e in (n.meta["val"] for n in step.returned)]
    if types[0] == (inputs[0].dtype, inputs[0].shape):
        step = trace(program, *inputs, writes={0: 0})
    return step, inputs


SIZED = """\
dim S_b in 2..8, sample 3
dim S_t in 2..700, sample 13
w: f32[8, 4]  # parameter
x: f32[S_b, S_t, 8]  # batch
view: f32[(S_b * S_t), 8] = view(x, [(S_b * S_t), 8])  # forward
mm: f32[(S_b * S_t), 4] = mm(view, w)  # forward
view.1: f32[S_b, S_t, 4] = view(mm, [S_b, S_t, 4])  # forward
slice: f32[S_b, ((S_t / 2)), 4] strides [(4 * S_t), 4, 1] = \
slice.Tensor(view.1, 1, 0, ((S_t / 2)))  # forward
arange: i64[S_t] = arange(S_t, device=device('cpu'), pin_memory=False)  # forward
scale: f32[2] = constant scale [1.0, 2.0]  # forward
full: f32[(S_t + -1)] = full([(S_t + -1)], 1.0, pin_memory=False)  # forward
return [slice, arange, scale, full]  # ['y', 'places', 'scale', 'ones']
"""


def test_sizes_of_dims_are_formulas():
    step = parse(SIZED)
    verify(step)
    assert show(step, exact=True) == SIZED.rstrip()
    half = step.graph.find_nodes(op="call_function", target=aten.slice.Tensor)[0]
    assert tuple(half.meta["val"].shape) == (3, 6, 4)
    shape, strides = layout_of(half.meta["val"])
    assert [str(each) for each in (*shape, *strides)] == [
        "S_b", "((S_t / 2))", "4", "(4 * S_t)", "4", "1"
    ]  # fmt: skip
    assert isinstance(half.args[3], Size)


@st.composite
def formulas(draw):
    """A size of two dims."""
    dims = [Size.dim("n", 1, 50, 7), Size.dim("long_name", 2, 9, 3)]
    size = draw(st.sampled_from(dims))
    for _ in range(draw(st.integers(0, 5))):
        other = draw(st.sampled_from((*dims, 1, 2, 3, 12)))
        kind = draw(st.sampled_from(("+", "*", "-", "//", "%")))
        try:
            made = {
                "+": lambda a, b: a + b,
                "*": lambda a, b: a * b,
                "-": lambda a, b: a - b,
                "//": lambda a, b: a // b,
                "%": lambda a, b: a % b,
            }[kind](size, other)
        except VerifyError:  # of what may be negative
            continue
        size = made
    return size


@given(formulas())
@settings(max_examples=200, deadline=None)
def test_any_size_comes_back(size):
    reader = SizeReader(Scanner("\n".join([*dim_lines([size]), str(size)]), ""))
    while reader.line():
        reader.scanner.next_line()
    found = reader.size() if isinstance(size, Size) else reader.scanner.number()
    assert same(found, size)
    assert reader.scanner.at_end()


def test_a_name_of_the_users_is_no_dim():
    text = "dim S_n in 2..9, sample 3\nS_n.1: f32[S_n]  # batch\nreturn [S_n.1]  # ['out0']"
    step = parse(text)
    assert show(step, exact=True) == text
    step.placeholders[0].name = step.placeholders[0].target = "S_n"
    assert show(parse(show(step, exact=True)), exact=True) == show(step, exact=True)


@given(programs())
@settings(max_examples=60, deadline=None)
def test_any_step(found):
    check_both(*found)


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "the text ends without a return"),
        ("hello", 1, 6, "':' is expected here"),
        ("x: f33[2]\nreturn [x]", 1, 4, "there is no dtype 'f33'"),
        ("x: f32[2]  # thing\nreturn [x]", 1, 14, "'thing' is not a role"),
        ("x: f32[S, 2]\nreturn [x]", 1, 8, "this is not a size"),
        ("x: f32[2*S]\nreturn [x]", 1, 8, "this is not a size"),
        ("dim S_n in 2..9, sample 3\nx: f32[S_m]\nreturn [x]", 2, 8, "this is not a size"),
        ("dim S_n in 2..9, sample 3\nx: f32[(S_n + ]\nreturn [x]", 2, 8, "this is not a size"),
        ("dim S_n in 2..9, sample 3\nx: f32[(S_n + -3)]\nreturn [x]", 2, 8, "this is not a size"),
        ("dim S_n in 2..9, sample 3\nx: f32[(S_n / 0)]\nreturn [x]", 2, 8, "this is not a size"),
        ("dim S_n in 2..9, sample 3\nx: f32[((S_n + -5) / 2)]", 2, 8, "this is not a size"),
        ("dim S_n in 2..9, sample 10\nx: f32[S_n]\nreturn [x]", 1, 1, "10 is not in 2..9"),
        ("x: f32[2]\ndim S_n in 2..9, sample 3\nreturn [x]", 2, 5, "':' is expected here"),
        (
            "dim S_n in 2..9, sample 3\nx: f32[S_n]\ny: f32[(2 * S_n)] = neg(x)\nreturn [y]",
            3,
            21,
            "gives f32[S_n], which is not what",
        ),
        ("x: f32[2] strides [1, 2]\nreturn [x]", 1, 20, "2 strides of 1 dims"),
        ("x: f32[2]\nreturn [y]", 2, 9, "there is no value 'y' here"),
        ("x: f32[2]\nreturn [x] x", 2, 12, "the line should end here"),
        ("x: f32[2]\nreturn [x, x]  # ['a']", 2, 18, "the names of 2 results are expected"),
        ("x: f32[2]\nx: f32[2]\nreturn [x]", 2, 1, "'x' is defined twice"),
        ("x: f32[2]\ny: f32[2] = negg(x)\nreturn [y]", 2, 13, "there is no operation 'negg'"),
        ("x: f32[2]\ny: f32[3] = neg(x)\nreturn [y]", 2, 13, "gives f32[2], which is not what"),
        ("x: f32[2]\ny: f32[2] = neg(x, 3)\nreturn [y]", 2, 13, "neg does not take this"),
        ("x: f32[2]\ny: f32[2] = neg_(x)\nreturn [y]", 2, 13, "writes to its argument"),
        (
            "x: f32[2]\ny: f32[2] = neg(x)  # sideways\nreturn [y]",
            2,
            23,
            "neither a phase nor a note",
        ),
        ("x: f32[2]\ny: f32[2] = neg(x\nreturn [y]", 2, 18, "',' is expected here"),
        ("x: f32[2]\ny: f32[2] = neg(<int 2>)\nreturn [y]", 2, 17, "a value or a literal"),
        ("x: f32[2]\ny: f32[] = x[0]\nreturn [y]", 2, 12, "'x' has no result 0"),
        ("x: f32[2]\nc: f32[2] = constant c\nreturn [c]", 2, 23, "are not in the text"),
        ("x: f32[2]\nc: f32[2] = constant c [1.0]\nreturn [c]", 2, 24, "1 numbers of a constant"),
        ("x: f32[2]\nc: f32[2] = constant c bytes 'x'\nreturn [c]", 2, 30, "these are no bytes"),
        ("x: f32[2]\ny: f32[2] = neg(x)\nz: f32[2]\nreturn [y]", 3, 1, "input after an operation"),
        ("x: f32[2]\nreturn [x]\ny: f32[2] = neg(x)", 3, 1, "an operation after the return"),
        ("x: f32[2]\ny: f32[2] = neg(x)\ny <- x", 3, 1, "only an input can be written"),
        ("x: f32[2]\nx <- x\nx <- x", 3, 1, "this input is written twice"),
        ("x: f32[2]\ny: f32[] = sum(x)\nx <- y", 3, 6, "f32[] cannot be written to f32[2]"),
        ("x: b1[2]\nat_run_time[nonzero]: i64[2, 1] = f(x)", 2, 12, "no size before it runs"),
    ],
)
def test_what_is_no_step_is_refused_with_its_place(text, line, column, message):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert message in caught.value.message
    assert (caught.value.code, caught.value.line, caught.value.column) == ("TR-007", line, column)


@pytest.mark.parametrize(
    "text",
    [
        "x: f32[4] on moon\nreturn [x]",
        "x: f32[99999999999999999999, 99]\nreturn [x]",
        "x: f32[9999999999999, 9999999]\nreturn [x]",
        "x: f32[2]  # batch '\\x'\nreturn [x]",
        "x: f32[2]\nc: f32[99999999999999, 9] = constant c [1.0]\nreturn [x]",
    ],
)
def test_tensors_that_cannot_be_are_refused(text):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert len(caught.value.message.splitlines()) == 1


def test_a_graph_of_a_device_that_is_not_here():
    text = (
        "x: f32[4] on cuda:0  # batch\nrelu: f32[4] on cuda:0 = relu(x)  # forward\nreturn [relu]"
    )
    assert show(parse(text), exact=True) == f"{text}  # ['out0']"


WHOLE = """
w: f32[5, 7]  # parameter a.b
x: f32[3, 5]
mm: f32[3, 7] = mm(x, w)  # forward, module 'h.0', region 3, at x.py:3: foo
max: (f32[3], i64[3]) = max.dim(mm, 1)
getitem: f32[3] = max[0]
c: f32[2] = constant c0 [1.0, -0.0]
e: i64[3, 5] = empty_strided([3, 5], [5, 1], dtype=i64, device=device('cpu'))
mul: f32[5, 7] = mul.Tensor(w, 0.5)
return [mm, None, getitem, c, e]
w <- mul  # it
"""


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("empty_strided([3], [1], dtype=164)", "dtype"),
        ("empty_strided([3], [1], dtype=-1)", "dtype"),
        ("empty_strided([3], [1], layout=99)", "layout"),
        ("clone(x, memory_format=77)", "memory_format"),
        ("view.dtype(x, 164)", "dtype"),
    ],
)
def test_a_number_in_the_place_of_a_dtype_is_refused(call, argument):
    """PyTorch takes it, and ends the process."""
    with pytest.raises(ParseError, match=f"does not take a number as {argument}"):
        parse(f"x: f32[3]\ny: f32[3] = {call}\nreturn [y]")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_texts_are_read_or_refused(data):
    """Never another error, whatever was typed."""
    at = data.draw(st.integers(0, len(WHOLE)))
    typed = data.draw(st.text(" ()[]{}<>,:=%$#'\n+-*/\\.0129abfixTN_", max_size=3))
    text = WHOLE[:at] + typed + WHOLE[at + data.draw(st.integers(0, 3)) :]
    try:
        found = parse(text)
    except ParseError:
        return
    exact = show(found, exact=True)
    assert show(parse(exact), exact=True) == exact


def test_the_error_shows_the_place():
    with pytest.raises(ParseError) as caught:
        parse("x: f32[2]\nneg: f32[2] = neg(y)\nreturn [neg]")
    assert str(caught.value).splitlines()[:4] == [
        "[TR-007] there is no value 'y' here",
        "  at line 2, column 19:",
        "    neg: f32[2] = neg(y)",
        "                      ^",
    ]


def test_operators_of_libraries():
    text = "x: b1[]  # batch\ntreadle: NoneType = treadle.expect(x)\nreturn [x]"
    assert show(parse(text)) == text
