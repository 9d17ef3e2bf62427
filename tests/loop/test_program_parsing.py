"""Programs and kernels come back from their exact texts."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treadle
from loop.exact_text import exact_kernel, exact_program
from loop.formula_parsing import same_array
from loop.program_parsing import parse_kernel, parse_program
from treadle.algebra.extents import Size
from treadle.algebra.index import Axis, Index
from treadle.compat.operators.operator_facts import Effect
from treadle.compiler.memory import lowered, planned
from treadle.compiler.request import Target
from treadle.graph.text.parsing import parse
from treadle.loop.expr import Array, Const, Load, Local, Reduce, ReduceKind
from treadle.loop.interpret import interpret_program
from treadle.loop.kernel import Definition, Kernel, KernelKind, KernelSchedule, LoopForm, Store
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Origin, Program, TensorRef
from treadle.loop.verify import verify_program
from treadle.options import Options
from treadle.report.made_up import made_up_inputs
from treadle.schedule.equality import kernel_key
from treadle.util.errors import ParseError

F32 = torch.float32
HERE = Origin(("n",), where="train.py:7: loss = 'f(x)'", phase="forward")


def check(program):
    text = exact_program(program)
    found = parse_program(text)
    assert exact_program(found) == text
    assert list(found.buffers.values()) == list(program.buffers.values())
    assert (found.inputs, found.results) == (program.inputs, program.results)
    assert found.device == program.device
    assert found.constants.keys() == program.constants.keys()
    assert all(torch.equal(found.constants[n], each) for n, each in program.constants.items())
    for new, old in zip(found.steps, program.steps, strict=True):
        if isinstance(old, Call):
            assert new == old
        else:
            assert (new.output, new.origin) == (old.output, old.origin)
            assert same_array(new.array, old.array)
    return found


def check_kernel(kernel, buffers):
    text = exact_kernel(kernel)
    found = parse_kernel(text)
    assert exact_kernel(found) == text
    assert (found.origins, found.schedule) == (kernel.origins, kernel.schedule)
    assert found.scratch == kernel.scratch
    if kernel.schedule is not None:
        assert kernel_key(found, buffers) == kernel_key(kernel, buffers)


def test_a_program():
    i = Axis(4)
    ref = TensorRef("y", F32, (4,), (1,))
    program = Program(
        buffers={
            "x": Buffer("x", F32, (4, 4), (1, 4), BufferKind.INPUT),
            "c": Buffer("c", F32, (2,), (1,), BufferKind.CONSTANT),
            "y": Buffer("y", F32, (4,), (1,), BufferKind.TEMPORARY, "cuda:0"),
            "z 1": Buffer("z 1", F32, (2, 2), (2, 1), BufferKind.TEMPORARY, unsized=True),
        },
        steps=(
            Compute(ref, Array((i,), Load("x", i * 5, F32)), HERE),
            Call(
                "aten.mm.default",
                (TensorRef("y", F32, (2, 2), (1, 2), 1), 2, (F32, None), [1], (-0.0,)),
                {"alpha": 0.5, "how": "mean", "device": torch.device("cpu")},
                ("z 1", None),
                HERE,
                out="aten.mm.out",
                reason="TR-301 no lowering",
                workspace=12,
                effects=Effect.DRAWS | Effect.UNKNOWN,
            ),
            Call("treadle.expect.default", (ref,), {}, (), HERE, effects=Effect.CONDITION),
        ),
        inputs=("x",),
        results=(ref, None),
        constants={"c": torch.tensor([1.0, 2.5])},
        device="cuda:0",
    )
    check(program)
    assert exact_program(program) == textwrap.dedent("""\
        program on cuda:0
        input x: f32[4, 4] strides [1, 4]
        constant c: f32[2] = [1.0, 2.5]
        temporary y: f32[4] on cuda:0
        temporary 'z 1': f32[2, 2] unsized
        inputs x

        compute y: f32[4] from ['n'], where "train.py:7: loss = 'f(x)'", phase 'forward'
          axes i<4
          [i] -> f32
            x[5*i]:f32

        call 'z 1', _ = aten.mm.default(ref y: f32[2, 2] strides [1, 2] at 1, 2, (torch.float32, None), [1], (-0.0,), alpha=0.5, how='mean', device=device('cpu')) from ['n'], where "train.py:7: loss = 'f(x)'", phase 'forward', out 'aten.mm.out', reason 'TR-301 no lowering', workspace 12, effects 'DRAWS|UNKNOWN'

        call treadle.expect.default(ref y: f32[4]) from ['n'], where "train.py:7: loss = 'f(x)'", phase 'forward', effects 'CONDITION'

        return [ref y: f32[4], None]
    """)  # noqa: E501


def test_a_kernel():
    r, c = Axis(4), Axis(8)
    kernel = Kernel(
        "k0",
        KernelKind.ROWS,
        r,
        c,
        (
            Definition("a", Load("x", r * 8 + c, F32), (r, c)),
            Definition("m", Reduce(ReduceKind.MAX, (c,), Local("a", F32)), (r,)),
            Definition("one", Const(1, F32), ()),
            Store("y", Index.of(r), Local("m", F32), (r,)),
        ),
        (HERE, Origin(("a", "b"))),
        scratch=("s0", "s1"),
    )
    check_kernel(kernel, {})
    assert exact_kernel(kernel) == textwrap.dedent("""\
        rows kernel k0
        axes i<4, j<8
        loops i, j
        define a (i, j)
          x[8*i + j]:f32
        define m (i)
          max{j} %a:f32
        define one ()
          1:f32
        store y[i] = %m:f32 (i)
        from ['n'], where "train.py:7: loss = 'f(x)'", phase 'forward'
        from ['a', 'b']
        scratch s0, s1""")


def test_a_kernel_of_both_and_its_schedule():
    r, c = Axis(4), Axis(8)
    body = (
        Definition("a", Load("x", r * 8 + c, F32), (r, c)),
        Definition("m", Reduce(ReduceKind.MAX, (c,), Local("a", F32)), (r,)),
        Definition("s", Reduce(ReduceKind.SUM, (r,), Local("a", F32)), (c,)),
        Store("y", Index.of(c), Local("s", F32), (c,)),
    )
    how = KernelSchedule(LoopForm.SWEPT, 1, 8, parts=2, running=("s",), warps=4)
    kernel = Kernel("k0", KernelKind.BOTH, r, c, body, (HERE,), how, ("s0",))
    sizes = {"x": 32, "y": 8, "s0": 16}
    kinds = BufferKind.TEMPORARY
    check_kernel(kernel, {k: Buffer(k, F32, (n,), (1,), kinds) for k, n in sizes.items()})
    lines = exact_kernel(kernel).splitlines()
    assert lines[0] == "both kernel k0"
    (line,) = (each for each in lines if each.startswith("schedule"))
    assert line.startswith("schedule form 'swept', rows 1, cols 8, parts 2, ")
    assert "running ('s',), " in line


def test_sizes_that_the_call_decides():
    size = Size.dim("n", 2, 9, 5)
    i = Axis(size)
    ref = TensorRef("y", F32, (size, 3), (3, 1), size)
    buffers = {
        "x": Buffer("x", F32, (size * 3,), (1,), BufferKind.INPUT),
        "y": Buffer("y", F32, (size + 1, 3), (3, 1), BufferKind.TEMPORARY),
    }
    j = Axis(3)
    steps = (
        Compute(ref, Array((i, j), Load("x", i * 3 + j, F32)), HERE),
        Call("aten.neg.default", (ref, size), {}, ("y",), HERE),
    )
    check(Program(buffers, steps, ("x",), (ref,)))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "embedding": lambda: nn.Sequential(
        nn.Linear(6, 4), nn.LayerNorm(4), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_whole_steps(name, tmp_path):
    torch.manual_seed(1)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = Options(cache_dir=tmp_path / "cache")
    step = treadle.compile(train_step, model=model, optimizer=optimizer, options=options)
    step.prepare(torch.randn(5, 6), torch.randint(0, 3, (5,)))
    graph = parse(step.graph("planned"))
    target = Target("cpu", Options())
    found = check(lowered(graph, target))
    verify_program(found)
    made = planned(graph, target)
    check(made.program)
    kernels = [each for each in made.plan.steps if isinstance(each, Kernel)]
    assert kernels
    for kernel in kernels:
        check_kernel(kernel, made.plan.buffers)


def test_the_numbers_are_the_same():
    graph = parse("""
        w: f32[5, 7]  # parameter
        x: f32[3, 5]
        mm: f32[3, 7] = mm(x, w)
        s: f32[3, 7] = _softmax(mm, 1, False)
        n: f32[3] = sum.dim_IntList(s, [1])
        mul: f32[5, 7] = mul.Tensor(w, 0.5)
        return [s, n]
        w <- mul
    """)
    program = lowered(graph, Target("cpu", Options()))
    found = check(program)
    results = []
    for each in (program, found):
        inputs = made_up_inputs(graph)
        given = dict(zip(each.inputs, inputs, strict=True))
        results.append([*interpret_program(each, given), *inputs])
    for new, old in zip(*results, strict=True):
        assert new is old or torch.equal(new, old)


PROGRAM = "program\ninput x: f32[2]\ninputs x\n"


@pytest.mark.parametrize(
    ("read", "text", "line", "column", "message"),
    [
        (parse_program, "hello", 1, 1, "'program' is expected here"),
        (parse_program, "program\nboat x: f32[2]", 2, 1, "'boat' is no kind of a buffer"),
        (parse_program, PROGRAM, 3, 9, "a compute, a call or a return is expected here"),
        (parse_program, PROGRAM + "return [x]", 4, 9, "'ref' is expected here"),
        (parse_program, PROGRAM + "return []\nmore", 5, 1, "the text should end here"),
        (parse_program, PROGRAM + "call f() from [], speed 3", 4, 19, "no fact of a step"),
        (parse_program, PROGRAM + "call f() from [], effects 'FRY'", 4, 6, "are no effects"),
        (parse_program, PROGRAM + "call f(<x>) from []", 4, 8, "a value or a literal is expected"),
        (parse_kernel, "round kernel k", 1, 1, "'round' is no kind of kernel"),
        (parse_kernel, "rows kernel k\naxes i<2\nloops i, j", 3, 10, "there is no axis 'j'"),
        (
            parse_kernel,
            "rows kernel k\naxes i<2, j<3\nloops i, j\nschedule form 'fried'",
            4,
            10,
            "this is no schedule of a kernel",
        ),
    ],
)
def test_what_is_neither_is_refused_with_its_place(read, text, line, column, message):
    with pytest.raises(ParseError) as caught:
        read(text)
    assert message in caught.value.message
    assert (caught.value.line, caught.value.column) == (line, column)
