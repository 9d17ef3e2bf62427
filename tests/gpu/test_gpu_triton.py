"""On a real GPU: generated kernels agree with the loop interpreter, and whole steps with eager."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

sys.path.insert(0, str(Path(__file__).parent.parent / "codegen"))


def on_gpu(jobs, folder):
    """Every job's tensors after the generated code; modules of one text share what is compiled."""
    from treadle.runtime.kernels.triton_launch import TritonLauncher

    loaded, results = {}, []
    for job in jobs:
        if job.source.text not in loaded:
            loaded[job.source.text] = TritonLauncher(folder).load([job.source]).device
        found = {name: tensor.cuda() for name, tensor in job.tensors.items()}
        for launch in job.launches:
            storages = [[found[name] for name in row] for row in launch.buffers]
            loaded[job.source.text][launch.function](storages, launch.sizes)()
        results.append({name: tensor.cpu() for name, tensor in found.items()})
    return results


def test_kernels_agree_with_the_loop_interpreter(tmp_path):
    from test_triton import all_cases
    from triton_run import compare, job_of

    cases = all_cases()
    compare(cases, on_gpu([job_of(case) for case in cases], tmp_path), rtol=1e-4, atol=1e-4)


def test_kernels_of_every_size_agree_with_the_loop_interpreter(tmp_path):
    from test_triton_sizes import SIZED, jobs_of
    from triton_run import compare

    for sized in SIZED.values():
        cases, jobs = jobs_of(sized)
        compare(cases, on_gpu(jobs, tmp_path), rtol=1e-4, atol=1e-4)


def test_split_sums_do_not_change_from_run_to_run(tmp_path):
    import triton_kernels as make
    from triton_run import buffers_of, rendered, scratch_tensors

    from treadle.runtime.kernels.triton_launch import TritonLauncher

    n = 3_000_001
    tensors = {
        "g": torch.randn(n).cuda(),
        "y": torch.empty(n).cuda(),
        "scale": torch.ones(1).cuda(),
    }
    source, (launch,), buffers = rendered([make.total_norm(n)], buffers_of(tensors))
    tensors |= {k: t.cuda() for k, t in scratch_tensors(tensors, buffers).items()}
    function = TritonLauncher(tmp_path).load([source]).device[launch.function]
    storages = [[tensors[name] for name in row] for row in launch.buffers]
    run = function(storages, launch.sizes)
    results = []
    for _ in range(5):
        run()
        results.append(tensors["scale"].item())
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(1 / tensors["g"].double().norm().item(), rel=1e-5)


@pytest.mark.parametrize(("rows", "cols"), [(16384, 1024), (16411, 768), (70001, 128)])
def test_what_rows_and_columns_are_reduced_to_does_not_either(rows, cols, tmp_path):
    from triton_cases import norm_backward_case
    from triton_run import buffers_of, rendered, scratch_tensors

    from treadle.loop.kernel import LoopForm
    from treadle.runtime.kernels.triton_launch import TritonLauncher
    from treadle.schedule.workers import PROGRAMS

    case = norm_backward_case(rows, cols)
    given = {name: torch.nan_to_num(each) for name, each in case.tensors.items()}
    assert PROGRAMS.choose(case.kernels[0]).form is LoopForm.SWEPT
    source, (launch,), buffers = rendered(case.kernels, buffers_of(given))
    found = {k: t.cuda() for k, t in {**given, **scratch_tensors(given, buffers)}.items()}
    function = TritonLauncher(tmp_path).load([source]).device[launch.function]
    storages = [[found[name] for name in row] for row in launch.buffers]
    run = function(storages, launch.sizes)
    results = []
    for _ in range(5):
        found["n"].fill_(float("nan"))
        run()
        results.append((found["n"].clone(), found["dx"].clone()))
    for each in results[1:]:
        assert all(map(torch.equal, each, results[0]))
    g, x, r, w = (given[name].double() for name in ("g", "x", "r", "w"))
    g, normed = g.view(rows, cols), x.view(rows, cols) * r[:, None]
    mean = (g * w * normed).mean(1, keepdim=True)
    dx = r[:, None] * (g * w - normed * mean)
    torch.testing.assert_close(
        results[0][1].cpu().double().view(rows, cols), dx, rtol=1e-4, atol=1e-4
    )
    dw = (g * normed).sum(0) + w
    torch.testing.assert_close(results[0][0].cpu().double(), dw, rtol=1e-4, atol=2e-2)


class Block(nn.Module):
    """One transformer block over a tied vocabulary."""

    def __init__(self, vocabulary: int = 517, width: int = 96, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids):
        h = self.embed(ids)
        batch, length, width = h.shape
        parts = self.qkv(self.norm1(h)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))
        return F.linear(h, self.embed.weight)


def make_step(model, optimizer, dtype):
    def step(ids, labels):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", [None, 0.3])
def test_ten_steps_equal_eager(dtype, memory, tmp_path):
    torch.manual_seed(0)
    model = Block().cuda()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    options = treadle.Options(memory=memory, cache_dir=tmp_path)
    step = treadle.compile(
        make_step(model, optimizer, dtype), model=model, optimizer=optimizer, options=options
    )
    eager = make_step(twin, other, dtype)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for number in range(10):
        ids, labels = (torch.randint(517, (3, 65), device="cuda") for _ in range(2))
        for each in (optimizer, other):
            each.param_groups[0]["lr"] = 1e-3 / (1 + number)
        torch.testing.assert_close(step(ids, labels), eager(ids, labels), **close)
    assert not step.recompiles
