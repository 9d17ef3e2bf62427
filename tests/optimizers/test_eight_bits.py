"""Optimizer state in 8 bits: the codes, what a run with them gives, and who else sees the state."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import treadle
from treadle.capture.optimizers.eight_bits import EightBitState, encoded, turn_of
from treadle.graph.custom_ops.eight_bits import FROM_EIGHT_BITS, TO_EIGHT_BITS, last_code
from treadle.util.errors import CaptureError, TreadleError

CODES = [torch.int8, torch.uint8]
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=2e-3, amsgrad=True, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=2e-3),
}


def every(dtype):
    """All codes of a dtype, in order."""
    last = last_code(dtype)
    return torch.arange(-last if dtype is torch.int8 else 0, last + 1).to(dtype)


# -- codes


@pytest.mark.parametrize("dtype", CODES)
def test_a_code_is_that_of_its_number(dtype):
    codes, scale = every(dtype), torch.rand(()) * 1e-3
    numbers = FROM_EIGHT_BITS.op(codes, scale)
    assert torch.equal(TO_EIGHT_BITS.op(numbers, scale, dtype), codes)
    assert (numbers[1:] > numbers[:-1]).all()
    assert numbers[-1] == scale
    assert numbers.abs().min() == 0


@pytest.mark.parametrize("dtype", CODES)
@settings(deadline=None, max_examples=40)
@given(exponent=st.floats(-9, 0), scale=st.floats(2.0**-60, 2.0**60), seed=st.integers(0, 999))
def test_a_number_gets_the_nearest_code(dtype, exponent, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(64, generator=generator) * 10**exponent * scale
    x = x * torch.randn(64, generator=generator).sign() if dtype is torch.int8 else x
    scale = torch.tensor(scale)
    there = FROM_EIGHT_BITS.op(TO_EIGHT_BITS.op(x, scale, dtype), scale)
    known = FROM_EIGHT_BITS.op(every(dtype), scale)
    if dtype is torch.uint8:
        known = known[1:]  # what is above 0 does not become it
    nearest = (x[:, None] - known).abs().amin(1)
    # ends of decades have unequal neighbours: there the middle of codes is not that of numbers
    assert ((x - there).abs() <= nearest * 3 + scale * 1e-6).all()
    inside = x.abs() > 0.1001 * scale
    assert ((x - there).abs() <= nearest * (1 + 1e-3) + scale * 1e-6)[inside].all()


def test_a_divisor_is_never_rounded_to_zero():
    x = torch.tensor([0.0, 1e-30, 1e-12, 1.0])
    assert TO_EIGHT_BITS.op(x, torch.tensor(1.0), torch.uint8).tolist() == [0, 1, 1, 255]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block(bad):
    x = torch.tensor([[0.5, bad, 0.0], [0.5, 1.0, 0.0]])
    scale = x.abs().amax(1, keepdim=True)
    numbers = FROM_EIGHT_BITS.op(TO_EIGHT_BITS.op(x, scale, torch.int8), scale)
    assert numbers[0].isnan().all()
    assert torch.allclose(numbers[1], x[1], rtol=0.02)


def awkward(rows):
    x = torch.randn(rows, 64) * 10 ** torch.empty(rows, 64).uniform_(-9, 2)
    x[0] = 0.0
    x[1, 3], x[2, 5] = math.inf, math.nan
    return x


@pytest.mark.parametrize("numerics", ["eager", "default"])
@pytest.mark.parametrize("dtype", CODES)
def test_generated_code_gives_the_same_codes(dtype, numerics):
    def run(x):
        scale = x.abs().amax(1, keepdim=True)
        codes = TO_EIGHT_BITS.op(x, scale, dtype)
        return codes, FROM_EIGHT_BITS.op(codes, scale)

    x = awkward(37) if dtype is torch.int8 else awkward(37).abs()
    step = treadle.compile(run, model=nn.Linear(1, 1), strict=True, numerics=numerics)
    (codes, numbers), (theirs, known) = step(x), run(x)
    apart = (codes.int() - theirs.int()).abs()
    if numerics == "eager":
        assert not apart.any()
        torch.testing.assert_close(numbers, known, rtol=0, atol=0, equal_nan=True)
    else:  # fused multiply-adds: a number in the middle of two codes
        assert apart.max() <= 1
        assert apart.float().mean() < 1e-3


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_averages_of_squares_are_right_on_average(spread):
    """Beside averages in 32 bits, after as many steps as an average is long."""
    torch.manual_seed(0)
    sizes = torch.exp(torch.randn(16, 256) * spread)
    exact, codes, scales = torch.zeros(16, 256), *encoded(torch.zeros(16, 256), torch.uint8)
    for step in range(1500):
        squares = (torch.randn(16, 256) * sizes) ** 2
        exact = exact * 0.999 + squares * 0.001
        kept = FROM_EIGHT_BITS.op(codes, scales) * 0.999 + squares * 0.001
        turn = turn_of({"step": torch.tensor(float(step), dtype=torch.float64)})
        codes, scales = encoded(kept, torch.uint8, turn)
    roots = (FROM_EIGHT_BITS.op(codes, scales) / exact).sqrt()
    assert roots.mean() == pytest.approx(1.0, abs=0.02)
    assert roots.std() < 0.15


@pytest.mark.parametrize("turn", [0.0, 0.25, 0.999])
def test_a_code_stays_what_it_is_in_every_turn(turn):
    codes, scale = every(torch.uint8).expand(40, -1), torch.tensor(0.37)
    numbers = FROM_EIGHT_BITS.op(codes, scale)
    again = TO_EIGHT_BITS.op(numbers, scale, torch.uint8, torch.tensor(turn))
    assert (again.int() - codes.int()).abs().sum() <= 40  # one of 256 columns at most
    assert torch.equal(again[:, [0, -1]], codes[:, [0, -1]])


# -- training


def task(seed=0, width=64):
    """A small network, batches, and the mean loss of the last ones."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 10)
    )
    truth = torch.randn(width, 10)
    return model, [(x, (x @ truth).argmax(1)) for x in torch.randn(120, 32, width).unbind()]


def trainer(model, optimizer):
    def step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def regression(model, optimizer, target=torch.zeros_like):
    """A step that brings results nearer to ``target`` of their batch."""

    def step(x):
        loss = (model(x).float() - target(x).float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def trained(make, batches, model, **options):
    optimizer = make(model.parameters())
    step = trainer(model, optimizer)
    if options:
        step = treadle.compile(step, model=model, optimizer=optimizer, **options)
    return [step(*batch).item() for batch in batches], optimizer, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_learns_as_eagers_does(name):
    model, batches = task()
    ours, optimizer, step = trained(
        OPTIMIZERS[name], batches, copy.deepcopy(model), optimizer_state="8bit"
    )
    theirs, _, _ = trained(OPTIMIZERS[name], batches, model)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert sum(ours[-30:]) == pytest.approx(sum(theirs[-30:]), rel=0.02)
    assert sum(theirs[-30:]) < 0.8 * sum(theirs[:30])
    kinds = [type(v) for entry in optimizer.state.values() for v in entry.values()]
    assert EightBitState in kinds
    assert not step.recompiles


@pytest.mark.parametrize(
    ("make", "coded"),
    [
        (lambda p: torch.optim.Muon(p, lr=2e-2), {"momentum_buffer"}),
        (
            lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
            {"momentum_buffer"},
        ),
    ],
    ids=["muon", "centered"],
)
def test_matrices_and_differences_learn_as_eagers_do(make, coded):
    """Muon looks at whole matrices; a centred average is a difference of two, which stay whole."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False)
    start, truth = nn.Sequential(*layers), torch.randn(64, 64) / 8
    batches = torch.randn(60, 32, 64)
    means = []
    for kept in (None, "8bit"):
        model = copy.deepcopy(start)
        optimizer = make(model.parameters())
        step = regression(model, optimizer, target=lambda x: x @ truth)
        if kept is not None:
            step = treadle.compile(step, model=model, optimizer=optimizer, optimizer_state=kept)
        losses = [step(batch).item() for batch in batches]
        assert losses[-1] < 0.5 * losses[0]
        means.append(sum(losses[-10:]))
    assert means[1] == pytest.approx(means[0], rel=0.02)
    state = optimizer.state[model[0].weight]
    assert {name for name, value in state.items() if isinstance(value, EightBitState)} == coded


def test_state_has_a_quarter_of_the_bytes():
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024)

    peaks = {}
    for kept in ("default", "8bit"):
        optimizer = torch.optim.AdamW(model.parameters())
        train_step = regression(model, optimizer)
        step = treadle.compile(train_step, model=model, optimizer=optimizer, optimizer_state=kept)
        for _ in range(2):
            step(torch.randn(8, 1024))
        peaks[kept] = step.measure(torch.randn(8, 1024)).peak_bytes
        assert peaks[kept] <= step.summary().peak_predicted_bytes
    saved = peaks["default"] - peaks["8bit"]
    codes = 2 * 1024 * 1024
    assert 3 * codes - codes // 16 <= saved <= 3 * codes


def test_small_and_odd_tensors_keep_their_state():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 67), nn.Linear(67, 61))
    batches = [(torch.randn(4, 64), torch.randint(61, (4,)))]
    _, optimizer, step = trained(OPTIMIZERS["adamw"], batches, model, optimizer_state="8bit")
    assert "optimizer state: 4 of 12 tensors in 8 bits" in step.explain()
    kept = {p: type(optimizer.state[p]["exp_avg"]) for p in model.parameters()}
    assert [kept[layer.weight] for layer in model] == [EightBitState, EightBitState, torch.Tensor]
    assert all(kept[layer.bias] is torch.Tensor for layer in model)


def test_parameters_of_half_precision():
    torch.manual_seed(0)
    dtype = torch.bfloat16
    model = nn.Linear(64, 64, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    train_step = regression(model, optimizer, target=lambda x: x)
    step = treadle.compile(train_step, model=model, optimizer=optimizer, optimizer_state="8bit")
    losses = [step(torch.randn(32, 64, dtype=dtype)).item() for _ in range(100)]
    assert losses[-1] < 0.9 * losses[0]
    assert optimizer.state[model.weight]["exp_avg"].dtype is dtype


def test_a_skipped_update_leaves_the_codes():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train_step(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(train_step, model=model, optimizer=optimizer, optimizer_state="8bit")
    step(torch.randn(8, 64))
    before = optimizer.state[model.weight]["exp_avg"].codes.clone()
    step(torch.full((8, 64), math.inf))
    assert torch.equal(optimizer.state[model.weight]["exp_avg"].codes, before)
    step(torch.randn(8, 64))
    assert not torch.equal(optimizer.state[model.weight]["exp_avg"].codes, before)


def test_numbers_of_a_budget_are_those_without():
    model, batches = task()
    one, _, _ = trained(
        OPTIMIZERS["adamw"], batches[:8], copy.deepcopy(model), optimizer_state="8bit"
    )
    other, _, _ = trained(
        OPTIMIZERS["adamw"], batches[:8], model, optimizer_state="8bit", memory=0.0
    )
    assert one == pytest.approx(other, abs=1e-5)


# -- who else sees the state


def test_a_checkpoint_is_one_of_pytorch(tmp_path):
    model, batches = task()
    _, optimizer, step = trained(OPTIMIZERS["adamw"], batches[:5], model, optimizer_state="8bit")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    tensors = [v for entry in saved["state"].values() for v in entry.values()]
    assert all(type(value) is torch.Tensor for value in tensors)
    weight = model[0].weight
    assert torch.equal(saved["state"][0]["exp_avg"], optimizer.state[weight]["exp_avg"].decoded())

    eager = copy.deepcopy(model)
    resumed = torch.optim.AdamW(eager.parameters(), lr=2e-3)
    resumed.load_state_dict(saved)
    plain = trainer(eager, resumed)
    again = copy.deepcopy(model)
    third = torch.optim.AdamW(again.parameters(), lr=2e-3)
    third.load_state_dict(copy.deepcopy(saved))
    compiled = treadle.compile(
        trainer(again, third), model=again, optimizer=third, optimizer_state="8bit"
    )
    for batch in batches[5:9]:
        ours = step(*batch)
        torch.testing.assert_close(ours, compiled(*batch))  # numbers of codes have the same codes
        torch.testing.assert_close(ours, plain(*batch), rtol=0.02, atol=0.0)
    assert isinstance(third.state[again[0].weight]["exp_avg"], EightBitState)


def test_state_of_an_eager_run_is_taken_over_and_given_back():
    model, batches = task()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    eager = trainer(model, optimizer)
    losses = [eager(*batch).item() for batch in batches[:10]]
    step = treadle.compile(eager, model=model, optimizer=optimizer, optimizer_state="8bit")
    losses += [step(*batch).item() for batch in batches[10:60]]
    assert isinstance(optimizer.state[model[0].weight]["exp_avg"], EightBitState)
    losses += [eager(*batch).item() for batch in batches[60:70]]  # PyTorch's code on the codes
    assert isinstance(optimizer.state[model[0].weight]["exp_avg"], EightBitState)
    plain = treadle.compile(eager, model=model, optimizer=optimizer)
    losses += [plain(*batch).item() for batch in batches[70:]]
    assert type(optimizer.state[model[0].weight]["exp_avg"]) is torch.Tensor
    whole, _, _ = trained(OPTIMIZERS["adamw"], batches, task()[0])
    assert sum(losses[-30:]) == pytest.approx(sum(whole[-30:]), rel=0.03)


@pytest.mark.parametrize("foreach", [False, True])
def test_pytorch_steps_on_codes(foreach):
    model, batches = task()
    _, optimizer, _ = trained(OPTIMIZERS["adamw"], batches[:5], model, optimizer_state="8bit")
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(other.parameters(), lr=2e-3, foreach=foreach)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for entry in plain.state.values():
        for name, value in entry.items():
            entry[name] = value.decoded() if isinstance(value, EightBitState) else value
    optimizer.param_groups[0]["foreach"] = foreach
    trainer(model, optimizer)(*batches[5])
    trainer(other, plain)(*batches[5])
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)
    one, two = (o.state[m[0].weight] for o, m in ((optimizer, model), (plain, other)))
    assert isinstance(one["exp_avg"], EightBitState)
    for name in ("exp_avg", "exp_avg_sq"):
        top = two[name].abs().max()
        torch.testing.assert_close(one[name].decoded(), two[name], rtol=0.1, atol=0.02 * top.item())


def test_it_computes_and_copies_as_a_tensor():
    model, batches = task()
    _, optimizer, _ = trained(OPTIMIZERS["adamw"], batches[:3], model, optimizer_state="8bit")
    state = optimizer.state[model[0].weight]["exp_avg"]
    numbers = state.decoded()
    assert torch.equal(state + 1, numbers + 1)
    assert state.norm() == numbers.norm()
    assert state.shape == numbers.shape
    assert torch.equal(state.to("cpu", torch.float64), numbers.double())
    assert "EightBitState" in repr(state)
    for copied in (copy.deepcopy(state), state.clone(), state.detach()):
        assert isinstance(copied, EightBitState)
        assert torch.equal(copied.decoded(), numbers)
    before = copy.deepcopy(state)
    state.mul_(0.5)
    assert torch.equal(state.codes, before.codes)
    assert torch.equal(state.decoded(), numbers * 0.5)
    assert torch.equal(before.decoded(), numbers)
    state.zero_()
    assert not state.decoded().any()


def test_steps_that_read_the_state_are_refused():
    model, batches = task()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train = trainer(model, optimizer)

    def step(x, y):
        loss = train(x, y)
        return loss, optimizer.state[model[0].weight]["exp_avg"].norm()

    compiled = treadle.compile(step, model=model, optimizer=optimizer, optimizer_state="8bit")
    with pytest.raises(CaptureError, match="8 bits") as error:
        compiled(*batches[0])
    assert error.value.code == "TR-125"


def test_the_option_has_two_values():
    with pytest.raises(TreadleError, match="4bit") as error:
        treadle.Options(optimizer_state="4bit")
    assert "optimizer-state.md" in str(error.value)


def test_a_plan_needs_no_state():
    with torch.device("meta"):
        model, batch = nn.Linear(2048, 2048), torch.empty(16, 2048)
    optimizer = torch.optim.AdamW(model.parameters())

    train_step = regression(model, optimizer)

    def peak(kept):
        options = treadle.Options(optimizer_state=kept)
        found = treadle.plan(
            train_step, batch, model=model, optimizer=optimizer, device="h200", options=options
        )
        return found.peak_bytes

    assert peak("default") - peak("8bit") > 5.8 * 2048 * 2048


def test_an_update_that_is_carried_writes_the_same_codes():
    states = []
    for options in (None, treadle.Options(carry=treadle.Carry("2.*"))):
        model, batches = task()
        _, optimizer, step = trained(
            OPTIMIZERS["adamw"], batches[:6], model, optimizer_state="8bit", options=options
        )
        step.flush()
        state = optimizer.state[model[2].weight]
        states.append([state["exp_avg"].decoded(), state["exp_avg_sq"].decoded()])
    for carried, plain in zip(*states, strict=True):
        assert torch.equal(carried, plain)


SCRIPT = """
import torch, treadle
from torch import nn

torch.manual_seed(0)
model = nn.Linear(64, 128)
optimizer = torch.optim.AdamW(model.parameters())

def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

step = treadle.compile(train_step, model=model, optimizer=optimizer, optimizer_state="8bit")
losses = [step(torch.randn(8, 64)).item() for _ in range(3)]
print("capture" in step.compiled.seconds, losses)
"""


def test_a_second_process_traces_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    place = os.environ | {"TREADLE_CACHE_DIR": str(tmp_path / "cache")}
    runs = [
        subprocess.run(
            [sys.executable, script], env=place, capture_output=True, text=True, check=True
        ).stdout.split(" ", 1)
        for _ in range(2)
    ]
    assert [traced for traced, _ in runs] == ["True", "False"]
    assert runs[0][1] == runs[1][1]
