"""Steps on several ranks beside ``DistributedDataParallel`` in eager mode."""

import contextlib
import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import treadle
from treadle.runtime.store.artifact import CallStep

CLOSE = 1e-6
EACH = {"TREADLE_BUCKETS": "0"}
"""Every collective by itself, to count them."""


def sent(step):
    """How many gradients and buffers the variant that ran last sends."""
    calls = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    reduced = calls.count("treadle_c10d.all_reduce.out")
    return reduced, calls.count("treadle_c10d.broadcast.out")


def network(norm):
    return nn.Sequential(nn.Linear(7, 12), norm, nn.ReLU(), nn.Linear(12, 5))


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def training(net, optimizer, micro, no_sync=contextlib.nullcontext):
    def step(x, y):
        losses = []
        parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for at, (a, b) in enumerate(parts):
            with no_sync() if at < micro - 1 else contextlib.nullcontext():
                loss = F.cross_entropy(net(a), b) / micro
                loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def gap(ours, theirs):
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def batches(count, micro=1):
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(6 * micro, 7), torch.randint(0, 5, (6 * micro,))


def spread(net):
    """The largest difference of this rank's parameters and buffers from the first rank's."""
    found = 0.0
    for each in net.state_dict().values():
        first = each.detach().clone()
        dist.broadcast(first, 0)
        found = max(found, (first - each).abs().max().item())
    return found


def trains(kind, norm, micro):
    """``kind``: who averages. Losses and parameters beside eager's, what was sent, and how far
    ranks are apart."""
    torch.manual_seed(dist.get_rank())  # ranks begin with different parameters
    norms = {"layer": nn.LayerNorm(12), "batch": nn.BatchNorm1d(12)}
    net = network(norms[norm])
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)
    eager = training(wrapped, optimizer_of(twin), micro, wrapped.no_sync)
    if kind == "plain":
        step = treadle.compile(
            training(net, own := optimizer_of(net), micro),
            model=net,
            optimizer=own,
            parallel=treadle.DataParallel(),
        )
    else:
        wrapper = DistributedDataParallel(net)
        own = optimizer_of(net)
        function = training(wrapper, own, micro, wrapper.no_sync)
        step = treadle.compile(function, model=wrapper, optimizer=own)
    losses = []
    for x, y in batches(5, micro):
        losses.append(abs(step(x, y).item() - eager(x, y).item()))
    difference = step.verify(list(batches(1, micro))) if kind == "plain" else None
    return max(losses), gap(net, twin), sent(step), spread(net), len(step.recompiles), difference


@pytest.mark.parametrize(
    ("kind", "norm", "micro"),  # every pair of values
    [
        ("plain", "layer", 1),
        ("plain", "batch", 3),
        ("wrapper", "layer", 3),
        ("wrapper", "batch", 1),
    ],
)
def test_training_is_that_of_the_wrapper_in_eager(launch, kind, norm, micro):
    for rank in launch(2, trains, kind, norm, micro, environment=EACH):
        loss, apart, (reduced, copied), between, recompiles, difference = rank.value
        assert loss < CLOSE
        if norm == "layer" or kind == "wrapper":
            assert apart < CLOSE
        assert between == 0.0 or kind == "wrapper"
        assert reduced == 6, "one for each gradient, whatever was accumulated before"
        assert copied == {"layer": 0, "batch": 3}[norm]
        assert recompiles == 0
        assert difference is None


def test_four_ranks(launch):
    for rank in launch(4, trains, "plain", "layer", 1, environment=EACH):
        loss, apart, _, between, _, _ = rank.value
        assert loss < CLOSE
        assert apart < CLOSE
        assert between == 0.0


def accumulates(updates):
    """Calls of which only those in ``updates`` step: reductions in each, and the difference."""
    torch.manual_seed(dist.get_rank())
    net = network(nn.LayerNorm(12))
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)
    other, own = optimizer_of(twin), optimizer_of(net)
    step = treadle.compile(
        training(net, own, 1), model=net, optimizer=own, parallel=treadle.DataParallel()
    )
    found = []
    for at, (x, y) in enumerate(batches(6)):
        update = at in updates
        step(x, y, update=update)
        with contextlib.nullcontext() if update else wrapped.no_sync():
            F.cross_entropy(wrapped(x), y).backward()
        if update:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.2)
            other.step()
            other.zero_grad()
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        grads = [(a.grad - b.grad).abs().max().item() for a, b in pairs if b.grad is not None]
        found.append((sent(step)[0], gap(net, twin), max(grads, default=0.0)))
    return found


def test_what_only_accumulates_sends_nothing(launch):
    for rank in launch(2, accumulates, {2, 5}, environment=EACH):
        for at, (reduced, apart, grads) in enumerate(rank.value):
            assert reduced == (6 if at in {2, 5} else 0)
            assert apart < CLOSE
            assert grads < CLOSE


def without_an_optimizer():
    """Forward and backward alone, the user's own loop around them."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)

    def backward(x, y):
        F.cross_entropy(net(x), y).backward()

    step = treadle.compile(backward, model=net, parallel=treadle.DataParallel())
    for x, y in batches(2):
        step(x, y)
        F.cross_entropy(wrapped(x), y).backward()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def test_a_step_without_an_optimizer_leaves_averages(launch):
    for rank in launch(2, without_an_optimizer):
        assert rank.value < CLOSE


def sets_gradients():
    """Gradients by ``torch.autograd.grad``, put into ``.grad`` by hand."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)
    own, other = optimizer_of(net), optimizer_of(twin)

    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        found = torch.autograd.grad(loss, list(net.parameters()))
        for each, gradient in zip(net.parameters(), found, strict=True):
            each.grad = gradient
        own.step()
        own.zero_grad()
        return loss.detach()

    compiled = treadle.compile(step, model=net, optimizer=own, parallel=treadle.DataParallel())
    for x, y in batches(3):
        compiled(x, y)
        F.cross_entropy(wrapped(x), y).backward()
        other.step()
        other.zero_grad()
    return gap(net, twin), sent(compiled)[0]


def test_gradients_that_the_step_sets_are_averaged(launch):
    for rank in launch(2, sets_gradients, environment=EACH):
        apart, reduced = rank.value
        assert apart < CLOSE
        assert reduced == 6


def freezes_and_ties():
    """A tied weight, a frozen layer, and a layer that is not used: as the wrapper does."""
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(7, 7)
            self.frozen = nn.Linear(7, 7).requires_grad_(False)
            self.unused = nn.Linear(3, 3)

        def forward(self, x):
            return F.linear(self.frozen(self.inner(x)), self.inner.weight)[:, :5]

    net = Odd()
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin, find_unused_parameters=True)
    own, other = optimizer_of(net), optimizer_of(twin)
    kinds = treadle.DataParallel(), None
    gaps = []
    for kind in kinds:
        model = net if kind else DistributedDataParallel(net, find_unused_parameters=True)
        step = treadle.compile(training(model, own, 1), model=model, optimizer=own, parallel=kind)
        eager = training(wrapped, other, 1)
        for x, y in batches(2):
            step(x, y)
            eager(x, y)
        gaps.append((gap(net, twin), sent(step)[0]))
    return gaps


def test_tied_frozen_and_unused_parameters(launch):
    for rank in launch(2, freezes_and_ties, environment=EACH):
        assert [reduced for _, reduced in rank.value] == [2, 2]
        assert max(apart for apart, _ in rank.value) < CLOSE


def in_half_the_ranks():
    """A group of its own: ranks 0 and 1, and ranks 2 and 3."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    torch.manual_seed(dist.get_rank())
    net = network(nn.BatchNorm1d(12))
    own = optimizer_of(net)
    parallel = treadle.DataParallel(group)
    step = treadle.compile(training(net, own, 1), model=net, optimizer=own, parallel=parallel)
    for x, y in batches(2):
        step(x, y)
    return torch.cat([each.detach().flatten() for each in net.state_dict().values()])


def test_a_group_of_some_ranks(launch):
    values = [rank.value for rank in launch(4, in_half_the_ranks)]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[2], values[3])
    assert not torch.allclose(values[0], values[2])


def test_without_process_groups_it_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(treadle.TreadleError, match="TR-500") as caught:
        treadle.compile(lambda x: net(x), model=net, parallel=treadle.DataParallel())
    assert "init_process_group" in caught.value.remedy


WAYS = {
    "each": {"buckets": 0},
    "small": {"buckets": "1KiB"},
    "overlap": {"overlap": True},
    "budget": {"memory": 0.2},
    "eager": {"numerics": "eager"},
    "library": {"codegen": False},
}


def in_every_way():
    """A deeper model, compiled in each way: how far its parameters are from the wrapper's."""
    found = {}
    for name, given in WAYS.items():
        torch.manual_seed(dist.get_rank())
        layers = [m for _ in range(3) for m in (nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24))]
        net = nn.Sequential(nn.Linear(7, 24), *layers, nn.Linear(24, 5))
        twin = copy.deepcopy(net)
        wrapped = DistributedDataParallel(twin)
        own, other = optimizer_of(net), optimizer_of(twin)
        step = treadle.compile(
            training(net, own, 1),
            model=net,
            optimizer=own,
            parallel=treadle.DataParallel(),
            options=treadle.Options(measure=False, **given),
        )
        eager = training(wrapped, other, 1)
        for x, y in batches(3):
            step(x, y)
            eager(x, y)
        found[name] = gap(net, twin), sent(step)[0]
    return found


def test_ways_to_compile_change_no_numbers(launch):
    for rank in launch(2, in_every_way):
        assert max(apart for apart, _ in rank.value.values()) < CLOSE
        counts = {name: count for name, (_, count) in rank.value.items()}
        assert counts["each"] == 16
        assert 1 < counts["small"] < 16
        assert counts["eager"] == counts["library"] == counts["budget"] == 1


def looks_without_gradients():
    """A forward without gradients between a forward and its backward: how far ranks are apart."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    wrapper = DistributedDataParallel(net)
    own = optimizer_of(net)

    def step(x, y):
        out = wrapper(x)
        with torch.no_grad():
            right = (wrapper(x + 1).argmax(1) == y).sum()
        F.cross_entropy(out, y).backward()
        own.step()
        own.zero_grad()
        return right

    compiled = treadle.compile(step, model=wrapper, optimizer=own)
    for x, y in batches(2):
        compiled(x, y)
    return spread(net)


def test_a_forward_without_gradients_changes_nothing_for_others(launch):
    assert [rank.value for rank in launch(2, looks_without_gradients)] == [0.0, 0.0]


def thaws(kind):
    """Parameters that want gradients within the step alone."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    model = DistributedDataParallel(net) if kind == "wrapper" else net
    own = optimizer_of(net)

    def step(x, y):
        net[0].requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        own.step()
        own.zero_grad()
        net[0].requires_grad_(False)

    parallel = None if kind == "wrapper" else treadle.DataParallel()
    compiled = treadle.compile(step, model=model, optimizer=own, parallel=parallel)
    for x, y in batches(3):
        compiled(x, y)
    return spread(net)


@pytest.mark.parametrize("kind", ["plain", "wrapper"])
def test_parameters_that_are_frozen_between_calls(launch, kind):
    assert [rank.value for rank in launch(2, thaws, kind)] == [0.0, 0.0]


def differentiates():
    net = nn.Linear(4, 3)
    own = optimizer_of(net)

    def step(x):
        net(x).square().sum().backward(create_graph=True)
        penalty = sum(each.grad.square().sum() for each in net.parameters())
        penalty.backward()
        own.step()

    step = treadle.compile(step, model=net, optimizer=own, parallel=treadle.DataParallel())
    try:
        step(torch.randn(5, 4))
    except treadle.CaptureError as error:
        return error.code, error.where


def test_gradients_that_are_differentiated_are_refused(launch):
    for rank in launch(2, differentiates):
        code, where = rank.value
        assert code == "TR-541"
        assert "test_data_parallel.py" in where


def verifies_set_gradients():
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    own = optimizer_of(net)

    def step(x):
        loss = net(x).square().sum()
        grads = torch.autograd.grad(loss, [*net.parameters()])
        for each, grad in zip(net.parameters(), grads, strict=True):
            each.grad = grad
        own.step()
        own.zero_grad()

    step = treadle.compile(step, model=net, optimizer=own, parallel=treadle.DataParallel())
    torch.manual_seed(dist.get_rank())
    return step.verify([(torch.randn(5, 4),)])


def test_the_function_by_itself_averages_what_the_step_sets(launch):
    assert [rank.value for rank in launch(2, verifies_set_gradients)] == [None, None]


def fails_a_check(shard):
    """A check that fails on the last rank alone, in the second call: the codes that ranks see."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    own = torch.optim.AdamW(net.parameters())

    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        if not torch.isfinite(loss):
            raise ValueError("not finite")
        loss.backward()
        own.step()
        own.zero_grad()

    parallel = treadle.DataParallel(shard=shard)
    step = treadle.compile(step, model=net, optimizer=own, parallel=parallel)
    for at, (x, y) in enumerate(batches(2)):
        try:
            step(x * torch.nan if at and dist.get_rank() else x, y)
        except ValueError:
            return "ValueError"
        except treadle.RuntimeFailure as error:
            return error.code
    return "nothing"


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_check_that_fails_on_one_rank_is_an_error_on_all(launch, shard):
    found = [rank.value for rank in launch(2, fails_a_check, shard, closes=False)]
    assert found == ["TR-505", "ValueError"]


def starts_within_backward(shard):
    """For each way: the operations of the graph from the first product of the backward pass on."""
    made = {}
    for way in ("wrapper", "plain"):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
        parallel = treadle.DataParallel(shard=shard) if way == "plain" else None
        if way == "wrapper":
            net = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(x, net=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = treadle.compile(step, model=net, optimizer=optimizer, parallel=parallel)
        step(torch.randn(4, 6))
        lines = step.compiled.log.texts["planned"].splitlines()
        made[way] = [line.partition(" = ")[2] for line in lines]
    return made


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_gradient_is_sent_while_others_are_computed(launch, shard):
    for rank in launch(2, starts_within_backward, shard, environment=EACH):
        for way, lines in rank.value.items():
            starts = ("_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor")
            sent = [at for at, line in enumerate(lines) if line.startswith(starts)]
            products = [at for at, line in enumerate(lines) if line.startswith("mm(")]
            assert len(sent) == 6
            ahead = [sum(at < product for at in sent) for product in products]
            assert ahead[-1] >= 4, f"{way}: two layers are sent when the last product begins"


OTHER = []
"""A group of the same ranks, by another name."""


def plainly(net, grads):
    with torch.no_grad():
        for each, grad in zip(net.parameters(), grads, strict=True):
            each.sub_(0.1 * grad)


def through_a_norm(net, grads):
    """Every gradient is scaled by what the rank's own gradients are together."""
    norm = torch.stack([each.norm() for each in grads]).norm()
    with torch.no_grad():
        for each in net.parameters():
            each.mul_(1 - 0.1 / (1 + norm))


def of_one(net, grads):
    with torch.no_grad():
        net[-1].bias.copy_(net[-1].bias - grads[-1])


def reduced_by_hand(net, grads):
    for each in grads:
        dist.all_reduce(each)
    plainly(net, [each / dist.get_world_size() for each in grads])


def reduced_in_another_group(net, grads):
    for each in grads:
        dist.all_reduce(each, group=OTHER[0])
    plainly(net, [each / dist.get_world_size() for each in grads])


def of_no_batch(net, grads, scale=1.0):
    penalty = sum(each.square().sum() for each in net.parameters()) * scale
    plainly(net, torch.autograd.grad(penalty, list(net.parameters())))


BY_HAND = {each.__name__: each for each in (
    plainly, through_a_norm, of_one, reduced_by_hand, reduced_in_another_group, of_no_batch,
)}  # fmt: skip


def by_hand(name):
    """A step that gives gradients to parameters by a way of its own: how far ranks are apart after
    it, or the error."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    OTHER[:] = [dist.new_group([0, 1])]
    given = {"scale": 0.5} if name == "of_no_batch" else {}

    def step(x, y, rate):
        loss = F.cross_entropy(net(x), y) * rate
        grads = torch.autograd.grad(loss, list(net.parameters()))
        BY_HAND[name](net, grads, **{key: rate * value for key, value in given.items()})
        return loss.detach()

    step = treadle.compile(step, model=net, parallel=treadle.DataParallel())
    try:
        for x, y in batches(2):
            step(x, y, torch.tensor(0.5))
    except treadle.TreadleError as error:
        return error.code, str(error)
    apart = [each.detach().clone() for each in net.parameters()]
    for each in apart:
        dist.broadcast(each, 0)
    pairs = zip(apart, net.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs), ""


def by_each_hand():
    return {name: by_hand(name) for name in BY_HAND}


REFUSED = {
    "plainly": "each.sub_(0.1 * grad)",
    "through_a_norm": "each.mul_(1 - 0.1 / (1 + norm))",
    "of_one": "net[-1].bias.copy_(net[-1].bias - grads[-1])",
}


def test_gradients_that_nothing_averages_are_refused_and_those_that_ranks_share_are_not(launch):
    for rank in launch(2, by_each_hand):
        for name, found in rank.value.items():
            if name not in REFUSED:
                assert found == (0.0, ""), name
                continue
            code, text = found
            assert code == "TR-516"
            assert "would differ between ranks" in text
            assert f": {REFUSED[name]}" in text


class Rare:
    """Of one rank alone."""


def with_state_of_one_rank():
    """A step that asks what one rank's state alone changes, and to which it makes no difference."""
    torch.manual_seed(0)
    net = network(nn.LayerNorm(12))
    optimizer = optimizer_of(net)
    known = {}

    def step(x, y):
        many = known.setdefault(len(known) > 2, isinstance([x], Sequence))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() if many else None

    step = treadle.compile(step, model=net, optimizer=optimizer, parallel=treadle.DataParallel())
    for at, (x, y) in enumerate(batches(4)):
        if at == 2 and dist.get_rank() == 0:
            Sequence.register(Rare)
            known["seen"] = torch.Size([3])
        step(x, y)
    apart = [each.detach().clone() for each in net.parameters()]
    for each in apart:
        dist.broadcast(each, 0)
    pairs = zip(apart, net.parameters(), strict=True)
    furthest = max((a - b).abs().max().item() for a, b in pairs)
    return furthest, step.recompiles, len(step.recaptures)


def test_what_changes_on_one_rank_and_makes_no_difference_compiles_on_none(launch):
    first, second = (each.value for each in launch(2, with_state_of_one_rank))
    assert first[:2] == second[:2] == (0.0, [])
    assert first[2] > second[2]
