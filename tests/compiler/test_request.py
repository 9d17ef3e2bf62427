"""The key of a compile: what differs in the artifact differs in the key, and lines do neither."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import treadle
from testing import trace
from treadle.algebra.extents import Size, formula_of
from treadle.algebra.guards import Guard
from treadle.compiler.pipeline import _through_stages
from treadle.compiler.request import CompileRequest, request_of
from treadle.compiler.saved_log import saved_bytes
from treadle.compiler.target import key_of
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Role
from treadle.graph.text.canonical import canonical, text_of_value
from treadle.options import Options
from treadle.report.stages import Clock
from treadle.runtime.kernels.build import build
from treadle.runtime.store.cache import Cache
from treadle.util.errors import TreadleError, VerifyError

LAYOUTS = ("contiguous", "transposed", "expanded", "strided", "padded")
OPERATIONS = ("mul", "add", "matmul", "where")


@dataclass(frozen=True)
class Ingredients:
    """One small step, and everything around it that a compile may look at."""

    shape: tuple[int, int] = (6, 6)
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    constant: tuple[float, ...] = (2.0,)
    constant_dtype: torch.dtype = torch.float32
    number: float | int | bool = 2.0
    operation: str = "mul"
    aliased: bool = False
    writes: bool = False
    role: Role = Role.BATCH
    region: int | None = None
    asked: str = ""
    backward: bool = False
    memory: float | str | None = None
    numerics: str = "default"
    rng: str = "eager"
    fuse: bool = True
    codegen: bool = True
    threads: int = 1
    guard: bool | None = None

    def tensor(self) -> torch.Tensor:
        rows, cols = self.shape
        match self.layout:
            case "transposed":
                return torch.ones(cols, rows, dtype=self.dtype).t()
            case "expanded":
                return torch.ones(1, cols, dtype=self.dtype).expand(rows, cols)
            case "strided":
                return torch.ones(rows, 2 * cols, dtype=self.dtype)[:, ::2]
            case "padded":
                return torch.ones(rows, cols + 3, dtype=self.dtype)[:, :cols]
            case _:
                return torch.ones(rows, cols, dtype=self.dtype)

    def step(self):
        number, operation = self.number, self.operation

        def program(x, y):
            z = x + torch.tensor(self.constant, dtype=self.constant_dtype).sum().to(x.dtype)
            match operation:
                case "mul":
                    z = z * number
                case "add":
                    z = torch.add(z, y, alpha=1) + number
                case "matmul":
                    z = z @ y.t() * number
                case _:
                    z = torch.where(z > number, z, y)
            w = z.exp()
            return (w.to(x.dtype) + y if w.shape == y.shape else w, y.sum())

        x = self.tensor()
        y = x if self.aliased else self.tensor()
        writes = {0: 0} if self.writes and operation != "matmul" else {}
        step = trace(program, x, y, writes=writes, roles={"x": self.role})
        calls = step.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
        for node in calls:
            if self.region is not None:
                with_info(node, region=self.region)
            if self.asked:
                with_info(node, asked=self.asked)
            if self.backward:
                for each in list(node.users):
                    with_info(each, phase="backward")
        return step

    def request(self, cache: Cache) -> CompileRequest:
        chosen = Options(
            memory=self.memory,
            numerics=self.numerics,
            rng=self.rng,
            fuse=self.fuse,
            codegen=self.codegen,
        )
        here = build(cache, device="cpu")
        dim = Size.dim("n", 2, 9, 5)
        guard = Guard(formula_of(dim - 4), "<", bool(self.guard))
        guards = () if self.guard is None else (guard,)
        found = replace(request_of(self.step(), "cpu", chosen, here, cache=cache), guards=guards)
        library = not (here.generates and self.codegen)
        target = replace(found.target, library=library, workspaces=None)
        return replace(found, target=target, machine=replace(found.machine, threads=self.threads))


CHANGES = {
    "shape": st.sampled_from([(6, 6), (1, 1), (0, 6), (7, 7), (6, 7), (1, 6)]),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    "layout": st.sampled_from(LAYOUTS),
    "constant": st.lists(
        st.sampled_from([0.0, -0.0, 2.0, 5.0, 2.0000001]), min_size=1, max_size=3
    ).map(tuple),
    "constant_dtype": st.sampled_from([torch.float32, torch.float64, torch.int64]),
    "number": st.sampled_from([2.0, 2, 0.5, -0.0, 0.0, 1e-30, float("inf"), True]),
    "operation": st.sampled_from(OPERATIONS),
    "aliased": st.booleans(),
    "writes": st.booleans(),
    "role": st.sampled_from(list(Role)),
    "region": st.sampled_from([None, 0, 1]),
    "asked": st.sampled_from(["", "must_save", "prefer_recompute", "must_recompute"]),
    "backward": st.booleans(),
    "memory": st.sampled_from([None, 0.0, 1.0, "1MiB", "2MiB"]),
    "numerics": st.sampled_from(["default", "eager"]),
    "rng": st.sampled_from(["eager", "counter"]),
    "fuse": st.booleans(),
    "codegen": st.booleans(),
    "threads": st.sampled_from([1, 2]),
    "guard": st.sampled_from([None, False, True]),
}


def made(request: CompileRequest) -> bytes:
    """The artifact, or in which words it is refused."""
    try:
        artifact, log, _ = _through_stages(request, Clock())
    except TreadleError as error:
        return str(error).encode()
    return saved_bytes(replace(artifact, guards=request.guards), log)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cache"))


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_artifacts_that_differ_have_keys_that_differ(cache, data):
    """One ingredient of a random step changes; equal keys must mean equal bytes."""
    some = data.draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3, unique=True))
    base = replace(Ingredients(), **{name: data.draw(CHANGES[name]) for name in some})
    name = data.draw(st.sampled_from(sorted(CHANGES)))
    other = replace(base, **{name: data.draw(CHANGES[name])})
    try:
        first, second = base.request(cache), other.request(cache)
    except (RuntimeError, ValueError):
        assume(False)  # PyTorch refuses the program
        return
    if key_of(first.facts) == key_of(second.facts):
        assert made(first) == made(second), name


def test_the_generator_reaches_every_ingredient(cache):
    """Each changes the key by itself, so that the property above is not empty."""
    plain = key_of(Ingredients().request(cache).facts)
    others = {
        "shape": (7, 7), "dtype": torch.float64, "layout": "transposed", "constant": (5.0,),
        "constant_dtype": torch.float64, "number": 2, "operation": "add", "aliased": True,
        "writes": True, "role": Role.PARAMETER, "region": 0, "asked": "must_save",
        "backward": True, "memory": 0.0, "numerics": "eager", "rng": "counter", "fuse": False,
        "codegen": False, "threads": 2, "guard": True,
    }  # fmt: skip
    assert others.keys() == CHANGES.keys()
    for name, value in others.items():
        assert key_of(replace(Ingredients(), **{name: value}).request(cache).facts) != plain, name
    assert key_of(Ingredients().request(cache).facts) == plain


@contextmanager
def set_to(value, get, put):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@pytest.mark.parametrize(
    "switched",
    [
        partial(set_to, torch.float64, torch.get_default_dtype, torch.set_default_dtype),
        partial(
            set_to,
            True,
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        partial(
            set_to,
            "medium",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        partial(torch.backends.cudnn.flags, allow_tf32=False),
        partial(torch.backends.mkldnn.flags, enabled=False),
    ],
    ids=["default dtype", "deterministic", "matmul precision", "tf32", "mkldnn"],
)
def test_switches_of_pytorch_are_in_the_key(cache, switched):
    step = Ingredients().step()

    def key():
        options, here = Options(), build(cache, device="cpu")
        return key_of(request_of(step, "cpu", options, here, cache=cache).facts)

    with torch.backends.cudnn.flags(allow_tf32=True):
        before = key()
        with switched():
            assert key() != before
        assert key() == before


def test_what_decides_nothing_is_not_in_the_key(cache, tmp_path):
    step, here = Ingredients().step(), build(cache, device="cpu")
    other = Options(strict=True, cache_dir=tmp_path, max_cached=2, debug=1, progress=False)
    keys = {
        key_of(request_of(step, "cpu", each, here, cache=cache).facts)
        for each in (Options(), other)
    }
    assert len(keys) == 1


def test_notes_without_a_text_do_not_reach_the_compiler():
    step = Ingredients().step()
    for node in step.graph.nodes:
        node.meta |= {"object": object(), "number": 3}
    found = canonical(step)
    notes = [node.meta for node in found.step.graph.nodes if node.op == "call_function"]
    assert all("object" not in each and each["number"] == 3 for each in notes)
    assert found.digest != canonical(Ingredients().step()).digest


def test_lines_are_numbers_for_the_compiler():
    def lined(*lines):
        step = Ingredients(operation="add").step()
        calls = [node for node in step.graph.nodes if node.op == "call_function"]
        for at, node in enumerate(calls):
            with_info(node, where=lines[at % len(lines)])
        return canonical(step)

    here, there = lined("a.py:1: x", "a.py:2: y"), lined("b.py:7: p", "b.py:9: q")
    assert here.digest == there.digest
    assert there.lines.fill("at ⟦1⟧, ⟦0⟧") == "at b.py:9: q, b.py:7: p"
    assert lined("a.py:1: x").digest != here.digest  # which operations share one is a fact


def test_values_that_differ_have_texts_that_differ():
    values = [
        1, 1.0, "1", True, None, "None", (1,), [1], -0.0, 0.0, float("nan"), 1j, b"1",
        torch.float32, "torch.float32", torch.strided, torch.preserve_format,
        torch.device("cpu"), Role.BATCH,
        slice(1), {"a": 1}, {"a": 1.0}, frozenset((1,)), (), [], Size.dim("n", 2, 9, 5),
        Size.dim("n", 2, 9, 6), Size.dim("m", 2, 9, 5),
    ]  # fmt: skip
    assert len({text_of_value(each) for each in values}) == len(values)
    with pytest.raises(VerifyError, match="no canonical text"):
        text_of_value(object())


def train_step(cache_dir, path, before="", memory=None):
    """The same step from a file of its own, at other lines."""
    text = before + (
        "def train(x):\n"
        "    loss = model(x).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    return loss.detach()\n"
    )
    path.write_text(text)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = {"model": model, "optimizer": optimizer}
    exec(compile(text, str(path), "exec"), scope)
    chosen = Options(cache_dir=cache_dir, memory=memory)
    return scope["train"], model, optimizer, chosen


def told(step, path):
    """Everything that names a line."""
    report = step.report(path).read_text()
    stages = ("captured", "planned", "decisions", "loops", "kernels")
    return step.explain() + report + "".join(step.graph(each) for each in stages)


def test_lines_that_are_shown_are_those_of_this_run(tmp_path):
    """Another file and other lines: the artifact of the first, the lines of the second."""
    texts = []
    x = torch.randn(4, 4)
    for name, before in (("first.py", ""), ("second.py", "\n" * 40)):
        train, model, optimizer, options = train_step(tmp_path / "cache", tmp_path / name, before)
        step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
        step(x)
        texts.append(told(step, tmp_path / "report.html"))
    assert step.compiled.from_cache
    assert "first.py:2" in texts[0]
    assert "first.py" not in texts[1]
    assert "second.py:42" in texts[1]
    assert "⟦" not in texts[0] + texts[1]


def test_a_loaded_step_shows_the_lines_of_this_run(tmp_path):
    train, model, optimizer, options = train_step(tmp_path / "a", tmp_path / "first.py")
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    step(torch.ones(4, 4))
    step.save(tmp_path / "saved")
    assert b"first.py" not in (tmp_path / "saved").read_bytes()
    train, model, optimizer, options = train_step(tmp_path / "b", tmp_path / "second.py", "#\n")
    step = treadle.load(
        tmp_path / "saved", train, model=model, optimizer=optimizer, options=options
    )
    step(torch.ones(4, 4))
    text = told(step, tmp_path / "report.html")
    assert step.compiled.from_cache
    assert "first.py" not in text
    assert "second.py:3" in text


@pytest.mark.parametrize("memory", [None, 0.0])
def test_a_batch_of_another_layout_is_another_artifact(tmp_path, memory):
    """The second process finds the artifact of the first on disk; its batch is transposed."""
    x = torch.randn(4, 4)
    for given_ in (x, x.t(), x.as_strided((4, 4), (1, 1))[:, :], x[:1].expand(4, 4)):
        train, model, optimizer, options = train_step(
            tmp_path / "cache", tmp_path / "step.py", memory=memory
        )
        step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
        loss = step(given_)
        other = train_step(tmp_path / "cache", tmp_path / "step.py")[0]
        torch.testing.assert_close(loss, other(given_))


def test_constants_of_backend_graphs_are_in_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    for value in (2.0, 5.0, [2.0, 3.0], [3.0, 2.0]):
        torch.compiler.reset()
        compiled = torch.compile(lambda x, value=value: x * torch.tensor(value), backend="treadle")
        x = torch.randn(3, 2)
        torch.testing.assert_close(compiled(x), x * torch.tensor(value))
