"""One run becomes one graph: roles, places, what the user holds, what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from treadle.capture.refuse import device_of, named_models, named_optimizers
from treadle.capture.step import capture
from treadle.graph.core.node_info import info
from treadle.graph.core.signature import Role
from treadle.graph.core.verify import verify
from treadle.options import Options


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.body(x) + x)


def make_step(model, optimizer, before_step=lambda: None):
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch(n: int = 9):
    return torch.randn(n, 6), torch.randn(n, 6)


def captured(function, model, optimizer, *args):
    return capture(
        function,
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=args,
        kwargs={},
    )


def compiled_beside_eager(build, *, steps: int = 4, kind=torch.optim.AdamW, make=Net):
    """``build(model, optimizer)`` gives the step; both copies must end up the same."""
    model = make()
    twin = copy.deepcopy(model)
    optimizer, other = (kind(each.parameters(), lr=1e-2) for each in (model, twin))
    step = treadle.compile(build(model, optimizer), model=model, optimizer=optimizer)
    eager = build(twin, other)
    for number in range(steps):
        given = batch()
        torch.manual_seed(number)
        ours = step(*given)
        torch.manual_seed(number)
        torch.testing.assert_close(ours, eager(*given), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return step, model


def test_roles_phases_modules_and_lines():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    found = captured(make_step(model, optimizer), model, optimizer, *batch())
    verify(found.step)
    roles = [entry.role for entry in found.step.signature.inputs]
    assert roles.count(Role.PARAMETER) == 6
    assert roles.count(Role.STATE) == 12
    assert roles.count(Role.BATCH) == 2
    assert Role.SCALAR in roles
    nodes = [node for node in found.step.graph.nodes if node.op == "call_function"]
    assert {info(node).phase for node in nodes} == {"forward", "backward", "optimizer"}
    tanh = next(node for node in nodes if "tanh.default" in str(node.target))
    assert info(tanh).module == "body.1"
    assert __file__ in info(tanh).where or "container.py" not in info(tanh).where
    loss = next(node for node in nodes if "mse_loss.default" in str(node.target))
    assert info(loss).module == ""
    assert "F.mse_loss(model(x), y)" in info(loss).where
    for maker, name in ((tanh, "tanh_backward"), (loss, "mse_loss_backward")):
        gradient = next(node for node in nodes if name in str(node.target))
        assert info(gradient).phase == "backward"
        assert info(gradient).where == info(maker).where
        assert info(gradient).module == info(maker).module


def test_gradients_have_the_lines_of_what_they_are_gradients_of():
    model = nn.Linear(3, 3)

    def step(x):
        y = model(x)
        loss = F.cross_entropy(y, torch.zeros(2, dtype=torch.int64))
        first, _ = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
        (loss + first.square().sum()).backward()
        return loss.detach()

    found = captured(step, model, [], torch.randn(2, 3))
    lines: dict[str, set[str]] = {}
    for node in found.step.graph.nodes:
        if info(node).phase == "backward" and node.op == "call_function":
            lines.setdefault(str(node.target), set()).add(info(node).where.split(": ")[-1])
    line = "loss = F.cross_entropy(y, torch.zeros(2, dtype=torch.int64))"
    assert lines["aten._log_softmax_backward_data.default"] == {line}
    assert "y = model(x)" in lines["aten.mm.default"]


def test_capturing_changes_nothing():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    tensors = [id(p) for p in model.parameters()]
    captured(make_step(model, optimizer), model, optimizer, *(given := batch()))
    assert len(given) == 2
    assert [id(p) for p in model.parameters()] == tensors
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert "step" not in vars(optimizer)
    assert not torch.equal(random, torch.get_rng_state())  # batch() drew; the capture did not
    torch.set_rng_state(random)
    batch()
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    captured(make_step(model, optimizer), model, optimizer, *batch())
    assert torch.equal(after, torch.get_rng_state())


def test_parameters_held_outside_are_the_models():
    """A list made before the step, for clipping and a penalty."""

    def build(model, optimizer):
        held = list(model.parameters())
        weights = [p for p in held if p.ndim > 1]

        def step(x, y):
            loss = F.mse_loss(model(x), y) + 0.1 * sum((w**2).sum() for w in weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(held, 0.05)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    compiled_beside_eager(build, kind=torch.optim.SGD)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_by_norm_and_value(foreach):
    def build(model, optimizer):
        def clip():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)

        return make_step(model, optimizer, clip)

    compiled_beside_eager(build, kind=torch.optim.SGD)


def test_a_moving_average_of_the_weights():
    model, x = Net(), batch()
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    twin, twin_average = copy.deepcopy(model), copy.deepcopy(average)

    def build(model, average, optimizer):
        pairs = list(zip(average.parameters(), model.parameters(), strict=True))

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in pairs:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
            return loss.detach()

        return step

    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = treadle.compile(build(model, average, ours), model=[model, average], optimizer=ours)
    eager = build(twin, twin_average, theirs)
    for _ in range(3):
        torch.testing.assert_close(step(*x), eager(*x))
    for mine, other in zip(average.parameters(), twin_average.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_tied_weights_hooks_custom_functions_and_checkpointing():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * grad * x  # not the true gradient: it must be this one that is used

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.drop = nn.Dropout(0.4)
            self.a.register_forward_hook(lambda m, args, out: out * 1.5)
            self.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))

        def forward(self, x):
            h = checkpoint(lambda t: self.drop(torch.tanh(self.a(t))), x, use_reentrant=False)
            out = Cube.apply(self.b(h))
            out.register_hook(lambda grad: grad * 0.5)
            return out

    compiled_beside_eager(make_step, make=Tied, kind=torch.optim.SGD)


def test_two_models_and_two_optimizers():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = nn.Linear(6, 6), nn.Linear(6, 1)

    pair = Pair()
    twin = copy.deepcopy(pair)

    def build(g, d, opt_g, opt_d):
        def step(x, z):
            fake = g(z)
            loss_d = F.softplus(d(fake.detach())).mean() + F.softplus(-d(x)).mean()
            loss_d.backward()
            opt_d.step()
            opt_d.zero_grad()
            loss_g = F.softplus(-d(fake)).mean()
            loss_g.backward()
            opt_g.step()
            opt_g.zero_grad()
            opt_d.zero_grad()
            return {"g": loss_g.detach(), "d": [loss_d.detach(), "text", 3]}

        return step

    both = [
        (m.g, m.d, torch.optim.Adam(m.g.parameters()), torch.optim.SGD(m.d.parameters(), lr=0.1))
        for m in (pair, twin)
    ]
    g, d, opt_g, opt_d = both[0]
    models, optimizers = {"g": g, "d": d}, {"g": opt_g, "d": opt_d}
    step = treadle.compile(build(*both[0]), model=models, optimizer=optimizers)
    eager = build(*both[1])
    for _ in range(4):
        given = batch()
        ours, theirs = step(*given), eager(*given)
        assert ours["d"][1:] == ["text", 3]
        torch.testing.assert_close(ours["g"], theirs["g"])
        torch.testing.assert_close(ours["d"][0], theirs["d"][0])
    for mine, other in zip(pair.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_gradients_are_left_as_the_users_code_leaves_them():
    def build(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()  # no zero_grad: gradients add up over calls

        return step

    step, model = compiled_beside_eager(build, steps=3, kind=torch.optim.SGD)
    assert all(p.grad is not None for p in model.parameters())
    assert len(step.recompiles) == 1  # the second call has gradients to add to


def test_train_and_eval_are_two_variants():
    step, model = compiled_beside_eager(make_step, kind=torch.optim.SGD)
    model.eval()
    step(*batch())
    assert len(step.recompiles) == 1
    model.train()
    step(*batch())
    assert len(step.recompiles) == 1


def test_python_arguments_are_part_of_the_key():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y, *, scale, name):
        loss = F.mse_loss(model(x), y) * (scale if name == "scaled" else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(train, model=model, optimizer=optimizer)
    x, y = batch()
    losses = [step.prepare(x, y, scale=s, name=n) for s, n in [(2.0, "scaled"), (3.0, "plain")]]
    assert losses[0] is not losses[1]
    assert step.prepare(x, y, scale=2.0, name="scaled") is losses[0]
    assert "scale" in step.recompiles[0] or "name" in step.recompiles[0]


@pytest.mark.parametrize(
    ("spoil", "code", "line"),
    [
        (lambda loss: loss + len(f"{loss:.2f}"), "TR-102", "{loss:.2f}"),
        (lambda loss: loss + COMPUTED.sum(), "TR-110", "COMPUTED.sum()"),
    ],
    ids=["format", "outside"],
)
def test_what_is_refused_names_the_users_line(spoil, code, line):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = spoil(F.mse_loss(model(x), y))
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(treadle.CaptureError, match=code) as caught:
        captured(step, model, optimizer, *batch())
    assert line in caught.value.where
    assert __file__ in caught.value.where
    assert caught.value.remedy
    assert all(p.grad is None for p in model.parameters())
    assert OUTSIDE.grad is None


OUTSIDE = nn.Parameter(torch.randn(3))
COMPUTED = OUTSIDE * 2


def test_an_optimizer_outside_of_the_graph_takes_no_closure():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure(x, y):
        F.mse_loss(model(x), y).backward()
        optimizer.step(lambda: F.mse_loss(model(x), y))

    with pytest.raises(treadle.CaptureError, match="TR-105"):
        captured(closure, model, optimizer, *batch())


def test_wrapped_models_and_strange_arguments_are_refused_by_name():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = nn.DataParallel(model)
    with pytest.raises(treadle.CaptureError, match=r"TR-101.*DataParallel"):
        treadle.compile(lambda: None, model=wrapped, optimizer=optimizer)
    for strange in ("", "model", [model, 3]):
        with pytest.raises(treadle.CaptureError, match="TR-108"):
            treadle.compile(lambda: None, model=strange, optimizer=optimizer)


def test_tensors_the_step_closes_over_are_read_at_every_call():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weight = torch.tensor(2.0)

    def train(x, y):
        loss = F.mse_loss(model(x), y) * weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(train, model=model, optimizer=optimizer)
    given = batch()
    first = step(*given)
    weight.fill_(6.0)
    torch.testing.assert_close(step(*given), 3 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_statistics_and_autocast(dtype):
    def build(model, optimizer):
        def step(x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    model = Net()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin))
    step = treadle.compile(build(model, ours), model=model, optimizer=ours)
    eager = build(twin, theirs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for _ in range(3):
        given = batch()
        torch.testing.assert_close(step(*given), eager(*given), rtol=tolerance, atol=tolerance)
    assert int(model.norm.num_batches_tracked) == 3
    torch.testing.assert_close(
        model.norm.running_var, twin.norm.running_var, rtol=tolerance, atol=tolerance
    )


def test_a_step_without_parameters_is_where_its_buffers_or_its_batch_are():
    plain, held = nn.Identity(), nn.BatchNorm1d(3, affine=False, device="meta")
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert device_of({"": plain}).type == "cpu"
    assert device_of({"": plain}, (1, here)).type == "cpu"
    assert device_of({"": plain}, (1, here, there)).type == "meta"
    assert device_of({"": held}, (here,)).type == "meta"
    assert device_of({"": held, "other": nn.Linear(1, 1)}, (there,)).type == "cpu"


NOTHING = {
    "split": lambda x: torch.split(x, 2),
    "split of nothing": lambda x: torch.split(x, 0),
    "split by sizes": lambda x: torch.split(x, [0, 0]),
    "other dim": lambda x: torch.split(x, 2, 1),
    "negative dim": lambda x: torch.split(x.t(), 2, -1),
    "chunk": lambda x: torch.chunk(x, 3),
    "tensor_split": lambda x: torch.tensor_split(x, 3),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_dim_without_elements_is_cut_as_eager_does(name, tmp_path):
    """PyTorch 2.11 cannot tell the types of some of these."""
    model = nn.Linear(3, 3)

    def evaluate(x):
        pieces = NOTHING[name](x)
        return len(pieces), [model(torch.zeros(1, 3)) + each.sum() for each in pieces]

    step = treadle.compile(evaluate, model=model, options=Options(cache_dir=tmp_path))
    x = torch.ones(0, 3)
    (count, made), (expected, like) = step(x), evaluate(x)
    assert count == expected
    for ours, theirs in zip(made, like, strict=True):
        torch.testing.assert_close(ours, theirs)
