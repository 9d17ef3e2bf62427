"""Products of float8: which they are, what they give, and what keeps half precision."""

import copy

import pytest
import torch
from torch import nn

import treadle
from float8_products import in_float8, no_further_from_exact, products, training
from testing import run_step, show_plain, trace
from treadle.compiler import chunks
from treadle.passes.products.float8 import MultiplyInFloat8
from treadle.targets.cuda import A100, H200
from treadle.util.errors import PlanError

EVERYWHERE = MultiplyInFloat8()
HALF = torch.bfloat16


@pytest.fixture
def on_cpu(monkeypatch):
    """``numerics="fp8"`` on a CPU, for all products that can be."""

    def passes(target):
        return (EVERYWHERE,) if target.options.numerics == "fp8" else ()

    monkeypatch.setattr(chunks, "_float8", passes)


def half(*shape):
    return torch.randn(*shape, dtype=HALF)


def converted(program, *inputs, graph_pass=EVERYWHERE):
    """How many products became float8, and the graph."""
    step = trace(program, *inputs)
    return graph_pass.run(step), step


def test_a_product_is_scaled_rounded_and_multiplied():
    count, step = converted(lambda x, w: x @ w.t(), half(32, 64), half(48, 64))
    assert count == 1
    assert EVERYWHERE.run(step) == 0
    assert show_plain(step) == (
        "x: bf16[32, 64]\n"
        "w: bf16[48, 64]\n"
        "abs: bf16[32, 64] = abs(x)\n"
        "amax: bf16[] = amax(abs, [0, 1])\n"
        "_to_copy: f32[] = _to_copy(amax, dtype=f32)\n"
        "clamp_min: f32[] = clamp_min(_to_copy, 1e-12)\n"
        "mul: f32[] = mul.Tensor(clamp_min, 0.002232142857142857)\n"
        "treadle: f8e4m3[32, 64] = treadle.to_float8(x, mul, f8e4m3)\n"
        "abs.1: bf16[48, 64] = abs(w)\n"
        "amax.1: bf16[] = amax(abs.1, [0, 1])\n"
        "_to_copy.1: f32[] = _to_copy(amax.1, dtype=f32)\n"
        "clamp_min.1: f32[] = clamp_min(_to_copy.1, 1e-12)\n"
        "mul.1: f32[] = mul.Tensor(clamp_min.1, 0.002232142857142857)\n"
        "treadle.1: f8e4m3[48, 64] = treadle.to_float8(w, mul.1, f8e4m3)\n"
        "t: f8e4m3[64, 48] = t(treadle.1)\n"
        "_scaled_mm: bf16[32, 48] = "
        "_scaled_mm(treadle, t, mul, mul.1, None, None, bf16, True)\n"
        "return [_scaled_mm]"
    )


@pytest.mark.parametrize("sizes", [(32, 64, 48), (16, 16, 16), (112, 32, 16)])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_factors_may_lie_in_rows_or_columns(sizes, left, right):
    m, k, n = sizes
    x = half(k, m).t() if left else half(m, k)
    y = half(n, k).t() if right else half(k, n)
    inputs = (x.t() if left else x, y.t() if right else y)

    def program(x, y):
        return (x.t() if left else x) @ (y.t() if right else y)

    count, step = converted(program, *inputs)
    assert count == 1
    (found,) = run_step(step, inputs)
    exact = x.double() @ y.double()
    assert (found.double() - exact).norm() < 0.06 * exact.norm()


def test_a_matrix_that_two_products_read_is_rounded_once():
    def program(x, w, v):
        return x @ w.t(), x @ v.t(), x.t() @ x

    count, step = converted(program, half(32, 64), half(48, 64), half(16, 64))
    assert count == 3
    rounded = [node for node in step.graph.nodes if "to_float8" in str(node.target)]
    assert len(rounded) == 3


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: x.float() @ w.t().float(),
        lambda x, w: x[:31] @ w.t(),
        lambda x, w: x[:, :63] @ w.t()[:63],
        lambda x, w: x @ w.t()[:, :47],
        lambda x, w: torch.addmm(x[:, :48], x, w.t()),
        lambda x, w: torch.addmm(x[0, :48], x, w.t(), alpha=2),
        lambda x, w: torch.bmm(x[None], w.t()[None]),
    ],
)
def test_refused(program):
    assert converted(program, half(32, 64), half(48, 64))[0] == 0


def test_a_bias_is_added_by_the_product():
    inputs = half(32, 64), half(48, 64), half(48)
    count, step = converted(lambda x, w, b: torch.addmm(b, x, w.t()), *inputs)
    assert count == 1
    (found,) = run_step(step, inputs)
    exact = inputs[0].double() @ inputs[1].double().t() + inputs[2].double()
    assert (found.double() - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(value):
    x, w = half(32, 64), half(48, 64)
    x[3, 5] = value
    _, step = converted(lambda x, w: x @ w.t(), x, w)
    assert run_step(step, (x, w))[0][3].isnan().all()


def test_zeros_and_tiny_numbers():
    _, step = converted(lambda x, w: x @ w.t(), half(32, 64), half(48, 64))
    w = half(48, 64)
    assert not run_step(
        step,
        (
            torch.zeros(32, 64, dtype=HALF),
            w,
        ),
    )[0].any()
    x = half(32, 64) * 1e-20
    exact = x.double() @ w.double().t()
    assert (run_step(step, (x, w))[0].double() - exact).abs().max() < 1e-11


def test_only_where_it_is_faster():
    chosen = MultiplyInFloat8(H200)

    def count(rows, width, *columns):
        shapes = (rows, width), (sum(columns), width)
        inputs = (torch.empty(shape, dtype=HALF, device="meta") for shape in shapes)

        def program(x, w):
            return tuple(x @ part.clone().t() for part in w.split(columns))

        return converted(program, *inputs, graph_pass=chosen)[0]

    assert count(256, 256, 256) == 0
    assert count(8192, 4096, 4096) == 1
    assert count(32768, 2048, 512) == 0
    assert count(32768, 2048, 2048, 512) == 2  # the second reads the same ``x``


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.gate = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self, classes=112):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, classes, bias=False)

    def forward(self, x):
        return self.head(self.blocks(x))


@pytest.mark.parametrize("memory", [None, 0.3])
def test_a_step_is_the_one_with_layers_of_float8(on_cpu, memory):
    model = Net()
    other, exact = copy.deepcopy(model), copy.deepcopy(model)
    in_float8(other.blocks)
    step, optimizer = training(model, "cpu")
    compiled = treadle.compile(
        step, model=model, optimizer=optimizer, numerics="fp8", memory=memory, strict=True
    )
    eager, full = training(other, "cpu")[0], training(exact, "cpu", exact=True)[0]
    x, y = torch.randn(96, 64), torch.randint(0, 112, (96,))
    (loss, grads), (other_loss, other_grads) = compiled(x, y), eager(x, y)
    torch.testing.assert_close(loss, other_loss, rtol=1e-3, atol=0)
    no_further_from_exact(grads, other_grads, full(x, y)[1])
    found, others = products(compiled)
    assert found == 16 if memory is None else found >= 16  # the input has no gradient
    assert others == 3  # of the head
    assert f"products: {found} of {found + 3} in float8" in compiled.explain()


def test_logits_in_chunks_keep_half_precision(on_cpu):
    model = Net(classes=4096)
    step, optimizer = training(model, "cpu")
    options = treadle.Options(numerics="fp8", chunk_logits=256 << 10)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    x, y = torch.randn(96, 64), torch.randint(0, 4096, (96,))
    assert compiled(x, y)[0].isfinite()
    assert products(compiled)[0] == 16


def test_micro_batches_have_scales_of_their_own(on_cpu):
    model = Net()
    exact = copy.deepcopy(model)
    step, optimizer = training(model, "cpu")
    compiled = treadle.compile(
        step, model=model, optimizer=optimizer, numerics="fp8", micro_batch=32
    )
    full, _ = training(exact, "cpu", exact=True)
    for _ in range(2):
        x, y = torch.randn(96, 64), torch.randint(0, 112, (96,))
        torch.testing.assert_close(compiled(x, y)[0], full(x, y)[0], rtol=1e-2, atol=0)
    assert products(compiled)[0] >= 3 * 10


def test_a_device_without_float8_is_refused():
    model = Net(classes=113)  # not those of a test that has float8 everywhere, which is cached
    step, optimizer = training(model, "cpu")
    compiled = treadle.compile(step, model=model, optimizer=optimizer, numerics="fp8")
    x, y = torch.randn(96, 64), torch.randint(0, 113, (96,))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match="TR-213") as found:
        compiled(x, y)
    assert "8.9" in str(found.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_plans_for_a_gpu_that_is_not_here():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
        x = torch.empty(8192, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", HALF):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def planned(device, numerics):
        options = treadle.Options(numerics=numerics)
        given = {"model": model, "optimizer": optimizer, "device": device, "points": 2}
        return treadle.plan(step, x, **given, options=options)

    assert planned("h200", "fp8").step_ms < 0.8 * planned("h200", "default").step_ms
    with pytest.raises(PlanError, match="TR-213"):
        planned("a100", "fp8")
    assert A100.name == "a100"
