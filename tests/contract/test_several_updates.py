"""Several optimizer steps in one call: counters, state and hyper-parameters as eager has them."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.nn import functional as F

import treadle
from contract.contract_help import beside_eager
from treadle.options import Options

LIBRARY = Options(codegen=False)
"""What is tested here is decided before kernels are."""

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, centered=True, momentum=0.5),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


def net():
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_updates_in_one_call(name):
    def make():
        model = nn.Linear(4, 3)  # a matrix and a vector: Adafactor keeps other state of each
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x, y):
            losses = []
            for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(a), b)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses)

        return step, model, optimizer

    step = beside_eager(make, batch, steps=4, options=LIBRARY)
    assert len(step.recompiles) == 0


def test_a_schedule_between_calls_reaches_every_update():
    def make():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x, y):
            for _ in range(2):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()  # gradients add up
            return optimizer.zero_grad()

        model.rate = lambda number: optimizer.param_groups[0].update(lr=1e-2 / (1 + number))
        return step, model, optimizer

    beside_eager(make, batch, between=lambda n, model: model.rate(n), options=LIBRARY)


def test_parameters_that_step_more_often_than_others():
    def make():
        model = nn.ModuleList([net(), net()])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(x, y):
            for part in (0, 1, 1):
                optimizer.zero_grad()
                F.cross_entropy(model[part](x), y).backward()
                optimizer.step()
            optimizer.zero_grad()

        return step, model, optimizer

    step = beside_eager(make, batch, options=LIBRARY)
    assert len(step.recompiles) == 1  # when their counters part


def test_critic_and_generator_take_turns():
    def make():
        g, d = net(), nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))
        opt_g = torch.optim.Adam(g.parameters(), lr=1e-2, betas=(0.5, 0.9))
        opt_d = torch.optim.RMSprop(d.parameters(), lr=1e-2)

        def step(x, y):
            real = F.one_hot(y, 3).float()
            for _ in range(2):
                fake = g(x).detach()
                share = torch.rand(len(x), 1)
                between = (share * real + (1 - share) * fake).requires_grad_()
                (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
                loss = d(fake).mean() - d(real).mean() + (slope.norm(2, 1) - 1).square().mean()
                opt_d.zero_grad()
                loss.backward()
                opt_d.step()
            opt_g.zero_grad()
            (-d(g(x)).mean()).backward()
            opt_g.step()
            return loss.detach()

        return step, {"g": g, "d": d}, [opt_g, opt_d]

    beside_eager(make, batch, options=LIBRARY)


def test_a_graph_that_is_kept_goes_backward_twice():
    def make():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            out = model(x)
            loss, penalty = F.cross_entropy(out, y), out.square().mean()
            penalty.backward(retain_graph=True)
            optimizer.step()
            return loss.detach(), penalty.detach()

        return step, model, optimizer

    beside_eager(make, batch, options=LIBRARY)


def test_without_updates_none_of_them_happens():
    model = net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x, y):
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)(
        *batch(0), update=False
    )
    for _ in range(2):
        F.cross_entropy(twin(batch(0)[0]), batch(0)[1]).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert not optimizer.state


def test_a_hyper_parameter_that_changes_between_updates():
    def make():
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            for rate in (0.1, 0.2, 0.05):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            return loss.detach()

        return step, model, optimizer

    step = beside_eager(make, batch, steps=3, options=LIBRARY)
    assert not step.recompiles


class Plain(torch.optim.Optimizer):
    """An optimizer without a form, which looks at values."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.norm().item() < 1e9:
                parameter.data.sub_(0.1 * parameter.grad)


def test_an_optimizer_outside_of_the_graph_steps_once():
    model = net()
    optimizer = Plain(model.parameters())

    def step(x, y):
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with pytest.raises(treadle.CaptureError, match=r"TR-109") as caught:
        treadle.compile(step, model=model, optimizer=optimizer)(*batch(0))
    assert "optimizer.step()" in caught.value.where


def loss_of(model, params, x, y):
    return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])


def by_grad(model, params, x, y):
    return vmap(grad(lambda *a: loss_of(model, *a)), (None, 0, 0))(params, x, y)


def by_grad_and_value(model, params, x, y):
    found, _ = vmap(grad_and_value(lambda *a: loss_of(model, *a)), (None, 0, 0))(params, x, y)
    return found


def by_jacobian(model, params, x, y):
    def losses(params):
        return F.cross_entropy(functional_call(model, params, (x,)), y, reduction="none")

    return jacrev(losses)(params)


@pytest.mark.parametrize("how", [by_grad, by_grad_and_value, by_jacobian])
@pytest.mark.parametrize("detached", [False, True])
def test_a_gradient_for_each_row(how, detached):
    """DP-SGD: each row's gradient is clipped, noise is added, then the optimizer steps."""

    def make():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            params = {n: p.detach() if detached else p for n, p in model.named_parameters()}
            each = how(model, params, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            share = (0.5 / norms).clamp(max=1.0)
            for name, p in model.named_parameters():
                total = torch.einsum("n...,n->...", each[name], share).detach()
                p.grad = (total + 0.1 * torch.randn_like(total)) / len(x)
            optimizer.step()
            optimizer.zero_grad()
            return norms.detach()

        return step, model, optimizer

    beside_eager(make, batch, options=LIBRARY)


def test_an_inner_step_by_functional_gradients():
    def make():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(x, y):
            start = dict(model.named_parameters())

            def inner(params):
                return F.cross_entropy(functional_call(model, params, (x,)), y)

            slopes, first = grad_and_value(inner)(start)
            fast = {name: value - 0.1 * slopes[name] for name, value in start.items()}
            loss = inner(fast)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), first.detach()

        return step, model, optimizer

    beside_eager(make, batch, options=LIBRARY)


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_parameter_that_joins_at_a_later_step_is_updated_once(name, cleared):
    """The second layer has no gradient at the first step of each call, or the first one of none."""
    makes = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
        "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    }
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = copy.deepcopy(net)

    def step_of(model, optimizer):
        first, second = model

        def step(x, y):
            loss = (first(x) - y).square().mean()
            loss.backward()
            if cleared:
                first.bias.grad = None
            optimizer.step()
            loss = loss + (second(first(x)) - y).square().mean()
            (second(first(x)) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    ours, theirs = makes[name](net.parameters()), makes[name](twin.parameters())
    step, eager = (
        treadle.compile(step_of(net, ours), model=net, optimizer=ours),
        step_of(twin, theirs),
    )
    for _ in range(3):
        x, y = torch.randn(5, 4), torch.randn(5, 4)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-6, atol=1e-6)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_parameter_that_several_optimizers_update_has_state_in_each(resumes):
    """A shared embedding is in the optimizer of the encoder and in that of the decoder."""

    def make():
        embedding = nn.Embedding(10, 4)
        encoder = nn.ModuleList([embedding, nn.Linear(4, 4)])
        decoder = nn.ModuleList([embedding, nn.Linear(4, 3)])
        first = torch.optim.Adam(encoder.parameters(), lr=1e-2)
        second = torch.optim.Adam(decoder.parameters(), lr=3e-2, betas=(0.5, 0.9))

        def step(x, y):
            first.zero_grad()
            second.zero_grad()
            hidden = encoder[1](embedding(x)).tanh()
            loss = F.cross_entropy(decoder[1](hidden + embedding(x)), y)
            loss.backward()
            first.step()
            second.step()
            return loss.detach()

        for number in range(2 if resumes else 0):
            step(*words(10 + number))
        return step, [encoder, decoder], [first, second]

    def words(number):
        generator = torch.Generator().manual_seed(number)
        return torch.randint(10, (6,), generator=generator), batch(number)[1]

    step = beside_eager(make, words, options=LIBRARY)
    assert len(step.recompiles) == 0
