"""Hand-written artifacts, run and compared with the same arithmetic in PyTorch."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from treadle.runtime.execute.arena import Arena
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build, build
from treadle.runtime.kernels.compilers import find_cxx, loaded_openmp
from treadle.runtime.store.artifact import (
    Artifact,
    BufferSpec,
    CallStep,
    Launch,
    Source,
    Storage,
    View,
)
from treadle.runtime.store.cache import Cache
from treadle.runtime.store.serialize import artifact_from_bytes, artifact_to_bytes
from treadle.util.errors import RuntimeFailure

HEAD = "#include <cstdint>\n"
AXPY = """extern "C" void axpy(void* const* p, const int64_t* sizes, int64_t instances) {
  for (int64_t k = 0; k < instances; ++k) {
    const float* x = (const float*)p[3 * k];
    const double* a = (const double*)p[3 * k + 1];
    float* y = (float*)p[3 * k + 2];
    #pragma omp parallel for
    for (int64_t i = 0; i < sizes[k]; ++i) y[i] = (float)(x[i] * a[0] + 1.0);
  }
}
"""
needs_compiler = pytest.mark.skipif(find_cxx() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build(Cache(tmp_path_factory.mktemp("cache")), device="cpu")


def spec(name: str, place: Storage, shape=(4, 6), dtype=torch.float32, offset=0, strides=None):
    strides = strides or torch.empty(shape, device="meta").stride()
    return BufferSpec(name, dtype, tuple(shape), tuple(strides), place, offset)


def whole(s: BufferSpec) -> View:
    return View(s.name, s.dtype, s.shape, s.strides)


def artifact(buffers, steps, inputs, results, *, sources=(), arena=0, constants=None, releases=()):
    return Artifact(
        device="cpu",
        sources=sources,
        buffers={b.name: b for b in buffers},
        steps=tuple(steps),
        releases=releases or ((),) * len(steps),
        inputs=tuple(inputs),
        results=tuple(results),
        arena_bytes=arena,
        peak_bytes=0,
        constants=constants or {},
    )


def axpy_artifact(place: Storage = Storage.ARENA) -> Artifact:
    """y = x * a + 1 for two tensors in one launch; then z = y0 @ y1 by the library."""
    x0, x1 = spec("x0", Storage.INPUT), spec("x1", Storage.INPUT, (6, 3))
    a = spec("a", Storage.INPUT, (), torch.float64)
    y0, y1 = spec("y0", Storage.ARENA), spec("y1", Storage.ARENA, (6, 3), offset=128)
    z = spec("z", place, (4, 3), offset=256)
    launch = Launch("axpy", (("x0", "a", "y0"), ("x1", "a", "y1")), ((24,), (18,)))
    mm = CallStep(
        "aten.mm.default",
        (whole(y0), whole(y1)),
        {},
        ("z",),
        out="aten.mm.out" if place is Storage.ARENA else "",
        origin="model.py:7: y0 @ y1",
    )
    source = Source("cpp", HEAD + AXPY, ("axpy",))
    return artifact(
        (x0, x1, a, y0, y1, z),
        (launch, mm),
        ("x0", "x1", "a"),
        (whole(z), None),
        sources=(source,),
        arena=320,
    )


def axpy_inputs() -> list[Tensor]:
    scale = torch.tensor(1.5, dtype=torch.float64)
    return [torch.randn(4, 6), torch.randn(6, 3), scale]


def axpy_expected(inputs: list[Tensor]) -> Tensor:
    x0, x1, a = inputs
    return (x0 * a + 1).float() @ (x1 * a + 1).float()


@needs_compiler
@pytest.mark.parametrize("place", [Storage.ARENA, Storage.CALL])
@pytest.mark.parametrize("saved", [False, True])
def test_launch_and_library_call(cpu: Build, place: Storage, saved: bool) -> None:
    art = axpy_artifact(place)
    executable = Executable(artifact_from_bytes(artifact_to_bytes(art)) if saved else art, cpu)
    earlier = []
    for _ in range(4):
        inputs = axpy_inputs()
        result, nothing = executable.run(inputs)
        assert nothing is None
        earlier.append((result, axpy_expected(inputs)))
    for result, expected in earlier:  # a later call must not change an earlier result
        torch.testing.assert_close(result, expected)


@needs_compiler
def test_inputs_that_stay_move_and_start_inside_their_storage(cpu: Build) -> None:
    executable = Executable(axpy_artifact(), cpu)
    inputs = axpy_inputs()
    inputs[0] = torch.randn(100)[7:31].view(4, 6)
    for _ in range(3):
        torch.testing.assert_close(executable.run(inputs)[0], axpy_expected(inputs))
    inputs[0].copy_(torch.randn(4, 6))
    torch.testing.assert_close(executable.run(inputs)[0], axpy_expected(inputs))
    inputs[1] = torch.randn(6, 3)
    torch.testing.assert_close(executable.run(inputs)[0], axpy_expected(inputs))


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, torch.randn(4, 5)),
        (0, torch.randn(6, 4).t()),
        (0, torch.randn(4, 6, dtype=torch.float64)),
        (0, torch.randn(4, 6).to_sparse()),
        (2, torch.tensor(1.0)),
    ],
)
@needs_compiler
def test_refuses_other_inputs(cpu: Build, index: int, wrong: Tensor) -> None:
    executable = Executable(axpy_artifact(), cpu)
    inputs = axpy_inputs()
    expected = executable.run(inputs)[0]
    with pytest.raises(RuntimeFailure, match="TR-401") as caught:
        executable.run([wrong if i == index else t for i, t in enumerate(inputs)])
    assert ("x0" if index == 0 else "a") in str(caught.value)
    torch.testing.assert_close(executable.run(inputs)[0], expected)  # still usable


@needs_compiler
def test_refuses_a_wrong_count(cpu: Build) -> None:
    with pytest.raises(RuntimeFailure, match="2 inputs were given, but the step has 3"):
        Executable(axpy_artifact(), cpu).run(axpy_inputs()[:2])


@needs_compiler
def test_many_threads_take_turns(cpu: Build) -> None:
    executable, failures = Executable(axpy_artifact(), cpu), []

    def work() -> None:
        for _ in range(20):
            inputs = axpy_inputs()
            if not torch.allclose(executable.run(inputs)[0], axpy_expected(inputs), atol=1e-5):
                failures.append(inputs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_compiler
def test_one_openmp_runtime(cpu: Build) -> None:
    Executable(axpy_artifact(), cpu).run(axpy_inputs())
    assert len(loaded_openmp()) == 1


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_generated_code_uses_the_threads_of_torch(cpu: Build, threads: int) -> None:
    text = """#include <omp.h>
    extern "C" void team(void* const* p, const int64_t* sizes, int64_t instances) {
      #pragma omp parallel
      #pragma omp single
      *(int64_t*)p[0] = omp_get_num_threads();
    }"""
    n = spec("n", Storage.CALL, (), torch.int64)
    source = Source("cpp", HEAD + text, ("team",))
    art = artifact((n,), (Launch("team", (("n",),), ((),)),), (), (whole(n),), sources=(source,))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert Executable(art, cpu).run([])[0] == threads
    finally:
        torch.set_num_threads(before)


def test_inputs_alone_are_results_and_keep_their_identity() -> None:
    x = spec("x", Storage.INPUT, (3, 4))
    turned = View("x", x.dtype, (2, 4), (4, 1), 4)
    executable = Executable(artifact((x,), (), ("x",), (turned,)), PLAIN)
    value = torch.randn(20)[8:].view(3, 4)
    (got,) = executable.run([value])
    assert got.data_ptr() == value[1:].data_ptr()
    assert torch.equal(got, value[1:])


def test_sources_without_a_compiler() -> None:
    with pytest.raises(RuntimeFailure, match=r"there is no C\+\+ compiler here"):
        Executable(axpy_artifact(), Build.without_compiler())


# Library calls only: no compiler needed.

PLAIN = Build.without_compiler()


def test_views_of_inputs_lists_and_many_results() -> None:
    """top values of cat([x[:, 1:], x.t() viewed]) with lists, offsets and an unused result."""
    x = spec("x", Storage.INPUT, (4, 4))
    c, v = spec("c", Storage.CALL, (4, 7)), spec("v", Storage.CALL, (4, 2))
    right, turned = View("x", x.dtype, (4, 3), (4, 1), 1), View("x", x.dtype, (4, 4), (1, 4))
    cat = CallStep("aten.cat.default", ((right, turned), 1), {}, ("c",))
    top = CallStep("aten.topk.default", (whole(c), 2), {"dim": 1}, ("v", None))
    art = artifact((x, c, v), (cat, top), ("x",), (whole(v),), releases=((), ("c", "v")))
    executable = Executable(artifact_from_bytes(artifact_to_bytes(art)), PLAIN)
    for _ in range(3):
        value = torch.randn(4, 4, requires_grad=True)
        expected = torch.cat([value[:, 1:], value.t()], 1).topk(2, 1).values.detach()
        (got,) = executable.run([value])
        assert torch.equal(got, expected)
        assert not got.requires_grad


def test_a_result_in_other_strides_is_laid_out() -> None:
    x = spec("x", Storage.INPUT, (3, 5))
    y = spec("y", Storage.CALL, (3, 5), strides=(1, 3))
    art = artifact(
        (x, y), (CallStep("aten.relu.default", (whole(x),), {}, ("y",)),), ("x",), (whole(y),)
    )
    value = torch.randn(3, 5)
    (got,) = Executable(art, PLAIN).run([value])
    assert got.stride() == (1, 3)
    assert torch.equal(got, value.relu())


def test_a_call_that_aliases_its_argument_is_copied() -> None:
    """y is x seen as a view; then x is overwritten: y must keep the old values."""
    x, y = spec("x", Storage.INPUT, (6,)), spec("y", Storage.CALL, (2, 3))
    view = CallStep("aten.view.default", (whole(x), (2, 3)), {}, ("y",))
    zero = CallStep("aten.zero_.default", (whole(x),), {}, ())
    executable = Executable(artifact((x, y), (view, zero), ("x",), (whole(y),)), PLAIN)
    for _ in range(2):
        value = torch.randn(6)
        before = value.clone().view(2, 3)
        assert torch.equal(executable.run([value])[0], before)
        assert not value.any()


def test_constants_arena_and_other_dtype_views() -> None:
    """Constants of stride 0, a bool buffer at an odd offset, and a view of another dtype."""
    c = spec("c", Storage.CONSTANT, (3, 2), strides=(0, 1))
    m = spec("m", Storage.ARENA, (3, 2), torch.bool, offset=3)
    i = spec("i", Storage.CALL, (3, 2), torch.int32)
    steps = (
        CallStep("aten.gt.Scalar", (whole(c), 0), {}, ("m",), out="aten.gt.Scalar_out"),
        CallStep("aten.clone.default", (View("c", torch.int32, (3, 2), (0, 1)),), {}, ("i",)),
    )
    row = torch.tensor([1.0, -2.0])
    art = artifact(
        (c, m, i),
        steps,
        (),
        (whole(m), whole(i), whole(c)),
        arena=16,
        constants={"c": row.expand(3, 2).contiguous()},
    )
    mask, bits, same = Executable(artifact_from_bytes(artifact_to_bytes(art)), PLAIN).run([])
    assert mask.tolist() == [[True, False]] * 3
    assert torch.equal(bits[0], row.view(torch.int32))
    assert torch.equal(same, row.expand(3, 2))


@pytest.mark.parametrize(("shape", "reason"), [((2, 3), "view"), ((9,), "float32")])
def test_a_failing_call_names_its_line(shape: tuple[int, ...], reason: str) -> None:
    x, y = spec("x", Storage.INPUT, (6,)), spec("y", Storage.CALL, shape)
    arg = (2, 4) if reason == "view" else (3, 2)
    step = CallStep("aten.view.default", (whole(x), arg), {}, ("y",), origin="train.py:3: x.view")
    executable = Executable(artifact((x, y), (step,), ("x",), (whole(y),)), PLAIN)
    with pytest.raises(RuntimeFailure, match=f"TR-403.*{reason}") as caught:
        executable.run([torch.randn(6)])
    assert caught.value.where == "train.py:3: x.view"


def test_an_out_variant_of_another_shape_is_refused() -> None:
    x, y = spec("x", Storage.INPUT, (4, 4)), spec("y", Storage.ARENA, (2, 4))
    step = CallStep("aten.mm.default", (whole(x), whole(x)), {}, ("y",), out="aten.mm.out")
    executable = Executable(artifact((x, y), (step,), ("x",), (), arena=64), PLAIN)
    with pytest.raises(RuntimeFailure, match=r"it returned \(4, 4\), but y has \(2, 4\)"):
        executable.run([torch.randn(4, 4)])


def test_an_operator_that_does_not_exist() -> None:
    step = CallStep("aten.no_such_thing.default", (), {}, ())
    with pytest.raises(RuntimeFailure, match="no operator"):
        Executable(artifact((), (step,), (), ()), PLAIN)


def test_autocast_around_a_call_changes_nothing() -> None:
    x, y = spec("x", Storage.INPUT, (5, 5)), spec("y", Storage.CALL, (5, 5))
    step = CallStep("aten.mm.default", (whole(x), whole(x)), {}, ("y",))
    value = torch.randn(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (got,) = Executable(artifact((x, y), (step,), ("x",), (whole(y),)), PLAIN).run([value])
    assert torch.equal(got, value @ value)


def test_nothing_of_a_call_stays_alive_but_the_arena() -> None:
    x, y = spec("x", Storage.INPUT, (5, 5)), spec("y", Storage.CALL, (5, 5))
    step = CallStep("aten.mm.default", (whole(x), whole(x)), {}, ("y",))
    executable = Executable(artifact((x, y), (step,), ("x",), (whole(y),), arena=64), PLAIN)
    batches = [torch.randn(5, 5) for _ in range(3)]  # all alive: three addresses
    while batches:
        (got,) = executable.run([batches[-1]])
        watched = [weakref.ref(t.untyped_storage()) for t in (batches.pop(), got)]
        del got
        gc.collect()
        assert [w() for w in watched] == [None, None]
    arena = weakref.ref(executable.held()[0].untyped_storage())
    assert arena() is not None
    executable.release()
    assert arena() is None
    assert executable.run([torch.ones(5, 5)])[0][0, 0] == 5
    del executable


def test_programs_of_a_loop_share_an_arena_that_goes_with_the_last_round() -> None:
    x, y = spec("x", Storage.INPUT, (4,)), spec("y", Storage.ARENA, (4,))
    step = CallStep("aten.add.Tensor", (whole(x), whole(x)), {}, ("y",), out="aten.add.out")
    doubled = artifact((x, y), (step,), ("x",), (whole(y),), arena=64)
    arena = Arena(grows_only=True)
    larger = artifact((x, y), (step,), ("x",), (whole(y),), arena=128)
    condition, body = (Executable(each, PLAIN, arena=arena) for each in (doubled, larger))
    for _ in range(2):  # the second time as well, the block is large enough for both at once
        with condition.repeated() as asks:
            assert torch.equal(asks([torch.ones(4)])[0], torch.full((4,), 2.0))
            with body.repeated() as run:
                assert torch.equal(run([torch.ones(4)])[0], torch.full((4,), 2.0))
                assert torch.equal(asks([torch.ones(4)])[0], torch.full((4,), 2.0))
        assert arena.bytes is None


def _double_artifact() -> Artifact:
    x, y = spec("x", Storage.INPUT, (6,)), spec("y", Storage.CALL, (6,))
    return artifact(
        (x, y),
        (CallStep("aten.add.Tensor", (whole(x), whole(x)), {}, ("y",)),),
        ("x",),
        (whole(y),),
    )


def test_a_new_tensor_at_the_place_of_one_that_is_gone_is_not_kept_alive() -> None:
    """An allocator gives what a backward takes the same address in each step."""
    executable = Executable(_double_artifact(), PLAIN)
    memory = torch.arange(6.0)
    for _ in range(3):
        (doubled,) = executable.run([memory.view(6)])  # another tensor, at the same address
        assert torch.equal(doubled, 2 * memory)
        assert not executable.frame.views()


def test_what_stays_in_place_stays_bound() -> None:
    executable = Executable(_double_artifact(), PLAIN)
    value = torch.arange(6.0)
    for number in range(3):
        executable.run([value])
        assert bool(executable.frame.views()) is (number > 0)
    other = torch.arange(6.0) + 1
    assert torch.equal(executable.run([other])[0], 2 * other)
    assert not executable.frame.views()
