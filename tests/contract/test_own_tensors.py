"""The user's own tensors, and views of them, that a step returns or leaves outside: what is written
to one between calls is seen in the other."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

VIEWS = {
    "itself": lambda t: t,
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "row": lambda t: t.detach()[0],
    "part of a row": lambda t: t.detach()[1, 1:],
    "column": lambda t: t.detach()[:, 1],
    "transposed": lambda t: t.detach().t(),
    "flat": lambda t: t.detach().flatten(),
    "every second": lambda t: t.detach().view(-1)[::2],
    "expanded": lambda t: t.detach()[0].expand(2, -1),
    "empty": lambda t: t.detach()[:0],
    "bits": lambda t: t.detach().view(torch.int32),
    "half of the bits": lambda t: t.detach().view(torch.int16)[0, 1::2],  # the upper half of each
    "pairs": lambda t: torch.view_as_complex(t.detach().view(-1)[:4].view(2, 2)),
    "same dtype": lambda t: t.detach().float().contiguous().cpu(),
    "leaf": lambda t: t.detach()[0].requires_grad_(),
    "parameter": lambda t: nn.Parameter(t.detach()[1]),
}
COPIES = {
    "clone": lambda t: t.detach().clone(),
    "other dtype": lambda t: t.detach().double(),
    "contiguous": lambda t: t.detach().t().contiguous(),
    "result": lambda t: t.detach() + 0,
    "chosen": lambda t: t.detach()[[0, 1]],
}


def _state(world, x):
    return world["optimizer"].state[world["model"].weight]["momentum_buffer"]


BASES = {
    "parameter": lambda world, x: world["model"].weight,
    "buffer": lambda world, x: world["model"].seen,
    "argument": lambda world, x: x,
    "global": lambda world, x: world["table"],
    "state": _state,
}


def a_world(make_step, compiled):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.register_buffer("seen", torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world = {"model": model, "optimizer": optimizer, "table": torch.arange(6.0).reshape(2, 3)}
    step = make_step(world)
    if compiled:
        step = treadle.compile(step, model=model, optimizer=optimizer)
    return world, step


def trains(world, x):
    loss = F.mse_loss(world["model"](x), x[:, :2])
    world["optimizer"].zero_grad()
    loss.backward()
    world["optimizer"].step()


def history(base, views, compiled, *, returns):
    """All that is kept, after every call and after writes on both sides between calls."""

    def make_step(world):
        def step(x):
            trains(world, x)
            found = BASES[base](world, x)
            kept = {name: view(found) for name, view in views.items()}
            if returns:
                return kept
            world["kept"] = kept
            return None

        return step

    world, step = a_world(make_step, compiled)
    seen, before = [], {}
    for call in range(4):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(call))
        kept = step(x) or world["kept"]
        owner = BASES[base](world, x)
        with torch.no_grad():
            owner.add_(1)
        for at, (name, view) in enumerate(kept.items()):
            is_shared = view.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
            seen.append((name, is_shared, view is owner, view.requires_grad, view.is_leaf))
            if name not in ("expanded", "bits", "half of the bits"):
                with torch.no_grad():
                    view.mul_(1 + at / 8)
        seen += [each.detach().clone() for each in (owner, *kept.values(), *before.values())]
        before = kept
    if compiled:
        assert len(step.recompiles) == 0, step.recompiles
    return seen


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "left"])
@pytest.mark.parametrize("base", BASES)
def test_views_of_the_users_tensors_are_views_of_them(base, returns):
    views = VIEWS | COPIES
    want = history(base, views, compiled=False, returns=returns)
    found = history(base, views, compiled=True, returns=returns)
    for one, other in zip(found, want, strict=True):
        if isinstance(one, tuple):
            assert one == other
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def both(step, calls=4):
    """What ``step(world, x)`` gives and leaves, eagerly and compiled."""
    found = []
    for compiled in (False, True):

        def make_step(world):
            return functools.partial(step, world)

        world, run = a_world(make_step, compiled)
        world["log"], given = [], []
        for call in range(calls):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(call))
            given.append((x, run(x)))
        found.append((world, given))
    return found


def assert_same(found):
    (one, given), (other, also) = found
    torch.testing.assert_close(also, given)
    torch.testing.assert_close(other["log"], one["log"])
    torch.testing.assert_close(other["model"].state_dict(), one["model"].state_dict())


def test_a_view_of_a_buffer_that_the_step_replaces_keeps_what_was_there():
    def step(world, x):
        model = world["model"]
        old, view = model.seen, model.seen[0]
        model.seen = model.seen * 2 + x
        world["log"].append((old, view))
        return old, view, model.seen[1]

    assert_same(both(step))


def test_a_view_of_a_parameter_whose_data_are_set_keeps_what_was_there():
    def step(world, x):
        weight = world["model"].weight
        view = weight.detach()[0]
        weight.data = weight.data * 0.5
        world["log"].append(view)
        return view, weight.detach()[1]

    assert_same(both(step))


def test_a_view_of_an_argument_whose_data_are_set_keeps_what_was_there():
    def step(world, x):
        view = x[0]
        x.data = x.data * 0.5
        return view, x[1]

    assert_same(both(step))


def test_the_state_of_a_model_is_that_of_the_model():
    """The first epoch's best is the last one's: as in eager, where it is a well-known trap."""

    def step(world, x):
        trains(world, x)
        world["best"] = world["model"].state_dict()
        return x.sum()

    for world, _ in both(step):
        for name, value in world["model"].state_dict().items():
            assert value.data_ptr() == world["best"][name].data_ptr()
            torch.testing.assert_close(value, world["best"][name])


def test_one_view_at_two_places_is_one_tensor():
    def step(world, x):
        view = world["model"].weight.detach()[0]
        world["view"] = view
        return view, view

    _, (world, given) = both(step)
    one, other = given[-1][1]
    assert one is other is world["view"]


def test_views_of_one_tensor_share_it():
    def step(world, x):
        flat = world["table"].view(-1)
        return flat[:3], flat[2:]

    _, (world, given) = both(step)
    one, other = given[-1][1]
    world["table"][0, 2] = 7
    assert one[2] == other[0] == 7


def test_an_argument_that_is_written_to_is_seen_in_its_view():
    def step(world, x):
        view = x.t()
        x.mul_(2)
        return view

    for _, given in both(step):
        for x, view in given:
            assert view.data_ptr() == x.data_ptr()
            torch.testing.assert_close(view, x.t())


def test_views_of_declared_sizes_have_the_values_of_their_call():
    model = nn.Linear(3, 2)
    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(1, 16))
    step = treadle.compile(lambda x: (model(x).sum(), x[1:]), model=model, shapes=shapes)
    for rows in (4, 5, 7):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(step(x)[1], x[1:])


def test_arguments_that_are_parts_of_one_memory_once_are_each_its_own():
    def step(world, x, y):
        return x[0], y[1]

    _, run = a_world(lambda world: lambda x, y: step(world, x, y), compiled=True)
    flat = torch.randn(12)
    run(flat[:6].view(2, 3), flat[6:].view(2, 3))
    for _ in range(2):
        x, y = torch.randn(2, 3), torch.randn(2, 3)
        row, other = run(x, y)
        assert (row.data_ptr(), other.data_ptr()) == (x[0].data_ptr(), y[1].data_ptr())
        torch.testing.assert_close((row, other), (x[0], y[1]))
