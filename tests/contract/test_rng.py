"""Which random numbers a step draws: eager's, or those that need no memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import training


class Deep(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(F.dropout(x, 0.2, self.training))), 0.1, self.training)
        return x


def made(**options):
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    train = training(lambda x: model(x).square().mean(), optimizer)
    return model, train, treadle.compile(train, model=model, optimizer=optimizer, **options)


def losses(step, seed):
    torch.manual_seed(seed)
    return [step(torch.randn(512, 64)).item() for _ in range(4)]


def test_the_default_is_eager_s_stream():
    _, _, step = made()
    _, eager, _ = made()
    torch.testing.assert_close(losses(step, 3), losses(eager, 3), rtol=1e-5, atol=0)


def test_counted_masks_follow_the_seed_and_change_from_step_to_step():
    first, again, other = (losses(made(rng="counter")[2], seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    _, eager, _ = made()
    assert first != losses(eager, 3)
    _, _, step = made(rng="counter")
    x = torch.ones(512, 64)
    assert step(x) != step(x)


def test_the_generator_is_where_resuming_finds_it():
    """The state after two steps gives the third step's masks."""
    model, _, step = made(rng="counter")
    x = torch.randn(512, 64)
    step(x)
    step(x)
    state, kept = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    third = step(x)
    again, _, resumed = made(rng="counter")
    again.load_state_dict(kept)
    torch.set_rng_state(state)
    assert resumed(x) == third


@pytest.mark.parametrize("memory", [None, 1.0, 0.5, 0.0])
def test_dropped_elements_have_no_gradient_at_any_budget(memory):
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(300, 101))

        def forward(self):
            y = F.dropout(self.w, 0.4)
            return y, (F.gelu(y) * torch.sin(y) + y).sum()

    model = Drop()

    def run():
        y, loss = model()
        loss.backward()
        return y.detach()

    step = treadle.compile(run, model=model, memory=memory, rng="counter")
    for _ in range(3):
        model.w.grad = None
        kept = step() != 0
        assert torch.equal(model.w.grad != 0, kept)
        assert abs(kept.float().mean() - 0.6) < 0.02


def test_counted_masks_need_less_memory():
    x = torch.randn(512, 64)
    peaks = {}
    for rng in ("eager", "counter"):
        _, _, step = made(rng=rng)
        step(x)
        peaks[rng] = step.measure(x).peak_bytes
    masks = 12 * 512 * 64  # one byte an element
    assert peaks["counter"] < peaks["eager"] - masks / 2


def test_dynamic_sizes():
    torch.manual_seed(0)
    model = Deep()
    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(2, 600))

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step = treadle.compile(train, model=model, shapes=shapes, rng="counter")
    fixed = treadle.compile(train, model=model, rng="counter")
    for rows in (512, 77, 3):
        x, found = torch.randn(rows, 64), []
        for each in (step, fixed):
            model.zero_grad()
            torch.manual_seed(rows)
            found.append(each(x))
        torch.testing.assert_close(*found)


def test_an_unknown_value_is_refused():
    with pytest.raises(treadle.TreadleError, match=r"TR-001.*not one of eager, counter"):
        made(rng="fast")


def test_the_users_generator_is_drawn_from_where_sizes_that_nothing_uses_are_traced():
    """Sizes that a trace computes and drops moved the place at which a draw was known by."""
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(5)
        step = drawing_behind_gradients(model, generator)
        if compiled:
            step = treadle.compile(step, model=model)
        found = [step(torch.ones(n, 1, 4, 4)) for n in (8, 7, 9)]
        outcomes.append([*(part for pair in found for part in pair), generator.get_state()])
    torch.testing.assert_close(*outcomes)


def drawing_behind_gradients(model, generator):
    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    def step(x):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        return each["0.weight"].sum(), torch.randn(7, generator=generator)

    return step


DRAWN = {
    "randn": lambda x, g: torch.randn(x.shape, generator=g),
    "rand": lambda x, g: torch.rand(len(x), 3, generator=g, dtype=torch.float64),
    "randint": lambda x, g: torch.randint(5, (len(x),), generator=g)[:, None],
    "randint, two": lambda x, g: torch.randint(-2, 5, x.shape, generator=g),
    "randint below": lambda x, g: x[torch.randint(len(x), (len(x),), generator=g)],
    "randint between": lambda x, g: x[torch.randint(1, len(x), (1,), generator=g)],
    "randint, PyTorch's own": lambda x, g: x[torch.randint(0, len(x), (1,))],
    "randperm": lambda x, g: x[torch.randperm(len(x), generator=g)],
    "randperm, a part": lambda x, g: x[torch.randperm(len(x), generator=g)[:2]].sum(0),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_draws_of_any_size_from_the_users_generator_share_a_compile(draw):
    """PyTorch has no type of them where the size is no number yet: each size was compiled by
    itself, for a text of its sources."""
    model, generator = nn.Linear(3, 3), torch.Generator().manual_seed(5)
    step = treadle.compile(lambda x: model(x) + draw(x, generator), model=model)
    sizes, outcomes = (8, 7, 5, 6), []
    for function in (lambda x: model(x) + draw(x, generator), step):
        generator.manual_seed(5)
        found = [function(torch.ones(n, 3)) for n in sizes]
        outcomes.append([*found, generator.get_state()])
    torch.testing.assert_close(*outcomes)
    assert len(step.recompiles) == 1
