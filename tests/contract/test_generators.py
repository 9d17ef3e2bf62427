"""The user's own generators are followed exactly; seeding within a step is refused."""

import pytest
import torch
from torch import nn

import treadle

PLAIN = treadle.Options(codegen=False, progress=False)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.generator = torch.Generator().manual_seed(5)
        self.deep = [{"generator": torch.Generator().manual_seed(6)}]

    def forward(self, x):
        deep = self.deep[0]["generator"]
        noise = torch.randn(x.shape, generator=self.generator) * torch.rand_like(x)
        return self.linear(x) + noise + torch.rand(3, generator=deep)


def every_kind(x, generator):
    """Operators that take a generator, among draws from the device's own."""
    return [
        torch.rand(3, generator=generator),
        torch.rand(3),
        torch.randn(2, 9, generator=generator),
        torch.randint(0, 9, (3,), generator=generator),
        torch.randperm(5, generator=generator),
        torch.normal(0.0, 1.0, (3,), generator=generator),
        torch.normal(x, 2.0, generator=generator),
        torch.bernoulli(x * 0.5, generator=generator),
        torch.bernoulli(x, 0.4, generator=generator),
        torch.poisson(x, generator=generator),
        torch.multinomial(x, 2, generator=generator),
        torch.empty_like(x.t()).normal_(generator=generator),
        torch.empty_like(x.t()).bernoulli_(0.4, generator=generator),
        torch.empty_like(x).uniform_(generator=generator),
        torch.empty_like(x).exponential_(generator=generator),
        torch.empty_like(x).random_(2, 9, generator=generator),
        nn.init.kaiming_uniform_(torch.empty(4, 3), generator=generator),
        torch.rand(3, generator=torch.default_generator),
        torch.rand(3, generator=None),
    ]


def noisy_step(model, generator):
    def function(x):
        return [model(x).detach(), *every_kind(x, generator)]

    return function


@pytest.mark.parametrize("codegen", [False, True])
def test_the_same_numbers_and_the_same_states(codegen):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, generator = Noisy(), torch.Generator().manual_seed(9)

        step = noisy_step(model, generator)
        if compiled:
            options = treadle.Options(codegen=codegen, progress=False)
            step = treadle.compile(step, model=model, options=options)
        states = [generator, model.generator, model.deep[0]["generator"], torch.default_generator]
        torch.manual_seed(3)
        results = [each for _ in range(3) for each in step(torch.ones(4, 3))]
        found.append((results, [each.get_state() for each in states]))
    (eager, states), (ours, after) = found
    for wanted, got in zip(eager, ours, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, states, after))


def test_another_generator_is_another_generator():
    first, second = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    held = {"generator": first}

    def of_variable(x):
        return x + torch.rand(3, generator=held["generator"])

    def of_argument(x, generator):
        return x + torch.rand(3, generator=generator)

    step = treadle.compile(of_variable, model=nn.Identity(), options=PLAIN)
    other = treadle.compile(of_argument, model=nn.Identity(), options=PLAIN)
    x = torch.zeros(3)
    for generator in (first, second, first):
        held["generator"] = generator
        before = generator.get_state()
        wanted = torch.rand(3, generator=generator)
        generator.set_state(before)
        assert torch.equal(step(x), wanted)
        generator.set_state(before)
        assert torch.equal(other(x, generator), wanted)


def test_verifying_leaves_it_alone_and_failing_leaves_what_eager_leaves():
    generator = torch.Generator().manual_seed(4)

    def function(x):
        noise = torch.rand(3, generator=generator)
        return torch.multinomial(x, 2) + noise.sum()

    step = treadle.compile(function, model=nn.Identity(), options=PLAIN)
    before = generator.get_state()
    assert step.verify([(torch.ones(4),)]) is None
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(RuntimeError, match="probability"):
        step(-torch.ones(4))
    found = generator.get_state()
    generator.set_state(before)
    with pytest.raises(RuntimeError, match="probability"):
        function(-torch.ones(4))
    assert torch.equal(generator.get_state(), found)  # eager has drawn by then


GENERATOR = torch.Generator().manual_seed(9)


def _seeded(x):
    torch.manual_seed(0)
    return torch.rand(3)


def _seeded_after(x):
    y = torch.rand(3)
    torch.seed()
    return y


def _own_seeded(x):
    GENERATOR.manual_seed(9)  # to the state that it has at the first call
    return torch.rand(3, generator=GENERATOR)


def _forked_and_seeded(x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = torch.rand(3)
    return y + torch.rand(3)


def _replayed_otherwise(x):
    state = torch.get_rng_state()
    y = torch.rand(3)
    torch.set_rng_state(state)
    return y.sum() + torch.rand(4)


def _put_back_for_good(x):
    with torch.random.fork_rng():
        return torch.rand(3)


def _returned(x):
    return torch.rand(3), torch.get_rng_state()


def _computed_with(x):
    return GENERATOR.get_state().float().sum() + torch.rand(3, generator=GENERATOR)


SEEDS = [_seeded, _seeded_after, _own_seeded, _forked_and_seeded, _replayed_otherwise]
SEEDS += [_put_back_for_good, _returned, _computed_with]


@pytest.mark.parametrize("function", SEEDS, ids=lambda each: each.__name__)
def test_seeding_and_states_within_a_step_are_refused(function):
    torch.manual_seed(0)
    GENERATOR.manual_seed(9)
    before = torch.get_rng_state(), GENERATOR.get_state()
    step = treadle.compile(function, model=nn.Identity(), options=PLAIN)
    with pytest.raises(treadle.CaptureError, match="TR-120"):
        step(torch.zeros(3))
    after = torch.get_rng_state(), GENERATOR.get_state()
    assert all(map(torch.equal, before, after))


def test_a_generator_made_in_the_step_is_refused():
    def function(x):
        return x + torch.rand(3, generator=torch.Generator().manual_seed(0))

    step = treadle.compile(function, model=nn.Identity(), options=PLAIN)
    with pytest.raises(treadle.CaptureError, match=r"TR-121(.|\n)*pass it as an argument"):
        step(torch.zeros(3))


def test_numbers_drawn_again_from_the_same_state_are_the_same():
    def function(x):
        state = torch.get_rng_state()
        y = torch.nn.functional.dropout(x, 0.5)
        torch.set_rng_state(state)
        return y, torch.nn.functional.dropout(x * 2, 0.5), torch.rand(2)

    step = treadle.compile(function, model=nn.Identity(), options=PLAIN)
    found = []
    for each in (function, step):
        torch.manual_seed(1)
        found.append((*each(torch.ones(20)), torch.get_rng_state()))
    assert all(map(torch.equal, *found))
