"""What could be mistaken about an optimizer: subclasses, hooks, counters that come apart."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import treadle


class Net(nn.Module):
    """A layer and a prime number of gains."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.gain = nn.Parameter(torch.randn(7))

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.gain


def training(model, optimizer, set_to_none=True):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return loss.detach()

    return step


def pair(kind, dtype=torch.float32, **options):
    """A compiled step and eager's on a copy: ``(step, model, optimizer)`` of each."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    twin = copy.deepcopy(model)
    optimizer, reference = kind(model.parameters(), **options), kind(twin.parameters(), **options)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    return (step, model, optimizer), (training(twin, reference), twin, reference)


def follow(ours, theirs, steps, **close):
    (step, model, optimizer), (eager, twin, reference) = ours, theirs
    dtype = model.gain.dtype
    for _ in range(steps):
        x = torch.randn(4, 5, dtype=dtype)
        step(x)
        eager(x)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, **close)
        state = reference.state[other]
        assert optimizer.state[mine].keys() == state.keys()
        for name, value in state.items():
            found = optimizer.state[mine][name]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)


class Named(torch.optim.AdamW):
    """AdamW is a subclass of Adam with the same ``step``: the nearest base serves this."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Named, {}), (torch.optim.Adam, {"decoupled_weight_decay": True}), (torch.optim.Adam, {})],
)
def test_weight_decay_is_decoupled_where_eager_decouples_it(kind, options):
    ours, theirs = pair(kind, lr=0.01, weight_decay=0.5, **options)
    follow(ours, theirs, 10, rtol=1e-4, atol=1e-6)


class Deeper(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        raise ArithmeticError("its own step")


class Deepest(Deeper):
    pass


def test_a_step_overridden_between_is_not_the_base_s():
    model = Net()
    optimizer = Deepest(model.parameters(), lr=0.1)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    with pytest.raises(ArithmeticError, match="its own step"):
        step(torch.randn(4, 5))


@pytest.mark.parametrize("where", ["before", "after", "everywhere"])
def test_hooks_around_step_are_called_by_an_eager_step(where):
    ours, theirs = pair(torch.optim.AdamW, lr=0.01)
    follow(ours, theirs, 2, rtol=1e-5, atol=1e-6)
    step, _, optimizer = ours
    called = []
    add = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "everywhere": register_optimizer_step_post_hook,
    }[where]
    handle = add(lambda *_: called.append(1))
    try:
        step(torch.randn(4, 5))
        assert called == [1]
        assert "TR-114" in step.explain()
    finally:
        handle.remove()
    step(torch.randn(4, 5))  # the hook is gone: in the graph again
    assert called == [1]
    assert "TR-114" not in step.explain()


def test_a_differentiable_update_is_refused():
    (step, _, _), _ = pair(torch.optim.Adam, lr=0.01, differentiable=True)
    with pytest.raises(treadle.CaptureError, match=r"TR-114.*differentiable"):
        step(torch.randn(4, 5))


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
def test_flags_of_eager_s_kernels_change_nothing(flag):
    if flag == "capturable":  # eager refuses it on CPUs: a checkpoint may bring it all the same
        ours, theirs = pair(torch.optim.AdamW, lr=0.01)
        ours[2].param_groups[0]["capturable"] = True
    else:
        ours, theirs = pair(torch.optim.AdamW, lr=0.01, **{flag: True})
    follow(ours, theirs, 5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_freezing_for_a_while_parts_the_counters(kind):
    options = {"lr": 0.01, "momentum": 0.9, "dampening": 0.3} if kind is torch.optim.SGD else {}
    ours, theirs = pair(kind, **options)
    for frozen, steps in ((True, 2), (False, 3), (True, 4), (False, 3)):
        for model in (ours[1], theirs[1]):
            model.gain.requires_grad_(not frozen)
        follow(ours, theirs, steps, rtol=1e-4, atol=1e-6) if not frozen else bare(ours, theirs)
    counts = {float(each.get("step", 0)) for each in ours[2].state.values()}
    assert len(counts) == (1 if kind is torch.optim.SGD else 2)


def bare(ours, theirs):
    x = torch.randn(4, 5)
    torch.testing.assert_close(ours[0](x), theirs[0](x), rtol=1e-4, atol=1e-6)


def test_counters_that_came_apart_compile_again_and_say_so():
    ours, theirs = pair(torch.optim.AdamW, lr=0.05)
    follow(ours, theirs, 2, rtol=1e-4, atol=1e-6)
    for _, model, optimizer in (ours, theirs):
        optimizer.state[model.gain]["step"].fill_(40.0)  # as from another run's checkpoint
    follow(ours, theirs, 3, rtol=1e-4, atol=1e-6)
    assert ours[0].recompiles == ["the step counts of an optimizer's parameters differ now"]


def test_a_group_added_later_is_stepped():
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    made = []
    for each in (model, twin):
        made.append(torch.optim.AdamW(each.layer.parameters(), lr=0.01))
    step = treadle.compile(training(model, made[0], False), model=model, optimizer=made[0])
    eager = training(twin, made[1], False)
    for number in range(6):
        if number == 3:
            made[0].add_param_group({"params": [model.gain], "lr": 0.1})
            made[1].add_param_group({"params": [twin.gain], "lr": 0.1})
        x = torch.randn(4, 5)
        torch.testing.assert_close(step(x), eager(x), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.gain, twin.gain, rtol=1e-4, atol=1e-6)
    assert "an optimizer's options or parameter groups changed" in step.recompiles


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_bfloat16_parameters_stay_near_eager_s(kind):
    """Eager rounds to eight bits after every operation, the kernel once: a few units apart."""
    ours, theirs = pair(kind, torch.bfloat16, lr=0.01)
    follow(ours, theirs, 10, rtol=3e-2, atol=3e-2)


def test_the_rate_may_be_a_tensor():
    (step, model, optimizer), (eager, twin, reference) = pair(
        torch.optim.AdamW, lr=torch.tensor(0.02)
    )
    for _ in range(4):
        x = torch.randn(4, 5)
        step(x)
        eager(x)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        reference.param_groups[0]["lr"].mul_(0.5)
    torch.testing.assert_close(model.gain, twin.gain, rtol=1e-4, atol=1e-6)
    assert step.recompiles == []


TEXTS = [
    ("SGD", "lr", "0.1"),
    ("SGD", "momentum", "0.9"),
    ("AdamW", "betas", ("0.9", 0.99)),
    ("Adam", "eps", None),
    ("RMSprop", "lr", "0.1"),
    ("Rprop", "etas", ("0.5", 1.2)),
    ("ASGD", "lr", b"0.1"),
]


@pytest.mark.parametrize("late", [False, True], ids=["at first", "between calls"])
@pytest.mark.parametrize(("kind", "name", "value"), TEXTS, ids=lambda each: str(each))
def test_a_hyper_parameter_that_is_text_is_no_number(kind, name, value, late):
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    for _ in range(2 * late):
        compiled(torch.randn(4, 3))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(TypeError, match=rf"TR-132.* has {name}=.*not a number[^$]*compiled\(torch"):
        compiled(torch.randn(4, 3))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    optimizer.param_groups[0][name] = good
    compiled(torch.randn(4, 3))
