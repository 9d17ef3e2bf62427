"""What goes wrong outside: compilers, caches, budgets, devices, interruptions. Nothing is lost."""

import copy
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.options import Options, from_environment
from treadle.runtime.store.cache import Cache
from treadle.util.errors import TreadleError
from treadle.util.sizes import parse_bytes


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 9, 4)

    def forward(self, x):
        return self.out(F.dropout(F.relu(self.norm(self.conv(x))), 0.2, self.training).flatten(1))


def make_step(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch(n: int = 6):
    return torch.randn(n, 3, 5, 5), torch.randint(4, (n,))


def compiled(tmp_path, model=None, **options):
    model = model or ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = Options(cache_dir=tmp_path, **options)
    step = make_step(model, optimizer)
    return model, optimizer, treadle.compile(
        step, model=model, optimizer=optimizer, options=chosen
    )  # fmt: skip


def assert_equals_eager(step, model, optimizer, twin, other, steps=3):
    eager = make_step(twin, other)
    for number in range(steps):
        x, y = batch()
        torch.manual_seed(number)
        ours = step(x, y)
        torch.manual_seed(number)
        torch.testing.assert_close(ours, eager(x, y), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [None, 0.0])
def test_without_code_generation_pytorchs_kernels_do_it(tmp_path, memory):
    model, optimizer, step = compiled(tmp_path, codegen=False, memory=memory)
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    assert_equals_eager(step, model, optimizer, twin, other)
    report = step.measure(*batch())
    assert report.peak_bytes <= step.compiled.artifact.peak_bytes
    assert step.compiled.artifact.sources == ()
    assert "no compiler was found, or codegen is off" in step.explain()


def test_strict_refuses_to_run_without_kernels(tmp_path):
    *_, step = compiled(tmp_path, codegen=False, strict=True)
    with pytest.raises(treadle.LoweringError, match="TR-302"):
        step(*batch())


def test_the_demo_runs_without_a_compiler_and_says_so(tmp_path, forks):
    program = """
        from testing import small_demo
        from treadle.tools.cli import main
        from treadle.runtime.kernels.compilers import find_cxx
        find_cxx.cache_clear()
        small_demo()
        raise SystemExit(main(['demo', '--steps', '2']))
    """
    environment = {"PATH": str(tmp_path), "TREADLE_CACHE_DIR": str(tmp_path / "cache")}
    done = forks.run(program, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "no working C++ compiler was found" in done.stdout


STEP = """
    import torch, treadle
    from pathlib import Path
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.GELU(), torch.nn.Linear(17, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    step = treadle.compile(train, model=model, optimizer=optimizer)
    x = torch.ones(5, 9)
    print(*(f"{step(x).item():.9f}" for _ in range(3)), step.compiled.from_cache)
"""


def test_the_second_process_compiles_nothing(tmp_path, forks):
    environment = {"TREADLE_CACHE_DIR": str(tmp_path)}
    first, second = (forks.run(STEP, environment=environment) for _ in range(2))
    assert first.stdout.split()[-1] == "False", first.stderr
    assert second.stdout.split()[-1] == "True", second.stderr
    assert first.stdout.split()[:3] == second.stdout.split()[:3]


def test_two_processes_may_compile_the_same_step_at_once(tmp_path, forks):
    environment = {"TREADLE_CACHE_DIR": str(tmp_path)}
    both = [forks.start(STEP, environment=environment) for _ in range(2)]
    done = [forks.finish(process) for process in both]
    assert [each.returncode for each in done] == [0, 0]
    losses = [each.stdout.split()[:3] for each in done]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_damaged_cache_is_compiled_again(tmp_path, damage):
    """Every file of it: artifacts, shared libraries, measured workspaces."""
    model, _, step = compiled(tmp_path)
    weights = copy.deepcopy(model.state_dict())
    given, states = batch(), []
    torch.manual_seed(0)
    expected = step(*given)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert any(path.suffix == ".so" for path in files)
    for path in files:
        data = path.read_bytes()
        path.unlink()  # this process has the library mapped
        half = {"truncated": data[: len(data) // 2], "garbage": b"\0" * len(data), "empty": b""}
        path.write_bytes(half[damage])
    for _ in range(2):
        model.load_state_dict(weights)
        *_, again = compiled(tmp_path, model)
        torch.manual_seed(0)
        assert torch.equal(again(*given), expected)
        states.append(again.compiled.from_cache)
    assert states == [False, True]


def test_a_blob_of_another_format_is_a_miss(tmp_path):
    """Valid on disk, but not something this version can read."""
    model, _, step = compiled(tmp_path, nn.Sequential(nn.Flatten(), nn.Linear(75, 4)))
    key = step.prepare(*batch()).key
    cache = Cache(tmp_path)
    assert cache.get(key) is not None
    for blob in (b"not an artifact", b"{}", b'{"artifact": {}, "log": ""}', b"[1]", b"null"):
        cache.put(key, blob)
        *_, other = compiled(tmp_path, model)
        assert not other.prepare(*batch()).from_cache
    *_, third = compiled(tmp_path, model)
    assert third.prepare(*batch()).from_cache


def test_a_cache_that_cannot_be_written_costs_only_a_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the directory should be")
    _, _, step = compiled(blocked / "cache")
    with pytest.warns(RuntimeWarning, match="cache"):
        loss = step(*batch())
    assert loss.isfinite()


def test_a_model_on_two_devices_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, device="meta"))
    with pytest.raises(treadle.CaptureError, match=r"TR-1\d\d") as caught:
        compiled(tmp_path, model)[2](*batch())
    assert "meta" in str(caught.value)
    assert "cpu" in str(caught.value)


def test_the_peak_of_a_convolution_is_predicted(tmp_path):
    """What library calls allocate inside is measured when the step is compiled."""
    *_, step = compiled(tmp_path)
    step(*batch(64))  # until it has run once, what it overwrites is kept aside
    report = step.measure(*batch(64))
    assert report.peak_bytes == pytest.approx(step.compiled.artifact.peak_bytes, rel=0.05)


def test_the_smallest_budget_that_an_error_names_is_enough(tmp_path):
    *_, step = compiled(tmp_path, memory="10KB")
    with pytest.raises(treadle.PlanError, match="TR-202") as caught:
        step(*batch(64))
    assert f"{__file__}:" in caught.value.message  # the lines that most of the bytes are of
    _, named, _ = caught.value.remedy.split('"')
    *_, smaller = compiled(tmp_path, memory=named)
    assert smaller.measure(*batch(64)).peak_bytes <= parse_bytes(named)


def everything(model, optimizer):
    tensors = [*model.state_dict().values()]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    return [t.clone() for t in tensors] + [torch.get_rng_state()]


def break_in(executable, place, action):
    """Run ``action`` before the launch or call number ``place``; gives what takes it out again."""
    actions = executable.frame.actions
    flat, owners = actions.flat, actions.owners
    actions.flat = [*flat[:place], action, *flat[place:]]
    actions.owners = [*owners[:place], owners[place], *owners[place:]]

    def repair():
        actions.flat, actions.owners = flat, owners

    return repair


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_a_failure_in_the_first_step_changes_nothing(tmp_path, memory):
    model, optimizer, step = compiled(tmp_path, memory=memory)
    given = batch()
    step.prepare(*given)
    before = everything(model, optimizer)
    executable = step.compiled.executable

    def fails():
        raise MemoryError("in the middle")

    for place in range(1, len(executable.frame.actions.flat), 3):
        repair = break_in(executable, place, fails)
        with pytest.raises(treadle.TreadleError, match="TR-403"):
            step(*given)
        repair()
        after = everything(model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), place
    assert step(*batch()).isfinite()


def test_a_failure_in_a_later_step_says_what_it_left(tmp_path):
    _, _, step = compiled(tmp_path)
    step(*batch())

    def fails():
        raise MemoryError("in the middle")

    break_in(step.compiled.executable, 5, fails)
    given, before = batch(), torch.get_rng_state()
    with pytest.raises(treadle.TreadleError, match="TR-406") as caught:
        step(*given)
    assert "checkpoint" in caught.value.remedy
    assert torch.equal(before, torch.get_rng_state())


def test_ctrl_c_in_the_middle_leaves_the_step_done(tmp_path):
    model, optimizer, step = compiled(tmp_path)
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    first, second = batch(), batch()
    torch.manual_seed(0)
    step(*first)
    repair = break_in(step.compiled.executable, 4, lambda: signal.raise_signal(signal.SIGINT))
    # a job in the background of a shell has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(*second)
    finally:
        signal.signal(signal.SIGINT, before)
    repair()
    torch.manual_seed(0)
    for each in (first, second):
        make_step(twin, other)(*each)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    counts = {float(state["step"]) for state in optimizer.state.values()}
    assert counts == {2.0}


def test_a_nan_in_the_batch_flows_as_in_eager(tmp_path):
    model, _, step = compiled(tmp_path)
    twin = copy.deepcopy(model)
    eager = make_step(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2))
    x, y = batch()
    x[2, 1] = torch.nan
    for function in (step, eager):
        torch.manual_seed(1)
        function(x, y)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_verify_leaves_optimizer_state_alone(tmp_path):
    model, optimizer, step = compiled(tmp_path)
    assert step.verify([batch()]) is None
    assert not optimizer.state  # not created by the trial
    step(*batch())
    given = [batch(), batch()]
    before, groups = everything(model, optimizer), copy.deepcopy(optimizer.state_dict())
    assert step.verify(given) is None
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.state_dict()["param_groups"] == groups["param_groups"]


def test_a_deleted_step_returns_its_memory(tmp_path):
    import gc
    import weakref

    model, _, step = compiled(tmp_path)
    step(*batch())
    arena = weakref.ref(step.compiled.executable.held()[0].untyped_storage())
    del step
    gc.collect()
    assert arena() is None
    assert model(batch()[0]).isfinite().all()


VALUES = ["x", "", 3, 0, -1, 1.5, True, False, None, [1], ("x",), {}, object(), Path("x"), 1 << 80]


def made(**named):
    """Options, or the error."""
    try:
        return Options(**named), None
    except TreadleError as error:
        return None, error


@pytest.mark.parametrize("name", [option.name for option in fields(Options)])
def test_a_value_of_any_option_is_taken_or_refused_by_name(name):
    default = type(getattr(Options(), name))
    for value in VALUES:
        options, error = made(**{name: value})
        if options is None:
            assert error.code in ("TR-001", "TR-201"), error
            assert name in error.message.lower(), error
            assert error.remedy
        else:
            taken = getattr(options, name)
            assert taken == value or type(taken) is default or not value
    for flag in (True, False) if default is bool else ():
        assert getattr(Options(**{name: flag}), name) is flag


def test_a_size_names_its_option(monkeypatch):
    monkeypatch.setenv("TREADLE_BUCKETS", "big")
    with pytest.raises(TreadleError, match="buckets='big' is not a size") as error:
        from_environment()
    assert "ratio" not in error.value.remedy
