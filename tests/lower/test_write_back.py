"""Where new values of inputs are written, and who reads them from there."""

import copy

import torch
from torch import nn

import treadle
from treadle.runtime.store.artifact import CallStep, Storage


def twice(model, optimizer):
    """The second product reads the weights that the first update made."""

    def step(x):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach(), model(x).detach()

    return step


def trained(make, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    twin = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), make(twin.parameters())
    step = treadle.compile(
        twice(model, ours), model=model, optimizer=ours, options=treadle.Options(**options)
    )
    eager = twice(twin, theirs)
    for _ in range(3):
        x = torch.randn(16, 32)
        for got, wanted in zip(step(x), eager(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    return step


def operands(call, artifact):
    """Where what a product reads lies, by size: weights and biases, not values of the batch."""
    found = [artifact.buffers[view.buffer] for view in call.views]
    return {each.place for each in found if 16 not in each.shape}


def test_products_read_the_last_value_of_a_weight_from_the_weight():
    artifact = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1)).compiled.artifact
    products = [each for each in artifact.steps if isinstance(each, CallStep)]
    assert [operands(each, artifact) for each in products[-2:]] == [{Storage.INPUT}] * 2
    middle = [operands(each, artifact) for each in products[3:-2]]
    assert {Storage.ARENA} in middle  # of the first update, which the second one reads


def test_every_optimizer_and_layout_is_eagers():
    for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        for codegen in (True, False):
            trained(make, codegen=codegen)


def rows_of(kind):
    """A step that updates the rows of a table that it looked up, and a queue of its last rows."""
    torch.manual_seed(1)
    model = nn.Embedding(4000, 8, sparse=True)
    model.register_buffer("queue", torch.zeros(4000, 8))
    optimizer = kind(model.parameters())

    def step(x):
        optimizer.zero_grad()
        found = model(x)
        loss = found.square().mean()
        loss.backward()
        optimizer.step()
        model.queue[x] = found.detach()
        return loss.detach(), model.queue.sum()

    return model, optimizer, step


def test_calls_that_change_some_rows_write_them_into_the_input():
    for kind in (lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SparseAdam(p, 0.1)):
        (ours, optimizer, function), (twin, _, eager) = rows_of(kind), rows_of(kind)
        step = treadle.compile(function, model=ours, optimizer=optimizer)
        for _ in range(3):
            x = torch.randint(0, 4000, (20,))
            torch.testing.assert_close(step(x), eager(x))
        torch.testing.assert_close(dict(ours.state_dict()), dict(twin.state_dict()))
        artifact = step.compiled.artifact
        calls = [s for s in artifact.steps if isinstance(s, CallStep) and "index_" in s.out]
        written = [artifact.buffers[each.outputs[0]] for each in calls]
        assert all(each.place is Storage.INPUT for each in written if each.shape[0] == 4000)
        assert any(each.shape[0] == 4000 for each in written)


def test_an_input_is_written_into_an_input_beside_a_call_that_could_write_there():
    """The call makes something else: the copy stays."""
    found = []
    for make in (lambda step, model: treadle.compile(step, model=model), lambda step, model: step):
        model = nn.Module()
        model.register_buffer("table", torch.zeros(4, 3))

        def step(at, rows, new, model=model):
            added = model.table.index_add(0, at, rows)
            model.table.copy_(new)
            return added * 2

        generator = torch.Generator().manual_seed(0)
        rows, new = (torch.randn(n, 3, generator=generator) for n in (3, 4))
        found.append((make(step, model)(torch.tensor([0, 1, 1]), rows, new), model.table.clone()))
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)
