"""The functions of ``torch.while_loop`` are programs of their own: generated kernels and library
calls, whose bytes are in the promised peak, in what is saved, and in what is told of a step."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn, while_loop

import treadle
from treadle.graph.text.parsing import parse
from treadle.loop.program import Call
from treadle.lower import lower, registry
from treadle.options import Options
from treadle.runtime.store.artifact import CallStep
from treadle.runtime.store.cache import content_key
from treadle.runtime.store.serialize import artifact_from_bytes, artifact_to_bytes
from treadle.session.breaks import breaks_of
from treadle.util.reasons import ReasonCode

aten = torch.ops.aten
FORWARD, BACKWARD = "treadle.while_loop.default", "treadle.while_loop_backward.default"


def plain_while(condition, body, carried):
    while bool(condition(*carried)):
        carried = body(*carried)
    return carried


def count():
    return torch.zeros((), dtype=torch.int64)


class Cell(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, h):
        y = self.down(torch.nn.functional.gelu(self.up(h)))
        return (h + y * self.scale) / (1 + y.square().mean(-1, keepdim=True)).sqrt()


def settle(model, x, rounds, loop):
    """Products, reductions along rows, pointwise chains; several carried tensors, two of them whole
    numbers; ``x`` and ``rounds`` from outside."""

    def body(i, odd, h, mean):
        return i + 1, odd ^ True, torch.tanh(model(h)) + 0.1 * x, 0.9 * mean + h.mean(0)

    start = count(), torch.tensor(False), x * model.scale, torch.zeros(x.shape[-1])
    _, odd, h, mean = loop(lambda i, odd, h, mean: i < rounds, body, start)
    return h.square().mean() + (mean * 0.01).sum() + odd


def train_with(model, loop, tmp_path, loss=settle, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(x, rounds):
        value = loss(model, x, rounds, loop)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if loop is plain_while:
        return train
    options = Options(cache_dir=tmp_path, **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=options)


def loops_of(artifact):
    return [step for step in artifact.steps if isinstance(step, CallStep) and step.bodies]


@pytest.mark.parametrize("numerics", ["default", "eager"])
@pytest.mark.parametrize("memory", [None, 0.0])
def test_rounds_run_generated_kernels(memory, numerics, tmp_path):
    """None, one, and many; what Python's ``while`` gives, in double precision."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = Cell(8)
        twin = copy.deepcopy(model)
        options = {"memory": memory, "numerics": numerics, "strict": True}
        step = train_with(model, while_loop, tmp_path, **options)
        eager = train_with(twin, plain_while, tmp_path)
        for rounds in (2, 0, 1, 50, 7):
            given = torch.randn(5, 8), torch.tensor(rounds)
            torch.testing.assert_close(step(*given), eager(*given), rtol=1e-8, atol=1e-11)
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)
    finally:
        torch.set_default_dtype(torch.float32)
    artifact = step.compiled.artifact
    forward, backward = loops_of(artifact)
    assert (forward.op, backward.op) == (FORWARD, BACKWARD)
    assert forward.bodies == backward.bodies[:2]  # the condition and the body: the same programs
    for name in backward.bodies:
        body = artifact.bodies[name]
        assert body.kernel_count > 0
        assert body.sources
        assert not body.fallbacks
    _, body, gradients = (artifact.bodies[name] for name in backward.bodies)
    assert {each.out for each in body.steps if isinstance(each, CallStep)} == {"aten.addmm.out"}
    calls = [each.op for each in gradients.steps if isinstance(each, CallStep)]
    assert all(op in ("aten.mm.default", "aten.addmm.default") for op in calls)
    assert artifact.kernel_count > sum(each.kernel_count for each in artifact.bodies.values())


def test_forward_is_eager_s_to_the_bit_where_that_is_asked_for(tmp_path):
    """Pointwise work and products in their own rounding, over many rounds."""
    model = nn.Linear(16, 16)

    def run(x, rounds, loop=while_loop):
        body = lambda i, h: (i + 1, (model(h).relu() * 0.9 + x * h) / 2)  # noqa: E731
        return loop(lambda i, h: i < rounds, body, (count(), x))[1]

    step = treadle.compile(run, model=model, options=Options(cache_dir=tmp_path, numerics="eager"))
    for rounds in (0, 1, 13):
        given = torch.randn(3, 16), torch.tensor(rounds)
        with torch.no_grad():
            assert torch.equal(step(*given), run(*given, loop=plain_while))


@pytest.mark.parametrize("width", [16, 200])
@pytest.mark.parametrize("numerics", ["default", "eager"])
def test_the_peak_is_promised_for_one_round_and_grows_by_what_rounds_begin_with(
    width, numerics, tmp_path
):
    model = Cell(width)
    step = train_with(model, while_loop, tmp_path, numerics=numerics)
    x = torch.randn(9, width)
    carried = x.nbytes + 4 * width + 8 + 1
    step(x, torch.tensor(2))
    for rounds in (0, 1, 2, 9):
        peak = step.measure(x, torch.tensor(rounds)).peak_bytes
        promised = step.compiled.artifact.peak_bytes + max(rounds - 1, 0) * carried
        assert peak <= promised
    assert peak > 0.8 * promised - 1024


def test_the_peak_without_gradients_holds_for_any_number_of_rounds(tmp_path):
    model = Cell(64)

    def body(i, h):
        return i + 1, torch.tanh(model(h))

    def evaluate(x, rounds):
        with torch.no_grad():
            return while_loop(lambda i, h: i < rounds, body, (count(), x))[1]

    step = treadle.compile(evaluate, model=model, options=Options(cache_dir=tmp_path))
    for rounds in (0, 1, 2, 30):
        given = torch.randn(40, 64), torch.tensor(rounds)
        step(*given)
        promised = step.compiled.artifact.peak_bytes
        assert step.measure(*given).peak_bytes <= promised
        if rounds > 1:
            assert step.measure(*given).peak_bytes > 0.9 * promised
        held = sum(each.nbytes for each in step.compiled.executable.held())
        assert held == step.compiled.artifact.arena_bytes  # those of rounds are gone
    assert step.recompiles == []


def test_the_peak_counts_what_a_condition_holds_and_copies_of_what_is_laid_out_otherwise(tmp_path):
    """A condition with a large product, and a transposed matrix from outside, which is copied for
    the rounds."""
    model = nn.Linear(160, 160)

    def loss(model, x, rounds, loop):
        across = model.weight.detach().t()
        go_on = lambda i, h: (i < rounds) & ((h.t() @ h).max() < 1e9)  # noqa: E731
        body = lambda i, h: (i + 1, torch.tanh(h * model.bias) + 1e-3 * across[0])  # noqa: E731
        return loop(go_on, body, (count(), x * model.bias))[1].square().mean()

    step = train_with(model, while_loop, tmp_path, loss=loss)
    x = torch.randn(8, 160)
    step(x, torch.tensor(2))
    for rounds in (0, 1, 4):
        promised = step.compiled.artifact.peak_bytes + max(rounds - 1, 0) * (x.nbytes + 8)
        peak = step.measure(x, torch.tensor(rounds)).peak_bytes
        assert peak <= promised
        assert rounds == 0 or peak > 0.97 * promised - 6000  # what libraries hold


def nested(model, x, rounds, loop):
    def body(i, h):
        inner = lambda j, g: (j + 1, torch.tanh(model(g) + h))  # noqa: E731
        return i + 1, loop(lambda j, g: j < i, inner, (count(), h * 0.5))[1]

    return loop(lambda i, h: i < rounds, body, (count(), x * model.bias))[1].square().mean()


def test_a_loop_in_a_loop_is_a_program_in_a_program(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    step = train_with(model, while_loop, tmp_path, loss=nested, strict=True)
    eager = train_with(twin, plain_while, tmp_path, loss=nested)
    for rounds in (3, 0, 4):
        given = torch.randn(5, 8), torch.tensor(rounds)
        torch.testing.assert_close(step(*given), eager(*given), rtol=1e-4, atol=1e-6)
    artifact = step.compiled.artifact
    _, backward = loops_of(artifact)
    _, body, gradients = (artifact.bodies[name] for name in backward.bodies)
    assert [each.op for each in loops_of(body)] == [FORWARD]
    assert [each.op for each in loops_of(gradients)] == [BACKWARD]  # nobody asks for the values
    assert len({each.inside for each in step.regions() if each.inside}) == 4  # two in each
    x = torch.randn(5, 8)
    assert step.measure(x, torch.tensor(1)).peak_bytes <= artifact.peak_bytes


def with_bessel(model, x, rounds, loop):
    body = lambda i, h: (i + 1, model(h).sin() + torch.special.bessel_j0(x))  # noqa: E731
    return loop(lambda i, h: i < rounds, body, (count(), x))[1].mean()


def test_what_has_no_lowering_in_a_body_is_counted_with_its_reason(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    step = train_with(model, while_loop, tmp_path, loss=with_bessel)
    eager = train_with(twin, plain_while, tmp_path, loss=with_bessel)
    given = torch.randn(5, 8), torch.tensor(3)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.testing.assert_close(step(*given), eager(*given), rtol=1e-4, atol=1e-6)
    # in the body, which both loops run
    assert "aten.special_bessel_j0.default x2: TR-312" in str(heard[-1].message)
    assert "test_loop_programs.py" in str(heard[-1].message)
    (found,) = breaks_of(step.compiled.artifact)
    assert found.code is ReasonCode.NO_RULE
    assert step.summary().fallbacks == 2
    assert "aten.special_bessel_j0.default (each round) x1: TR-312" in step.explain()
    (eager_region,) = [each for each in step.regions() if each.compiler == "eager"]
    assert eager_region.inside == "while_loop_default"
    with pytest.raises(treadle.LoweringError, match=r"TR-302(.|\n)*special_bessel_j0"):
        train_with(nn.Linear(8, 8), while_loop, tmp_path, loss=with_bessel, strict=True)(*given)


def picked(model, x, rounds, loop):
    body = lambda i, h: (i + 1, model(h) + x[i % 5])  # noqa: E731
    return loop(lambda i, h: i < rounds, body, (count(), x))[1].mean()


def beyond(model, x, rounds, loop):
    body = lambda i, h: (i + 1, model(h) + x[i])  # noqa: E731
    return loop(lambda i, h: i < rounds, body, (count(), x))[1].mean()


def test_indices_of_a_round_are_looked_at(tmp_path):
    """By PyTorch's kernel: the step's own check of indices comes before all rounds."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    step = train_with(model, while_loop, tmp_path, loss=picked)
    eager = train_with(twin, plain_while, tmp_path, loss=picked)
    given = torch.randn(5, 8), torch.tensor(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.testing.assert_close(step(*given), eager(*given), rtol=1e-4, atol=1e-6)
        step = train_with(model, while_loop, tmp_path, loss=beyond)
        step(torch.randn(5, 8), torch.tensor(5))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(treadle.TreadleError, match=r"while_loop(.|\n)*out of bounds") as error:
        step(torch.randn(5, 8), torch.tensor(6))
    assert "test_loop_programs.py" in str(error.value)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert {each.code for each in breaks_of(step.compiled.artifact)} == {ReasonCode.REFUSED}
    assert step(torch.randn(5, 8), torch.tensor(4)).isfinite()  # nothing is left of it


def with_tanh(model, x, rounds, loop):
    body = lambda i, h: (i + 1, torch.tanh(model(h)))  # noqa: E731
    return loop(lambda i, h: i < rounds, body, (count(), x * model.bias))[1].square().mean()


def test_verify_names_a_loop_whose_body_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._RULES, aten.tanh.default, registry._RULES[aten.sin.default])
    step = train_with(nn.Linear(8, 8), while_loop, tmp_path, loss=with_tanh)
    found = step.verify([(torch.randn(5, 8), torch.tensor(3))])
    assert found is not None
    assert "loop(lambda i, h: i < rounds, body, (count(), x * model.bias))" in found.where
    names = {node.name: each.number for each in step.regions() for node in each.nodes}
    assert found.region == names[found.node] == 0


@functools.cache  # two tests look at it
def settling(folder):
    """A step that was compiled and called here, with its cache in ``folder``, and its loss."""
    torch.manual_seed(0)
    step = train_with(Cell(8), while_loop, folder)
    return step, step(torch.ones(5, 8), torch.tensor(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("settling")


def test_artifacts_of_bodies_are_data_under_their_digests(folder):
    artifact = settling(folder)[0].compiled.artifact
    assert all(
        name == content_key(artifact_to_bytes(body)) for name, body in artifact.bodies.items()
    )
    again = artifact_from_bytes(artifact_to_bytes(artifact))
    assert again == artifact
    assert artifact_to_bytes(again) == artifact_to_bytes(artifact)
    assert len(artifact.all_sources) > len(artifact.sources)


def test_a_saved_step_has_the_libraries_of_its_loops(tmp_path):
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.load_state_dict(first.state_dict())
    step = train_with(first, while_loop, tmp_path / "first", loss=nested)
    given = torch.randn(5, 8), torch.tensor(3)
    loss = step(*given)
    step.save(tmp_path / "step")
    optimizer = torch.optim.SGD(second.parameters(), lr=0.05)

    def train(x, rounds):
        value = nested(second, x, rounds, while_loop)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    options = Options(cache_dir=tmp_path / "second")
    loaded = treadle.load(
        tmp_path / "step", train, model=second, optimizer=optimizer, options=options
    )
    assert torch.equal(loaded(*given), loss)
    assert loaded.compiled.from_cache
    assert loaded.compiled.artifact.bodies == step.compiled.artifact.bodies
    libraries = {path.name for path in (tmp_path / "first").rglob("*.so")}
    assert {path.name for path in (tmp_path / "second").rglob("*.so")} == libraries
    assert "(each round)" in loaded.explain()


PROGRAM = """
import sys
from pathlib import Path
from contract.test_loop_programs import settling
step, loss = settling(Path(sys.argv[1]))
print(step.compiled.from_cache, len(step.compiled.artifact.bodies), loss.item().hex())
"""


def test_another_process_finds_it_in_the_cache(folder, forks):
    step, loss = settling(folder)
    assert not step.compiled.from_cache
    done = forks.run(PROGRAM, str(folder), quick=True)
    assert done.stdout.split() == ["True", "3", loss.item().hex()], done.stderr


def test_two_loops_share_a_body(tmp_path):
    def loss(model, x, rounds, loop):
        body = lambda i, h: (i + 1, model(h).sin())  # noqa: E731
        _, h = loop(lambda i, h: i < rounds, body, (count(), x))
        _, h = loop(lambda i, h: i < rounds, body, (count(), h))
        return h.mean()

    step = train_with(nn.Linear(8, 8), while_loop, tmp_path, loss=loss)
    step(torch.randn(5, 8), torch.tensor(2))
    artifact = step.compiled.artifact
    assert len(loops_of(artifact)) == 4
    assert len(artifact.bodies) <= 4  # a gradient of the batch is asked for in the second alone


def test_other_sizes_of_a_step_share_the_programs_of_its_loops(tmp_path):
    """What the loop carries is of one size, and the batch is not."""
    model = Cell(8)

    def run(x, rounds, loop=while_loop):
        body = lambda i, h: (i + 1, torch.tanh(model(h)))  # noqa: E731
        return x @ loop(lambda i, h: i < rounds, body, (count(), torch.eye(8)))[1]

    step = treadle.compile(
        run,
        model=model,
        shapes=treadle.dynamic({"x": ("rows", None)}, rows=(2, 9)),
        options=Options(cache_dir=tmp_path),
    )
    for rows, rounds in ((4, 3), (2, 0), (9, 5), (4, 1)):
        given = torch.randn(rows, 8), torch.tensor(rounds)
        torch.testing.assert_close(step(*given), run(*given, loop=plain_while))
    assert step.recompiles == ["compiled for rows in 2..9"]
    assert loops_of(step.compiled.artifact)


def test_a_condition_and_a_body_may_be_one_function(tmp_path):
    flip = lambda h: (h.logical_not(),)  # noqa: E731
    step = treadle.compile(
        lambda h: while_loop(lambda h: h.logical_not(), flip, (h,))[0],
        model=nn.Module(),
        options=Options(cache_dir=tmp_path),
    )
    assert step(torch.tensor(False)).item() is True
    assert step(torch.tensor(True)).item() is True
    (loop,) = loops_of(step.compiled.artifact)
    assert loop.bodies[0] == loop.bodies[1]


def test_kernels_of_a_gpu_are_planned_for_loops():
    model = Cell(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(x, rounds):
        value = settle(model, x, rounds, while_loop)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    given = torch.randn(16, 64), torch.tensor(3)
    plan = treadle.plan(train, *given, model=model, optimizer=optimizer, device="h200")
    assert plan.peak_bytes > 16 * 64 * 4


CONDITION = """
carried_0: i64[]  # batch
carried_1: f32[3] on cuda:0  # batch
lt: b1[] = lt.Scalar(carried_0, 3)  # forward
return [lt]  # ['result 0']
"""
BODY = """
carried_0: i64[]  # batch
carried_1: f32[3] on cuda:0  # batch
add: i64[] = add.Tensor(carried_0, 1)  # forward
sin: f32[3] on cuda:0 = sin(carried_1)  # forward
return [add, sin]  # ['result 0', 'result 1']
"""
ARGUMENTS = f"[carried, x], [], [False, False], {CONDITION!r}, {BODY!r}, ''"
MIXED = f"""
carried: i64[]  # batch
x: f32[3] on cuda:0  # batch
loop: (i64[], f32[3] on cuda:0) = treadle.while_loop({ARGUMENTS})  # forward
item: f32[3] on cuda:0 = loop[1]  # forward
return [item]  # ['result 0']
"""


def test_a_loop_on_two_devices_is_pytorch_s():
    program = lower(parse(MIXED), device="cuda")
    (call,) = [each for each in program.steps if isinstance(each, Call) and each.op == FORWARD]
    assert call.reason == "TR-314: a loop with tensors on the host and on the device"
