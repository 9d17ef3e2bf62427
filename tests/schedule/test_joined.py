"""Products that are written where a cat, a stack, padding or a scattered slice puts them."""

import random
import re
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from loop.exact_text import exact_program
from loop.program_parsing import parse_program
from testing import trace
from treadle.loop.interpret import interpret_program
from treadle.loop.nest import bytes_moved
from treadle.loop.program import Call, Compute, Program
from treadle.loop.simplify import simplify_program
from treadle.loop.verify import verify_program
from treadle.lower.graph import lower
from treadle.runtime.store.artifact import CallStep
from treadle.runtime.store.serialize import artifact_from_bytes, artifact_to_bytes
from treadle.schedule.joined import write_where_joined
from treadle.schedule.plan import schedule
from treadle.schedule.workers import THREADS, WORKERS

aten = torch.ops.aten
APART = replace(THREADS, joins=0)
X, V, W, Y = torch.randn(6, 4), torch.randn(4, 3), torch.randn(4, 5), torch.randn(6, 2)
SQUARE, BATCHES, MORE = torch.randn(4, 4), torch.randn(3, 6, 4), torch.randn(3, 4, 5)
OPERANDS = (X, V, W, Y, SQUARE, BATCHES, MORE)


def program_of(program, *inputs, **options) -> Program:
    return simplify_program(lower(trace(program, *inputs, **options)))


def parts(program: Program) -> list[Call]:
    return [each for each in program.steps if isinstance(each, Call) and each.into is not None]


def without_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKERS, "threads", APART)


def interpreted(program: Program, inputs):
    named = {name: each.clone() for name, each in zip(program.inputs, inputs, strict=True)}
    return interpret_program(program, named)


def check_equal(before: Program, after: Program, inputs) -> None:
    """Valid, with the same bits, and nothing is left to do."""
    verify_program(after)
    assert write_where_joined(after) is after
    assert exact_program(parse_program(exact_program(after))) == exact_program(after)
    for new, old in zip(interpreted(after, inputs), interpreted(before, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def check_joined(program, inputs, count: int) -> Program:
    """``count`` calls write into a part; by the interpreter and compiled the bits are the same."""
    before = program_of(program, *inputs)
    after = write_where_joined(before)
    assert len(parts(after)) == count
    check_equal(before, after, inputs)
    step = treadle.compile(program, model=nn.Linear(1, 1))
    for _ in range(2):
        torch.testing.assert_close(step(*inputs), program(*inputs))
    return after


def test_a_mixed_cat_as_text():
    def program(x, v, w, y):
        joined = torch.cat([x @ v, x @ w, y.sin()], 1)
        return joined @ joined.t()

    after = check_joined(program, (X, V, W, Y), 2)
    text = exact_program(after)
    text = re.sub(r", operation '[\w.]+'", "", text)
    assert text[text.index("call") :].replace(", phase 'forward'", "") == dedent("""\
        call cat = aten.mm.default(ref x: f32[6, 4], ref v: f32[4, 3]) from ['mm'], \
out 'aten.mm.out', into cat: f32[6, 3] strides [10, 1]

        call cat = aten.mm.default(ref x: f32[6, 4], ref w: f32[4, 5]) from ['mm_1'], \
out 'aten.mm.out', into cat: f32[6, 5] strides [10, 1] at 3

        compute sin: f32[6, 2] from ['sin']
          axes i<6, j<2
          [i, j] -> f32
            sin(y[2*i + j]:f32)

        compute cat: f32[6, 2] strides [10, 1] at 8 from ['cat']
          axes i<6, j<2
          [i, j] -> f32
            sin[2*i + j]:f32

        call mm_2 = aten.mm.default(ref cat: f32[6, 10], ref cat: f32[10, 6] strides [1, 10]) \
from ['mm_2'], out 'aten.mm.out'

        return [ref mm_2: f32[6, 6]]
        """)


def stored(join):
    """A program whose join is read by a library call, and so is stored."""

    def program(x, v, w, y, s, b, m):
        joined = join(x, v, w, y, s, b, m)
        return joined @ joined.transpose(-1, -2)

    return program


JOINS = {
    "columns": (lambda x, v, w, y, s, b, m: torch.cat([x @ v, x @ w], 1), 2),
    "rows": (lambda x, v, w, y, s, b, m: torch.cat([x @ w, s @ w, y.repeat(1, 3)[:, :5]], 0), 2),
    "biases": (lambda x, v, w, y, s, b, m: torch.cat([torch.addmm(y[:, :1], x, v), x @ w], 1), 2),
    "views": (lambda x, v, w, y, s, b, m: torch.cat([b @ v, b @ w], 2), 2),
    "the same transposed": (lambda x, v, w, y, s, b, m: torch.cat([(x @ v).t(), (x @ w).t()]), 2),
    "batches": (lambda x, v, w, y, s, b, m: torch.cat([b.bmm(m), b[:, :2].exp().bmm(m)], 1), 2),
    "a stack": (lambda x, v, w, y, s, b, m: torch.stack([x @ s, (x * 2) @ s, x]), 2),
    "padding": (lambda x, v, w, y, s, b, m: F.pad(x @ w, (1, 2)), 1),
    "a scattered slice": (
        lambda x, v, w, y, s, b, m: torch.slice_scatter(x.repeat(1, 2), x @ w, 1, 2, 7),
        1,
    ),
    "vectors": (lambda x, v, w, y, s, b, m: torch.cat([x.mv(s[0]), x.mv(s[1])])[None], 2),
    "batches with something added": (
        lambda x, v, w, y, s, b, m: torch.cat([torch.baddbmm(m[:, :1], b, m), b.bmm(m)], 1),
        2,
    ),
    "vectors with something added": (
        lambda x, v, w, y, s, b, m: torch.cat([torch.addmv(y[:, 0], x, s[0]), x.mv(s[1])])[None],
        2,
    ),
    "a sum of products": (
        lambda x, v, w, y, s, b, m: torch.cat([torch.addmm(x @ v, x.exp(), v), x @ w], 1),
        2,
    ),
    "one row": (lambda x, v, w, y, s, b, m: torch.cat([x[:1] @ v, x[:1] @ w], 1), 2),
    "a column": (lambda x, v, w, y, s, b, m: torch.cat([x @ v, x @ w[:, 2:3]], 1), 2),
    "several neighbours": (
        lambda x, v, w, y, s, b, m: torch.cat([y, y.sin(), x @ w, x @ s, y * y, y + 1], 1),
        2,
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(name):
    join, count = JOINS[name]
    check_joined(stored(join), OPERANDS, count)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers(dtype):
    join, count = JOINS["columns"]
    check_joined(stored(join), tuple(each.to(dtype) for each in OPERANDS), count)


def test_neighbours_that_are_no_products_are_one_formula():
    join, _ = JOINS["several neighbours"]
    after = write_where_joined(program_of(stored(join), *OPERANDS))
    (cat,) = {call.into.buffer for call in parts(after)}
    rest = [e for e in after.steps if isinstance(e, Compute) and e.output.buffer == cat]
    assert [(each.output.offset, each.output.shape) for each in rest] == [(0, (6, 4)), (13, (6, 4))]


REFUSED = {
    "a product is read by others": lambda x, v, w, y, s, b, m: torch.cat([p := x @ s, p.sin()], 1),
    "a product is there twice": lambda x, v, w, y, s, b, m: torch.cat([p := x @ s, p], 1),
    "only a part of a product is there": lambda x, v, w, y, s, b, m: torch.cat(
        [(x @ w)[:, :4], y], 1
    ),
    "the first column is left out": lambda x, v, w, y, s, b, m: torch.cat([(x @ w)[:, 1:], y], 1),
    "a product is turned around": lambda x, v, w, y, s, b, m: torch.cat([(x @ w).flip(0), y], 1),
    "a product is changed": lambda x, v, w, y, s, b, m: torch.cat([(x @ w).sin(), y], 1),
    "a product is converted": lambda x, v, w, y, s, b, m: torch.cat([x @ w, y.double()], 1),
    "most of it is no product": lambda x, v, w, y, s, b, m: torch.cat([x @ v, x.sin()], 1),
    "rows and columns have gaps": lambda x, v, w, y, s, b, m: torch.stack([x @ s, x], 2),
    "a matrix is cut": lambda x, v, w, y, s, b, m: torch.cat(
        [(x @ w).view(2, 3, 5), y[:2, :1, None].expand(2, 1, 5)], 1
    ),
    "PyTorch allocates": lambda x, v, w, y, s, b, m: torch.cat([torch.cdist(x, x), x], 1),
    "it is no product": lambda x, v, w, y, s, b, m: torch.cat([x.cumsum(0), y], 1),
    "two dims decide": lambda x, v, w, y, s, b, m: F.pad(x @ w, (1, 2, 3, 4)),
    "a value decides": lambda x, v, w, y, s, b, m: torch.where(y[:, :1] > 0, x @ s, x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stays_where_it_is(name):
    before = program_of(stored(REFUSED[name]), *OPERANDS)
    assert write_where_joined(before) is before


def joined_and(use):
    """A join of two products, and what ``use`` makes of it and of the first."""

    def program(x, v, w):
        first = x @ v
        return use(torch.cat([first, x @ w], 1), first)

    return program


READERS = {
    "a product is returned": (lambda joined, first: (joined.t() @ joined, first), 1),
    "it is added up": (lambda joined, first: joined.sum(1), 0),
    "only formulas read it": (lambda joined, first: joined.sin(), 0),
    "a small result": (lambda joined, first: joined, 0),
    "a small result that a call reads": (lambda joined, first: (joined, joined.t() @ joined), 0),
    "a call reads it": (lambda joined, first: joined.t() @ joined, 2),
    "a formula and a call": (lambda joined, first: (joined.sin(), joined.t() @ joined), 2),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_a_join_decides(name):
    use, count = READERS[name]
    after = write_where_joined(program_of(joined_and(use), X, V, W))
    assert len(parts(after)) == count


def test_a_large_result():
    inputs = (torch.randn(4096, 4), V, W)
    program = joined_and(lambda joined, first: joined)
    check_joined(lambda x, v, w: program(x, v, w), inputs, 2)
    step = treadle.compile(program, model=nn.Linear(1, 1))
    first = step(*inputs)
    kept = first.clone()
    second = step(inputs[0] * 2, V, W)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert torch.equal(first, kept)  # no later call changes a result
    first.add_(1)  # nor is it a part of anything else


def test_what_a_parameter_becomes_is_not_written_early():
    def program(x, v, w, out):
        return torch.cat([x @ v, x @ w], 1), out.sum()

    inputs = (X, V, W, torch.randn(6, 8))
    before = program_of(program, *inputs, writes={0: 3})
    after = write_where_joined(before)
    assert not any(call.into.buffer == "out" for call in parts(after))
    check_equal(before, after, inputs)


def test_a_join_for_another_phase_is_stored():
    def program(x, v, w):
        joined = torch.cat([x @ v, x @ w], 1)
        return joined.sin(), joined.cos()

    before = program_of(program, X, V, W, backward_from="cos")
    after = write_where_joined(before)
    assert len(parts(after)) == 2
    check_equal(before, after, (X, V, W))


def test_the_peak_does_not_grow():
    """The first product is made early: its join would be there while larger values are."""

    def program(x, v, y):
        first = x @ v
        large = (y @ y.t()) @ y
        joined = torch.cat([first, (x + large.sum()) @ v], 1)
        return joined.t() @ joined

    inputs = (torch.randn(64, 8), torch.randn(8, 8), torch.randn(64, 64))
    before = program_of(program, *inputs)
    apart, plan = (schedule(before, workers=each) for each in (APART, THREADS))
    assert len(parts(write_where_joined(before))) == 2
    assert schedule(write_where_joined(before), workers=APART).peak_bytes > apart.peak_bytes
    assert plan.peak_bytes == apart.peak_bytes


def test_other_workers_are_asked():
    join, count = JOINS["columns"]
    before = program_of(stored(join), *OPERANDS)
    for workers, found in ((THREADS, count), (APART, 0), (WORKERS["programs"], 0)):
        plan = schedule(before, workers=workers)
        assert sum(isinstance(e, Call) and e.into is not None for e in plan.steps) == found
    assert not any(isinstance(e, Call) and e.into for e in schedule(before, fuse=False).steps)


# --- steps of ordinary models ---------------------------------------------------------------


class Projections(nn.Module):
    """Three Linears, joined."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, size) for size in (24, 8, 16)])
        self.last = nn.Linear(48, 16)

    def forward(self, x):
        return self.last(torch.cat([each(x) for each in self.parts], -1))


class Experts(nn.Module):
    """Each half of a value has a Linear of its own: their gradients are joined."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.parts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x):
        halves = self.first(x).chunk(2, -1)
        return sum(each(half) for each, half in zip(self.parts, halves, strict=True))


def training_step(kind, *, seed: int = 0):
    torch.manual_seed(seed)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, train


@pytest.mark.parametrize(("kind", "count"), [(Projections, 3), (Experts, 2)])
def test_training(kind, count, monkeypatch, tmp_path):
    batches = [(torch.randn(4, 32, 16), torch.randn(4, 32, 16)) for _ in range(3)]

    def trained(where):
        model, optimizer, train = training_step(kind)
        options = treadle.Options(cache_dir=tmp_path / where)
        step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
        losses = [step(*batch) for batch in batches]
        return step.compiled.artifact, [*losses, *model.parameters()]

    joined, values = trained("joined")
    model, _, train = training_step(kind)
    eager = [*(train(*batch) for batch in batches), *model.parameters()]
    without_joins(monkeypatch)
    apart, others = trained("apart")
    calls = [e for e in joined.steps if isinstance(e, CallStep) and e.into is not None]
    assert len(calls) == count
    (buffer,) = {call.into.buffer for call in calls}
    launches = [e for e in joined.steps if not isinstance(e, CallStep)]
    assert not any(buffer in names[-1:] for e in launches for names in e.buffers)  # none writes it
    assert joined.kernel_count <= apart.kernel_count
    moved = [
        sum(e.bytes_moved for e in each.steps if not isinstance(e, CallStep))
        for each in (joined, apart)
    ]
    assert moved[0] < moved[1]
    assert joined.peak_bytes <= apart.peak_bytes
    for new, old, plain in zip(values, others, eager, strict=True):
        torch.testing.assert_close(new, old)  # a library may round by where its result lies
        torch.testing.assert_close(new, plain, rtol=1e-4, atol=1e-5)
    again = artifact_from_bytes(artifact_to_bytes(joined))
    assert again.steps == joined.steps


def test_fewer_bytes_are_moved_and_held():
    join, _ = JOINS["views"]
    wide = (X, torch.randn(4, 64), torch.randn(4, 64), Y, SQUARE, torch.randn(8, 64, 4), MORE)
    before = program_of(stored(join), *wide)
    apart, plan = (schedule(before, workers=each) for each in (APART, THREADS))
    kernels = [
        [bytes_moved(e, each.buffers) for e in each.steps if not isinstance(e, Call)]
        for each in (plan, apart)
    ]
    assert kernels == [[], [2 * 8 * 64 * 128 * 4]]
    assert plan.peak_bytes < apart.peak_bytes


def test_sizes_of_calls():
    model = Projections()
    step = treadle.compile(
        lambda x: model(x), model=model, shapes=treadle.dynamic({"x": ("rows",)}, rows=(1, 17, 64))
    )
    for rows in (3, 17, 1, 64):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(step(x), model(x))
    calls = [e for e in step.compiled.artifact.steps if isinstance(e, CallStep)]
    assert sum(e.into is not None for e in calls) == 3


# --- programs at random ---------------------------------------------------------------------


def random_join(dice: random.Random):
    """A join of products, formulas and inputs of one height or width, and its inputs."""
    inputs: list[torch.Tensor] = []
    dtype = dice.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])

    def given(*shape):
        inputs.append(torch.randn(shape, dtype=dtype))
        return len(inputs) - 1

    dim, shared, inner = dice.randrange(2), dice.randint(1, 5), dice.randint(1, 4)
    shared_batch = dice.choice([(), (dice.randint(1, 3),)])
    kinds = []
    for _ in range(dice.randint(2, 5)):
        size = dice.randint(1, 6)
        rows, cols = (size, shared) if dim == 0 else (shared, size)
        kind = dice.choice(["mm", "mm", "mm", "addmm", "t", "input", "sin", "half"])
        if kind in ("input", "sin"):
            kinds.append((kind, given(*shared_batch, rows, cols)))
        elif kind == "t":
            kinds.append((kind, given(*shared_batch, cols, inner), given(inner, rows)))
        elif kind == "half":
            kinds.append((kind, given(*shared_batch, rows, inner), given(inner, cols + 1)))
        else:
            kinds.append((kind, given(*shared_batch, rows, inner), given(inner, cols), given(cols)))

    def piece(values, kind, first, *rest):
        x = values[first]
        match kind:
            case "input":
                return x
            case "sin":
                return x.sin()
            case "t":
                return (x @ values[rest[0]]).transpose(-1, -2)
            case "half":
                return (x @ values[rest[0]])[..., :-1]
            case "addmm":
                return F.linear(x, values[rest[0]].t(), values[rest[1]])
            case _:
                return x @ values[rest[0]]

    read, twice = dice.randrange(3), dice.random() < 0.2

    def program(values):
        pieces = [piece(values, *each) for each in kinds]
        if twice:
            pieces.append(pieces[0])
        joined = torch.cat(pieces, dim - 2)
        if read == 0:
            return joined
        return joined.sin() if read == 1 else joined.transpose(-1, -2) @ joined

    return program, inputs


@pytest.mark.parametrize("seed", range(60))
def test_programs_at_random(seed):
    dice = random.Random(seed)
    torch.manual_seed(seed)
    found, inputs = random_join(dice)
    names = ", ".join(f"x{at}" for at in range(len(inputs)))
    program = eval(f"lambda {names}: found([{names}])", {"found": found})
    before = program_of(program, *inputs)
    after = write_where_joined(before)
    check_equal(before, after, inputs) if after is not before else verify_program(after)
    if seed < 12:
        step = treadle.compile(program, model=nn.Linear(1, 1))
        torch.testing.assert_close(step(*inputs), program(*inputs), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("columns", "dtype", "count"), [
    ((4, 8), torch.float32, 2),  # rows of 48 bytes, parts from 0 and 16 on
    ((8, 16), torch.bfloat16, 2),
    ((4, 8), torch.bfloat16, 0),  # rows of 24 bytes
    ((5, 3), torch.float32, 1),  # rows of 32 bytes: the part from 20 on is copied
    ((2, 5), torch.float32, 0),
])  # fmt: skip
def test_rows_that_begin_where_the_target_is_fast(columns, dtype, count):
    v, w = (torch.randn(4, n, dtype=dtype) for n in columns)
    x = X.to(dtype)
    before = program_of(lambda x, v, w: aten.mm.default(torch.cat([x @ v, x @ w], 1).T, x), x, v, w)
    after = write_where_joined(before, 16)
    assert len(parts(after)) == count
    assert len(parts(write_where_joined(before))) == 2
    for call in parts(after):
        ref = call.into
        assert ref.offset * dtype.itemsize % 16 == 0
        assert max(ref.strides) * dtype.itemsize % 16 == 0


def test_who_joins():
    assert (WORKERS["threads"].joins, WORKERS["programs"].joins) == (1, 16)
