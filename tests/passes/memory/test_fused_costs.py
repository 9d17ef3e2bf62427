"""What a second computation costs, and that weights are cast once: bytes, launches, whole plans."""

from collections.abc import Callable
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.memory.traced_steps import traced, transformer
from testing import check_numbers, show_plain, trace
from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.compiler.cleaning import clean
from treadle.compiler.memory import applied, planned
from treadle.compiler.request import Target
from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.signature import Role, StepGraph
from treadle.loop.kernel import Kernel
from treadle.loop.printing import show_kernel
from treadle.options import Options
from treadle.passes.memory.choose import fastest_plan
from treadle.passes.memory.fused import recompute_costs
from treadle.passes.memory.order import facts_of
from treadle.passes.memory.search import Candidate, _Planner, fastest, worth_its_time
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import A100, H100, H200, RTX4090
from treadle.targets.model import DeviceModel

aten = torch.ops.aten
LAUNCH = float(2**30)
BYTES = DeviceModel("bytes", {torch.float32: 1e30}, 1.0, launch=LAUNCH)
"""On which a byte takes a second, arithmetic nothing, and a launch more than all bytes."""
MODELS = (CPU_MODEL, H200, H100, A100, RTX4090)


def again(step: StepGraph, name: str) -> float:
    """Bytes that the second computation of a value moves, and ``LAUNCH`` if it is a kernel."""
    facts = facts_of(step)
    (at,) = [i for i, node in enumerate(facts.nodes) if node.name == name]
    return recompute_costs(facts, BYTES).again[at]


def perceptron(rows: int = 48, width: int = 8):
    """Two products in bfloat16 of float32 weights."""

    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x.bfloat16(), w.bfloat16()))
        return F.linear(hidden, v.bfloat16()).float().square().mean()

    parameters = [torch.randn(2 * width, width), torch.randn(width, 2 * width)]
    return loss, parameters, [torch.randn(rows, width)]


def casts(step: StepGraph) -> list[str]:
    """What is converted to bfloat16 of the weights, given or new, once for each time."""
    weights = [node for node, each in step.inputs() if each.role is Role.PARAMETER]
    weights += [n for n, each in step.outputs() if n is not None and each.writes is not None]
    shapes = {tuple(tensor_of(node).shape) for node in weights}
    found = step.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    return [
        str(node.args[0])
        for node in found
        if tensor_of(node).dtype is torch.bfloat16
        and tensor_of(node.args[0]).dtype is torch.float32
        and tuple(tensor_of(node).shape) in shapes
    ]


# -- costs -------------------------------------------------------------------------------------


def test_a_second_cast_reads_the_weight_writes_the_copy_and_is_launched():
    loss, parameters, batch = perceptron()
    step = traced(loss, parameters, batch)
    (cast,) = [n for n in step.graph.nodes if str(n.args[:1]) == "(arg1_1,)" and "copy" in n.name]
    assert again(step, cast.name) == LAUNCH + (4 + 2) * parameters[1].numel()


def product(reads: Callable[[Tensor], Tensor]) -> StepGraph:
    """``loss = f((x @ v) @ reads(exp(w)))``: both products of backward are wanted."""

    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return ((x @ v) @ reads(w.exp())).sin().sum()

    return traced(loss, [torch.randn(8, 8), torch.randn(8, 8)], [torch.randn(4, 8)])


def test_a_view_of_the_forward_pass_hides_no_late_reader():
    plain = product(lambda w: w)
    viewed = product(lambda w: w.view(4, 16).view(8, 8))
    # exp's own gradient reads exp, which is no operand of it: nothing else reads w
    assert again(plain, "exp") == again(viewed, "exp") == LAUNCH + (4 + 4) * 64


def test_what_a_formula_of_backward_reads_anyway_shares_its_kernel():
    loss, parameters, batch = perceptron()
    step = traced(loss, parameters, batch)
    (gelu,) = step.graph.find_nodes(op="call_function", target=aten.gelu.default)
    assert again(step, gelu.name) == pytest.approx(0.05 * 2 * 48 * 16)


def test_inside_another_kernel_what_only_it_reads_is_read_still():
    def loss(w: Tensor, v: Tensor, x: Tensor, least: Tensor) -> Tensor:
        scores = x @ w
        return (torch.where(scores > least, scores, 0.0) @ v).sin().sum()

    batch = [torch.randn(4, 8), torch.randn(4, 8)]
    step = traced(loss, [torch.randn(8, 8), torch.randn(8, 8)], batch)
    assert again(step, "gt") == 2 * 4 * 32  # each bool of two floats


def test_of_a_larger_operand_an_element_for_each_of_the_result_is_read():
    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return ((x @ v) @ w[:8].exp()).sin().sum()

    step = traced(loss, [torch.randn(800, 8), torch.randn(8, 8)], [torch.randn(4, 8)])
    assert again(step, "exp") == LAUNCH + (4 + 4) * 64


def test_an_operand_that_is_expanded_is_read_as_it_lies_in_memory():
    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return ((x @ v) @ w.expand(8, 8).exp()).sin().sum()

    step = traced(loss, [torch.randn(8), torch.randn(8, 8)], [torch.randn(4, 8)])
    assert again(step, "exp") == LAUNCH + 4 * 8 + 4 * 64


def test_a_kernel_that_waits_for_the_call_cannot_write_its_operand():
    """As of attention's operands: the kernel of their gradient reads what they were made of."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        hidden = x @ w
        active = hidden * hidden
        return F.scaled_dot_product_attention(*active.view(3, 1, 2, 4, 8)).sin().sum()

    step = traced(loss, [torch.randn(8, 8)], [torch.randn(24, 8)])
    assert again(step, "mul") == LAUNCH + (4 + 4) * 24 * 8


def test_a_second_product_is_launched():
    step = product(lambda w: w)
    assert again(step, "mm") == LAUNCH + 4 * (4 * 8 + 8 * 8 + 4 * 8)


def test_formulas_read_once_a_stage_and_write_what_others_read():
    def loss(w: Tensor, x: Tensor) -> Tensor:
        hidden = x @ w
        return (hidden * hidden.view(32).view(4, 8)).sum()

    step = traced(loss, [torch.randn(8, 8)], [torch.randn(4, 8)])
    small, wide = 4 * 32, 4 * 64
    products = 2 * (small + small + wide)
    formulas = small + 4 + small  # the product, the loss, and the gradient of the product
    update = 3 * wide  # the weight, its gradient, and the new weight
    assert recompute_costs(facts_of(step), BYTES).once == products + formulas + update


# -- plans -------------------------------------------------------------------------------------


def both_passes(w: Tensor, v: Tensor, x: Tensor):
    """Two products of weights cast to bfloat16, with a gate between, and the gradients."""
    low = w.to(torch.bfloat16)
    hidden = x @ low
    gate = hidden.sigmoid()
    active = gate * hidden
    narrow = v.to(torch.bfloat16)
    y = active @ narrow
    back = y @ narrow.t()  # backward from here on; y stands for its own gradient
    d = back * gate + back * hidden
    return y, d @ low.t(), x.t() @ d, active.t() @ y


def test_the_plan_of_a_small_perceptron():
    """The gate is computed again in the kernel that reads it, and each weight is cast once."""
    inputs = torch.randn(2, 4), torch.randn(4, 2), torch.randn(3, 2).bfloat16()
    step = trace(both_passes, *inputs, backward_from="t")
    step = applied(step, fastest_plan(step, H200))
    assert show_plain(step) == dedent("""\
        w: f32[2, 4]
        v: f32[4, 2]
        x: bf16[3, 2]
        _to_copy: bf16[2, 4] = _to_copy(w, dtype=bf16)
        mm: bf16[3, 4] = mm(x, _to_copy)
        sigmoid: bf16[3, 4] = sigmoid(mm)
        mul: bf16[3, 4] = mul.Tensor(sigmoid, mm)
        _to_copy.1: bf16[4, 2] = _to_copy(v, dtype=bf16)
        mm.1: bf16[3, 2] = mm(mul, _to_copy.1)
        t: bf16[2, 4] = t(_to_copy.1)
        mm.2: bf16[3, 4] = mm(mm.1, t)
        sigmoid.1: bf16[3, 4] = sigmoid(mm)
        mul.1: bf16[3, 4] = mul.Tensor(mm.2, sigmoid.1)
        mul.2: bf16[3, 4] = mul.Tensor(mm.2, mm)
        add: bf16[3, 4] = add.Tensor(mul.1, mul.2)
        t.1: bf16[4, 2] = t(_to_copy)
        mm.3: bf16[3, 2] = mm(add, t.1)
        t.2: bf16[2, 3] = t(x)
        mm.4: bf16[2, 4] = mm(t.2, add)
        mul.3: bf16[3, 4] = mul.Tensor(sigmoid.1, mm)
        t.3: bf16[4, 3] = t(mul.3)
        mm.5: bf16[4, 2] = mm(t.3, mm.1)
        return [mm.1, mm.3, mm.4, mm.5]""")
    check_numbers(step, both_passes, inputs)


def block(rows: int = 48, width: int = 8):
    """A gated perceptron behind a norm, added to what it was given."""

    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        inside = F.linear(F.layer_norm(x, (width,)).bfloat16(), w.bfloat16())
        gated = inside.sigmoid() * inside
        return (x + F.linear(gated, v.bfloat16())).square().mean()

    parameters = [torch.randn(2 * width, width), torch.randn(width, 2 * width)]
    return loss, parameters, [torch.randn(rows, width).requires_grad_()]


@pytest.mark.parametrize("device", MODELS, ids=lambda each: each.name)
@pytest.mark.parametrize("width", [8, 64, 1024])
@pytest.mark.parametrize("make", [perceptron, block])
def test_weights_are_cast_once(make, device, width):
    loss, parameters, batch = make(width=width)
    step = clean(traced(loss, parameters, batch))
    assert sorted(casts(fastest(step, device).step)) == ["arg0_1", "arg1_1"]


@pytest.mark.parametrize("device", MODELS, ids=lambda each: each.name)
def test_no_plan_is_estimated_to_be_faster_with_second_casts(device):
    loss, parameters, batch = perceptron(width=256)
    planner = _Planner(clean(traced(loss, parameters, batch)), device)
    chosen = planner.fastest()
    nodes = planner.facts.nodes
    weights = {i for i in chosen.saved if str(nodes[i].args[0]) in ("arg0_1", "arg1_1")}
    assert weights
    twice = planner.candidate(0.0, chosen.saved - weights)
    assert chosen.seconds < twice.seconds


def test_float32_plans_are_no_slower_than_keeping_everything():
    loss, parameters, batch = transformer(layers=2, width=24, heads=2, batch=2, length=20)
    step = clean(traced(loss, parameters, batch))
    for device in MODELS:
        assert fastest(step, device).seconds <= _Planner(step, device).keep_all().seconds


# -- one call that reads weights several times ---------------------------------------------------


def captured(kind: str) -> StepGraph:
    """A captured and cleaned step: two backwards before one update, or two updates."""
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for batch in (x, y):
            loss = loss_of(batch)
            loss.backward()
            if kind == "updates":
                optimizer.step()
                optimizer.zero_grad()
            total = total + loss.detach()
        if kind == "microbatches":
            optimizer.step()
            optimizer.zero_grad()
        return total

    found = capture(
        step,
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=(torch.randn(16, 32), torch.randn(16, 32)),
        kwargs={},
    )
    return clean(found.step)


@pytest.mark.parametrize("device", MODELS, ids=lambda each: each.name)
def test_microbatches_share_one_copy(device):
    step = captured("microbatches")
    assert sorted(casts(fastest(step, device).step)) == ["arg0_1", "arg1_1"]


@pytest.mark.parametrize("device", MODELS, ids=lambda each: each.name)
def test_a_tied_weight_is_cast_once(device):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        hidden = F.silu(F.linear(x.bfloat16(), w.bfloat16()))
        return F.linear(hidden, w.bfloat16().t()).float().square().mean()

    step = clean(traced(loss, [torch.randn(16, 8)], [torch.randn(48, 8)]))
    assert casts(fastest(step, device).step) == ["arg0_1"]


@pytest.mark.parametrize("device", MODELS, ids=lambda each: each.name)
def test_a_frozen_weight_is_cast_once(device):
    def loss(w: Tensor, frozen: Tensor, x: Tensor) -> Tensor:
        hidden = F.silu(F.linear(x.bfloat16(), w.bfloat16()))
        return F.linear(hidden, frozen.bfloat16()).float().square().mean()

    batch = [torch.randn(8, 16), torch.randn(48, 8)]
    step = clean(traced(loss, [torch.randn(16, 8)], batch))
    made = fastest(step, device).step
    (cast,) = [n for n in made.graph.nodes if "copy" in n.name and str(n.args[0]) == "arg1_1"]
    assert len(cast.users) == 2  # a product of each pass, one of them through a view


@pytest.mark.parametrize("device", MODELS, ids=lambda each: each.name)
def test_after_an_update_the_new_weight_is_cast_once(device):
    step = captured("updates")
    found = casts(fastest(step, device).step)
    assert len(found) == len(set(found)) == 4
    assert {"arg0_1", "arg1_1"} < set(found)


def test_the_update_writes_the_new_weight_and_its_copy():
    """One kernel, which has the new value in a register: where a later forward pass reads it."""
    target = Target("cpu", Options())
    step = captured("updates")
    plan = applied(step, fastest_plan(step, target.hardware))
    kernels = [show_kernel(k) for k in planned(plan, target).plan.steps if isinstance(k, Kernel)]
    new = [name for name in casts(plan) if not name.startswith("arg")]
    assert len(new) == 2
    for name in new:
        (kernel,) = [text for text in kernels if f"  {name}[" in text]
        (copy,) = [n for n in plan.graph.nodes if "copy" in n.name and str(n.args[0]) == name]
        assert f"  {copy.name}[" in kernel


@pytest.mark.parametrize(
    ("seconds", "peak", "is_chosen"),
    [(1.0, 90, True), (1.002, 89, True), (1.002, 91, False), (1.01, 49, True), (1.02, 1, False)],
)
def test_a_smaller_plan_is_chosen_if_it_takes_next_to_no_longer(seconds, peak, is_chosen):
    first = Candidate(0.0, None, frozenset(), 100, 1.0)
    small = Candidate(0.0, None, frozenset({1}), peak, seconds)
    assert worth_its_time([first, small]) is (small if is_chosen else first)
