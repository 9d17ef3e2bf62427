"""On a real GPU: kernels that the driver launches itself do what Triton's launches and eager do."""

import copy
import ctypes

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

pytest.importorskip("triton")

import triton
import triton.language as tl

from treadle.runtime.kernels.driver_launch import cuda_library, kernel_runner
from treadle.runtime.kernels.prepared_launch import FunctionCode
from treadle.runtime.kernels.triton_launch import DeviceLaunch, _Bound
from treadle.runtime.replay.tables import Tables


@pytest.fixture
def by_triton(monkeypatch):
    """Which launches Triton makes where they could be joined."""
    made = []
    own = _Bound.by_triton

    def noted(launch, at):
        made.append(launch)
        own(launch, at)

    monkeypatch.setattr(_Bound, "by_triton", noted)
    return made


def model_of(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 33)]
    return nn.Sequential(*layers, *[nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 17)]).cuda()


def step_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def batches(count):
    torch.manual_seed(1)
    return [
        (torch.randn(24, 64, device="cuda"), torch.randint(17, (24,), device="cuda"))
        for _ in range(count)
    ]


def test_launched_and_recorded_steps_equal_eager(by_triton, tmp_path):
    first = model_of()
    models = {"eager": first, "launched": copy.deepcopy(first), "recorded": copy.deepcopy(first)}
    losses = {}
    for name, model in models.items():
        step, optimizer = step_of(model)
        if name != "eager":
            options = treadle.Options(replay=name == "recorded", cache_dir=tmp_path)
            step = treadle.compile(step, model=model, optimizer=optimizer, options=options)
        losses[name] = []
        for number, batch in enumerate(batches(8)):
            if number == 4:
                by_triton.clear()
            losses[name].append(step(*batch).clone())
        if name == "launched":
            assert not by_triton
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(losses["launched"], losses["eager"], **close)
    assert all(map(torch.equal, losses["launched"], losses["recorded"]))
    for name in ("launched", "recorded"):
        pairs = zip(models[name].parameters(), models["eager"].parameters(), strict=True)
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, **close)


def test_the_current_stream_is_that_of_the_call(by_triton, tmp_path):
    model = model_of()
    twin = copy.deepcopy(model)
    step, optimizer = step_of(model)
    eager, _ = step_of(twin)
    options = treadle.Options(replay=False, cache_dir=tmp_path)
    step = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    side = torch.cuda.Stream()
    for number, batch in enumerate(batches(6)):
        expected = eager(*batch)
        torch.cuda.synchronize()
        with torch.cuda.stream(side if number % 2 else torch.cuda.default_stream()):
            torch.cuda._sleep(2_000_000)  # what runs on another stream would be too early
            found = step(*batch)
        torch.cuda.synchronize()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@triton.jit
def _doubled(x, y, n):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y + at, tl.load(x + at, at < n) * 2.0, at < n)


class Clustered:
    """Launches with clusters of two."""

    def __getitem__(self, grid):
        return lambda *args, **options: _doubled[grid](*args, **options, num_ctas=2)


class Doubling:
    """Two launches that follow each other: ``y = 2 * x``, then ``z = 2 * y``."""

    def __init__(self, directory, jit, n=1000):
        runner = kernel_runner(str(directory), cuda_library())
        assert runner is not None
        stage = {"jit": jit, "programs": lambda n: -(-n // 128), "warps": 4, "pipeline": 0}
        entry = {"stages": [stage], "types": ("float32",) * 2, "sizes": ("n",), "table": False}
        function = DeviceLaunch(entry, Tables(), FunctionCode("", None, runner))
        self.n = n
        self.rows = [[[None, None]], [[None, None]]]
        self.arrays = [(ctypes.c_void_p * 2)() for _ in range(2)]
        self.launches = [
            function(rows, [(n,)], array)
            for rows, array in zip(self.rows, self.arrays, strict=True)
        ]
        self.run = runner.together(self.launches)

    def bind(self, x, y, z):
        for rows, array, pair in zip(self.rows, self.arrays, ((x, y), (y, z)), strict=True):
            for at, tensor in enumerate(pair):
                rows[0][at], array[at] = tensor, tensor.data_ptr()

    def check(self, offset=0):
        x, y, z = (torch.randn(self.n + 8, device="cuda")[offset:][: self.n] for _ in range(3))
        before = z.clone()
        self.bind(x, y, z)
        self.run()
        torch.testing.assert_close(z, 4 * x if self.n else before)


def test_addresses_that_are_not_aligned_have_code_of_their_own(by_triton, tmp_path):
    doubling = Doubling(tmp_path, _doubled)
    for offset, made in [(0, 2), (0, 0), (1, 2), (1, 0), (0, 2), (4, 0)]:
        doubling.check(offset)
        assert len(by_triton) == made
        by_triton.clear()


def test_a_kernel_with_a_cluster_is_launched_by_triton(by_triton, tmp_path):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("there are clusters from Hopper on")
    doubling = Doubling(tmp_path, Clustered())
    for _ in range(3):
        doubling.check()
    assert len(by_triton) == 6


def test_an_empty_grid_launches_nothing(by_triton, tmp_path):
    doubling = Doubling(tmp_path, _doubled, n=0)
    for _ in range(3):
        doubling.check()
    assert len(by_triton) <= 2


def test_a_graph_of_the_users_records_what_the_driver_launches(by_triton, tmp_path):
    doubling = Doubling(tmp_path, _doubled)
    x, y, z = (torch.randn(1000, device="cuda") for _ in range(3))
    doubling.bind(x, y, z)
    doubling.run()
    by_triton.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubling.run()
    assert not by_triton
    x.fill_(3.0)
    z.zero_()
    graph.replay()
    torch.testing.assert_close(z, torch.full_like(z, 12.0))
