"""Weights of few bits: read as they are by products of few rows; and products of integers."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from testing import check_pass, node_of, trace
from treadle.compiler.cleaning import CLEAN, FUSE, rewritten
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import with_info
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.rewrite.rules import explain
from treadle.lower.graph import lower
from treadle.passes.products.narrow_weights import (
    FoldWeightCast,
    ScaleInProduct,
)
from treadle.runtime.store.artifact import CallStep, Launch
from treadle.schedule.plan import schedule

aten = torch.ops.aten
BF16 = torch.bfloat16
ROW, TALL = torch.randn(1, 64) / 64, torch.randn(6, 64) / 64
BYTES = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
SCALE = torch.rand(32) / 64
PACKED = torch.randint(0, 256, (32, 24)).to(torch.uint8)


def compiled(program, **options):
    return treadle.compile(program, model=nn.Linear(1, 1), **options)


def steps_of(step):
    return step.compiled.artifact.steps


def close(found, program, inputs, *, tolerance: float) -> None:
    """To what the program gives in float64, as a share of the largest number."""
    exact = program(*(each.double() if each.is_floating_point() else each for each in inputs))
    assert found.dtype is inputs[0].dtype
    worst = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    assert worst <= tolerance  # NaN is not


# --- a formula that reads the weight --------------------------------------------------------


def test_a_cast_weight_is_a_part_of_the_product():
    check_pass(
        FoldWeightCast(),
        lambda x, w: x @ w.to(x.dtype),
        (ROW, BYTES),
        exact=False,  # summed in another order
        after="""
            x: f32[1, 64]
            w: i8[64, 32]
            _to_copy: f32[64, 32] = _to_copy(w, dtype=f32)
            unsqueeze: f32[1, 64, 1] = unsqueeze(x, 2)
            unsqueeze.1: f32[1, 64, 32] = unsqueeze(_to_copy, 0)
            mul: f32[1, 64, 32] = mul.Tensor(unsqueeze, unsqueeze.1)
            sum: f32[1, 32] = sum.dim_IntList(mul, [1])
            return [sum]
        """,
    )


def test_a_transposed_weight_and_a_bias_in_half_precision():
    check_pass(
        FoldWeightCast(),
        lambda x, w, b: F.linear(x, w.to(x.dtype), b),
        (ROW.to(BF16), BYTES.t().contiguous(), SCALE.to(BF16)),
        exact=False,
        after="""
            x: bf16[1, 64]
            w: i8[32, 64]
            b: bf16[32]
            _to_copy: bf16[32, 64] = _to_copy(w, dtype=bf16)
            t: bf16[64, 32] = t(_to_copy)
            _to_copy.1: f32[1, 64] = _to_copy(x, dtype=f32)
            _to_copy.2: f32[64, 32] = _to_copy(t, dtype=f32)
            t.1: f32[32, 64] = t(_to_copy.2)
            unsqueeze: f32[1, 1, 64] = unsqueeze(_to_copy.1, 1)
            unsqueeze.1: f32[1, 32, 64] = unsqueeze(t.1, 0)
            mul: f32[1, 32, 64] = mul.Tensor(unsqueeze, unsqueeze.1)
            sum: f32[1, 32] = sum.dim_IntList(mul, [2])
            _to_copy.3: f32[32] = _to_copy(b, dtype=f32)
            add: f32[1, 32] = add.Tensor(sum, _to_copy.3)
            _to_copy.4: bf16[1, 32] = _to_copy(add, dtype=bf16)
            return [_to_copy.4]
        """,
    )


def unpacked(p: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits, of which each byte has that of a row and that of the next one."""
    return torch.stack([p & 15, p >> 4], 1).flatten(0, 1)


FOLDED = {
    "float32": lambda x, w, p, s: x @ w.to(x.dtype),
    "by rows": lambda x, w, p, s: F.linear(x, w.t().contiguous().to(x.dtype)),
    "scaled first": lambda x, w, p, s: x @ (w.to(x.dtype) * s),
    "a bias": lambda x, w, p, s: torch.addmm(s, x, w.to(x.dtype)),
    "4 bits": lambda x, w, p, s: x @ (unpacked(p).to(x.dtype) - 8),
    "4 bits in groups": lambda x, w, p, s: (
        x
        @ (
            (unpacked(p).view(4, 16, -1).to(x.dtype) - 7)
            * x.view(-1, 4, 16)[:1].sum(2).t()[..., None]
        ).flatten(0, 1)
    ),
    "bits": lambda x, w, p, s: x @ (w > 0).to(x.dtype),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_kernel_reads_what_is_stored(name, dtype):
    inputs = (ROW.to(dtype), BYTES, PACKED, SCALE.to(dtype))

    def program(x, w, p, s):
        return FOLDED[name](x, w, p, s)

    step = compiled(program)
    close(step(*inputs), program, inputs, tolerance=1e-6)
    assert all(isinstance(each, Launch) for each in steps_of(step))
    written = {each.buffers[0][-1] for each in steps_of(step)}
    sizes = [step.compiled.artifact.buffers[each].shape for each in written]
    assert (64, 32) not in sizes  # no wide copy
    assert sum(each.bytes_moved for each in steps_of(step)) < 64 * 32 * dtype.itemsize


class Int8Linear(nn.Module):
    """A Linear whose weight is 8 bits a number, as weight-only quantization makes them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (linear.weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype) + self.bias


def small_model(dtype):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 128), nn.Linear(128, 64)
    return nn.Sequential(Int8Linear(first), nn.GELU(), Int8Linear(last)).to(dtype)


@pytest.mark.parametrize(("dtype", "rows", "calls"), [
    (torch.float32, 1, 0),
    (torch.float32, 2, 0),
    (torch.float32, 3, 2),
    (BF16, 1, 2),
    (BF16, 8, 2),
    (BF16, 9, 2),
])  # fmt: skip
def test_a_model_with_int8_weights(dtype, rows, calls):
    model = small_model(dtype)
    x = torch.randn(rows, 64).to(dtype)
    step = treadle.compile(lambda x: model(x), model=model)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x), rtol=2e-2, atol=2e-2)
    found = [each.op for each in steps_of(step) if isinstance(each, CallStep)]
    packed = dtype is BF16 and rows <= 8
    name = "aten._weight_int8pack_mm.default" if packed else "aten.mm.default"
    assert found == [name] * calls
    assert not step.summary().fallbacks
    with torch.no_grad():
        for options in ({"numerics": "eager"}, {"options": left_out()}):
            other = treadle.compile(lambda x: model(x), model=model, **options)
            torch.testing.assert_close(other(x), model(x), rtol=2e-2, atol=2e-2)
            names = [each.op for each in steps_of(other) if isinstance(each, CallStep)]
            assert names == ["aten.mm.default"] * 2


def left_out() -> treadle.Options:
    return treadle.Options(skip=("ScaleInProduct", "FoldWeightCast", "row-of-dots"))


def test_frozen_int8_weights_in_training():
    """The backward pass reads the cast as well: it is there."""
    model = small_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowest = nn.Linear(16, 64)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(lowest(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    step = treadle.compile(train, model=[model, lowest], optimizer=optimizer)
    x, y = torch.randn(1, 16), torch.randn(1, 64)
    before = [each.clone() for each in model.parameters()]
    loss = step(x, y)
    after = [each.clone() for each in model.parameters()]
    with torch.no_grad():
        for each, old in zip(model.parameters(), before, strict=True):
            each.copy_(old)
    torch.testing.assert_close(loss, train(x, y))
    for each, new in zip(model.parameters(), after, strict=True):
        torch.testing.assert_close(each, new)


WIDE = torch.randn(64, 32)
KEPT = {
    "f32[6, 64] has 6 rows, more than 2": (lambda x, w: x @ w.to(x.dtype), (TALL, BYTES)),
    "w is 8192 bytes, made of 8192": (lambda x, w: x @ w, (ROW, WIDE)),
    "_to_copy is 8192 bytes, made of 16384": (
        lambda x, w: x @ w.to(x.dtype),
        (ROW, torch.randint(0, 9, (64, 32))),
    ),
    "_to_copy is 8192 bytes, made of 8192": (
        lambda x, w: (x @ (v := w.to(x.dtype)), v.sum()),
        (ROW, BYTES),
    ),
    "stack concatenates inside rows: it is read with gaps": (
        lambda x, p: x @ torch.stack([p & 15, p >> 4], -1).flatten(1).to(x.dtype),
        (ROW, torch.randint(0, 256, (64, 16)).to(torch.uint8)),
    ),
    "exp is 8192 bytes, made of 8192": (lambda x, w: x @ w.to(x.dtype).exp(), (ROW, BYTES)),
    "addmm has beta=2, not 1": (
        lambda x, w: torch.addmm(x[:, :32], x, w.to(x.dtype), beta=2),
        (ROW, BYTES),
    ),
    "i64[64, 32] is not floating-point": (lambda x, w: x @ w.to(x.dtype), (ROW.long(), BYTES)),
    "slice_2 is not laid out in rows or columns": (
        lambda x, w: x[:, ::2] @ w.to(x.dtype)[::2],
        (ROW, BYTES),
    ),
}


@pytest.mark.parametrize("reason", KEPT)
def test_says_why_a_product_stays(reason):
    program, inputs = KEPT[reason]

    def named(x, w):
        return program(x, w)

    def packed(x, p):
        return program(x, p)

    step = trace(packed if inputs[1].dtype is torch.uint8 else named, *inputs)
    kinds = (aten.mm.default, aten.addmm.default)
    (product,) = [each for each in step.graph.nodes if each.target in kinds]
    assert explain(FoldWeightCast(), product) == reason
    assert run_passes_count(FoldWeightCast(), step) == 0


def run_passes_count(each, step) -> int:
    return each.run(step)


def test_a_product_of_another_region_stays():
    step = trace(lambda x, w: x @ w.to(x.dtype), ROW, BYTES)
    product = node_of(step, aten.mm.default)
    with_info(node_of(step, aten._to_copy.default), checkpoint=("a",))
    assert explain(FoldWeightCast(), product) == "mm and _to_copy are of several regions"


def test_a_batch_and_what_is_no_product():
    step = trace(lambda x, w: x.sin() @ w.to(x.dtype), ROW, BYTES)
    assert (
        explain(FoldWeightCast(), node_of(step, aten.sin.default))
        == "no rule of FoldWeightCast() ends in sin"
    )


def test_another_device():
    step = trace(lambda x, w: x @ w.to(x.dtype), ROW.to("meta"), BYTES.to("meta"))
    try:
        said = explain(FoldWeightCast(), node_of(step, aten.mm.default))
    except treadle.TreadleError:
        return  # no target is known
    assert said.endswith("is on a device that was not measured")


# --- shifts of signed bytes -----------------------------------------------------------------


SHIFTS = {
    "arithmetic": lambda p: torch.cat([p >> 4, (p << 4) >> 4]),
    "masked": lambda p: torch.cat([(p >> 4) & 15, p & 15]),
    "as unsigned": lambda p: torch.cat([p.view(torch.uint8) >> 4, p.view(torch.uint8) & 15]),
    "2 bits": lambda p: torch.cat([p & 3, (p >> 2) & 3, (p >> 4) & 3, p >> 6]),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_every_byte_is_unpacked_as_eager_does(name):
    """A row of the identity times the weight is the row: no sum rounds."""
    every = torch.arange(-128, 128).to(torch.int8).view(16, 16)

    def program(x, p):
        return x @ SHIFTS[name](p).to(x.dtype)

    expected = SHIFTS[name](every).float()
    step = compiled(program)
    for row, wanted in zip(torch.eye(len(expected)).split(1), expected.split(1), strict=True):
        assert torch.equal(step(row, every), wanted)
    assert all(isinstance(each, Launch) for each in steps_of(step))


# --- a scaled product with an int8 weight ---------------------------------------------------

HALF, BY_ROWS, HALF_SCALE = TALL.to(BF16), BYTES.t().contiguous(), SCALE.to(BF16)


def test_a_scaled_product_is_one_call():
    check_pass(
        ScaleInProduct(),
        lambda x, w, s: F.linear(x, w.to(x.dtype)) * s,
        (HALF.view(2, 3, 64), BY_ROWS, HALF_SCALE[None]),
        exact=False,  # one rounding less
        after="""
            x: bf16[2, 3, 64]
            w: i8[32, 64]
            s: bf16[1, 32]
            view: bf16[6, 64] = view(x, [6, 64])
            view.1: bf16[32] = view(s, [32])
            _weight_int8pack_mm: bf16[6, 32] = _weight_int8pack_mm(view, w, view.1)
            view.2: bf16[2, 3, 32] = view(_weight_int8pack_mm, [2, 3, 32])
            return [view.2]
        """,
    )


def scaled(x, w, s):
    return (x @ w.to(x.dtype).t()) * s


NINE_ROWS, BY_COLUMNS = torch.randn(9, 64).to(BF16), HALF.t().contiguous().t()
UNSCALED = {
    "bf16[9, 64] has 9 rows, more than 8": (
        scaled,
        (torch.randn(9, 64).to(BF16), BY_ROWS, HALF_SCALE),
    ),
    "f32[6, 64] was not faster": (scaled, (TALL, BY_ROWS, SCALE)),
    "f16[6, 64] was not faster": (scaled, (TALL.half(), BY_ROWS, SCALE.half())),
    "u8[32, 64] is not int8": (scaled, (HALF, BY_ROWS.to(torch.uint8), HALF_SCALE)),
    "i8[32, 40] has rows of 40": (
        scaled,
        (HALF[:, :40].contiguous(), BY_ROWS[:, :40].contiguous(), HALF_SCALE),
    ),
    "bf16[6, 64] is not in row-major order": (
        scaled,
        (HALF.t().contiguous().t(), BY_ROWS, HALF_SCALE),
    ),
    "i8[32, 64] is not in row-major order": (scaled, (HALF, BYTES.t(), HALF_SCALE)),
    "mul converts or stretches mm": (scaled, (HALF, BY_ROWS, SCALE)),
    "s is bf16[6, 1], not one number a column": (scaled, (HALF, BY_ROWS, HALF_SCALE[:6, None])),
    "s is bf16[], not one number a column": (scaled, (HALF, BY_ROWS, HALF_SCALE[0])),
    "mul scales by a number": (lambda x, w, s: (x @ w.to(x.dtype).t()) * 2, (HALF, BY_ROWS, SCALE)),
    "mm is used outside the match": (
        lambda x, w, s: (p := x @ w.to(x.dtype).t()) * s + p,
        (HALF, BY_ROWS, HALF_SCALE),
    ),
    "_to_copy is used outside the match": (
        lambda x, w, s: ((x @ (v := w.to(x.dtype)).t()) * s, v.sum()),
        (HALF, BY_ROWS, HALF_SCALE),
    ),
    "_to_copy is not t or transpose.int or permute": (
        lambda x, w, s: (x @ w.to(x.dtype)) * s,
        (HALF, BYTES, HALF_SCALE),
    ),
    "w is not _to_copy": (
        lambda x, w, s: (x @ w.t()) * s,
        (HALF, torch.randn(32, 64).to(BF16), HALF_SCALE),
    ),
    "sin is not mm": (lambda x, w, s: x.sin() * x, (HALF, BY_ROWS, HALF_SCALE)),
    "view moves the columns of mm": (
        lambda x, w, s: (x @ w.to(x.dtype).t()).view(6, 2, 16) * s.view(2, 16),
        (HALF, BY_ROWS, HALF_SCALE),
    ),
}


@pytest.mark.parametrize("reason", UNSCALED)
def test_says_why_a_scale_stays(reason):
    program, inputs = UNSCALED[reason]

    def named(x, w, s):
        return program(x, w, s)

    step = trace(named, *inputs)
    found = [each for each in step.graph.nodes if each.target is aten.mul.Tensor]
    assert explain(ScaleInProduct(), found[0]) == reason
    assert ScaleInProduct().run(step) == 0


def test_a_scale_of_another_region_stays():
    step = trace(scaled, HALF, BY_ROWS, HALF_SCALE)
    with_info(node_of(step, aten.mm.default), checkpoint=("a",))
    assert (
        explain(ScaleInProduct(), node_of(step, aten.mul.Tensor))
        == "mul and mm are of several regions"
    )


@pytest.mark.parametrize("seed", range(40))
def test_programs_at_random(seed):
    """Products of any rows, layout and packing, at the precision of their dtype."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    rows, depth, width = dice.randint(1, 9), 64 * dice.randint(1, 3), dice.randint(1, 40)
    dtype = dice.choice([torch.float32, BF16, torch.float16, torch.float64])
    by_rows, packed, bias = dice.random() < 0.5, dice.random() < 0.4, dice.random() < 0.4
    kind = dice.choice([torch.int8, torch.uint8])
    first = depth // 2 if packed else depth
    weight = torch.randint(-128, 128, (first, width)).to(kind)
    if by_rows and not packed:
        weight = weight.t().contiguous()
    x = (torch.randn(rows, depth) / depth).to(dtype)
    scale = (torch.rand(width) + 0.5).to(dtype)

    def program(x, w, s):
        wide = (unpacked(w) if packed else w).to(x.dtype)
        wide = wide.t() if by_rows and not packed else wide
        return torch.addmm(s, x, wide) * 2 if bias else (x @ wide) * s

    inputs = (x, weight, scale)
    exact = program(x.double(), weight, scale.double())
    step = rewritten(trace(program, *inputs), (*CLEAN, *FUSE))
    run_passes(step, [FoldWeightCast(), ScaleInProduct()])
    eps = torch.finfo(dtype).eps
    size = exact.abs().max()
    for found in (run_step(step, inputs)[0], *([compiled(program)(*inputs)] if seed < 12 else [])):
        assert found.dtype is dtype
        assert ((found.double() - exact).abs().max() / size) <= 4 * eps * (
            1 if dtype.itemsize < 4 else 16
        )


# --- products of integers -------------------------------------------------------------------

LEFT = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
RIGHT = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
OF_ROWS, OF_COLUMNS = torch.rand(32, 1), torch.rand(1, 48)
SCALED = {
    "rows and columns": lambda a, b, r, c: (torch._int_mm(a, b) * (r * c)).to(BF16),
    "one after the other": lambda a, b, r, c: (torch._int_mm(a, b).float() * r * c).to(BF16),
    "columns": lambda a, b, r, c: torch._int_mm(a, b) * c,
    "a scale in half precision": lambda a, b, r, c: torch._int_mm(a, b) * r.to(BF16) * c.to(BF16),
    "with a bias": lambda a, b, r, c: (torch._int_mm(a, b) * r * c + c).half(),
}


@pytest.mark.parametrize("name", SCALED)
def test_an_integer_product_is_scaled_and_cast_in_one_pass(name):
    def program(a, b, r, c):
        return SCALED[name](a, b, r, c)

    inputs = (LEFT, RIGHT, OF_ROWS, OF_COLUMNS)
    step = compiled(program)
    found, expected = step(*inputs), program(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # every step rounds as in eager
    (call,) = [each for each in steps_of(step) if isinstance(each, CallStep)]
    assert (call.op, call.out, call.reason) == ("aten._int_mm.default", "aten._int_mm.out", "")
    launches = [each for each in steps_of(step) if isinstance(each, Launch)]
    (launch,) = [each for each in launches if call.outputs[0] in each.buffers[0]]
    product, result = 4 * 32 * 48, expected.nbytes
    assert launch.bytes_moved <= product + result + OF_ROWS.nbytes + OF_COLUMNS.nbytes


def test_the_integers_are_in_the_arena():
    program = trace(SCALED["rows and columns"], LEFT, RIGHT, OF_ROWS, OF_COLUMNS)
    plan = schedule(lower(program))
    assert plan.offsets.keys() == {"_int_mm"}
    assert plan.arena_bytes == 4 * 32 * 48
