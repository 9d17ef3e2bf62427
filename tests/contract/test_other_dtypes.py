"""``model.double()``, ``half()``, ``to(dtype)`` between two calls of a compiled step, beside eager:
parameters, buffers, gradients and what the optimizer keeps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import assert_same_state
from treadle import Options

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-2),
}
LERP = {  # those whose first moment is ``lerp_``, which takes one dtype
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 6), nn.Linear(6, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens):
        self.seen += 1
        h = self.norm(self.layer(self.table(tokens)))
        return self.head(torch.tanh(h).to(self.head.weight.dtype)).float()


def to(dtype):
    return lambda model, optimizer: model.to(dtype)


def convert(model, optimizer):
    """What the optimizer keeps gets the dtype of the parameters."""
    optimizer.load_state_dict(optimizer.state_dict())


def head_alone(model, optimizer):
    model.head.double()
    convert(model, optimizer)


def both(dtype):
    def change(model, optimizer):
        model.to(dtype)
        convert(model, optimizer)

    return change


NOTHING = None
CHANGES = {
    "there and back": (to(torch.float64), NOTHING, to(torch.float32), NOTHING),
    "the state later": (to(torch.float64), convert, to(torch.float32), convert, NOTHING),
    "with the state": (both(torch.float64), NOTHING, both(torch.float32), both(torch.float64)),
    "a part": (head_alone, NOTHING),
    "bfloat16": (both(torch.bfloat16), NOTHING),
}


def make(optimizer_of, clears):
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    optimizers = [optimizer_of(list(each.parameters())) for each in (ours, theirs)]

    def step_of(model, optimizer):
        def step(tokens, labels):
            loss = F.cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()
            return loss.detach()

        return step

    mine, eager = (step_of(*each) for each in zip((ours, theirs), optimizers, strict=True))
    options = Options(codegen=False)
    step = treadle.compile(mine, model=ours, optimizer=optimizers[0], options=options)
    return step, eager, (ours, optimizers[0]), (theirs, optimizers[1])


CASES = [("momentum", name, clears) for name in CHANGES for clears in (True, False)]


@pytest.mark.parametrize(
    ("optimizer", "name", "clears"), [*CASES, ("adam", "with the state", True)]
)
def test_steps_after_it_equal_eager(optimizer, name, clears):
    step, eager, ours, theirs = make(OPTIMIZERS[optimizer], clears)
    near = {"rtol": 1e-5, "atol": 1e-5} if name != "bfloat16" else {"rtol": 5e-2, "atol": 2e-2}
    for change in (NOTHING, NOTHING, *CHANGES[name]):
        if change is not None:
            change(*ours)
            change(*theirs)
        batch = torch.randint(7, (5,)), torch.randint(3, (5,))
        torch.testing.assert_close(step(*batch), eager(*batch), **near)
        assert_same_state(ours, theirs, **near)


def test_recompiles_say_what_changed():
    step, _, (model, optimizer), _ = make(OPTIMIZERS["momentum"], clears=True)
    batch = torch.randint(7, (5,)), torch.randint(3, (5,))
    step(*batch)
    model.double()
    step(*batch)
    convert(model, optimizer)
    step(*batch)
    step(*batch)
    assert step.recompiles == [
        "seen: dtype torch.float32 became torch.float64",
        "sgd.momentum_buffer[table.weight]: dtype torch.float32 became torch.float64",
    ]


@pytest.mark.parametrize("kind", LERP)
def test_state_that_eager_refuses_is_refused_and_nothing_changes(kind):
    step, eager, ours, theirs = make(LERP[kind], clears=True)
    batch = torch.randint(7, (5,)), torch.randint(3, (5,))
    step(*batch)
    eager(*batch)
    for model, _ in (ours, theirs):
        model.double()
    before = copy.deepcopy(ours[0].state_dict())
    with pytest.raises(RuntimeError, match="expected dtype"):
        eager(*batch)
    theirs[1].zero_grad()
    with pytest.raises(treadle.CaptureError, match="TR-126"):
        step(*batch)
    for name, value in ours[0].state_dict().items():
        assert torch.equal(value, before[name]), name
    theirs[0].load_state_dict(before)
    for each in (ours, theirs):
        convert(*each)
    torch.testing.assert_close(step(*batch), eager(*batch))


def test_gradients_and_state_in_another_order_of_memory():
    """Those that are there are inputs, in the order that they are in."""
    torch.manual_seed(0)
    ours = nn.Conv2d(3, 4, 3)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]

    def step_of(model, optimizer):
        def step(x):
            model(x).square().mean().backward()
            optimizer.step()

        return step

    options = Options(codegen=False)
    step = treadle.compile(
        step_of(ours, optimizers[0]), model=ours, optimizer=optimizers[0], options=options
    )
    eager = step_of(theirs, optimizers[1])
    for call in range(5):
        if call == 2:
            for model in (ours, theirs):
                model.weight.grad = model.weight.grad.contiguous(memory_format=torch.channels_last)
        if call == 3:
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                state = optimizer.state[model.weight]
                state["momentum_buffer"] = (
                    state["momentum_buffer"]
                    .transpose(0, 3)
                    .clone(memory_format=torch.contiguous_format)
                    .transpose(0, 3)
                )
        x = torch.randn(2, 3, 5, 5)
        step(x)
        eager(x)
        assert_same_state((ours, optimizers[0]), (theirs, optimizers[1]), rtol=1e-5, atol=1e-5)


def test_an_input_that_fits_no_more_begins_nothing():
    """Old gradients, which a step clears when it begins, are there after such a call."""
    step, _, (model, optimizer), _ = make(OPTIMIZERS["momentum"], clears=True)
    batch = torch.randint(7, (5,)), torch.randint(3, (5,))
    step(*batch)
    step(*batch)
    optimizer.state[model.head.bias]["momentum_buffer"] = torch.zeros(5)
    with pytest.raises(treadle.TreadleError) as found:
        step(*batch)
    assert found.value.code != "TR-406"
    optimizer.state[model.head.bias]["momentum_buffer"] = torch.zeros(3)
    step(*batch)
