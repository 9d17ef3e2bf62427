"""Steps of models whose parameters are DTensors, beside the same models in eager mode."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import treadle
from distributed import sharded_models
from distributed.ranks import Launcher
from distributed.sharded_models import (
    FULLY_SHARDED,
    ON_A_PLANE,
    TENSOR_PARALLEL,
    adamw,
    fully,
    mlp,
    sgd,
)
from treadle.runtime.store.artifact import CallStep

CALLS = 4
EACH = {"TREADLE_BUCKETS": "0"}
"""Every collective by itself, to count them."""


def whole(value):
    found = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().to(torch.float64)


def optimizer_of(case):
    parameters = [each for each in case.model.parameters() if each.requires_grad]
    return case.optimizer(parameters)


def step_of(case, optimizer):
    if case.step is not None:
        return case.step(case.model, optimizer)

    def step(*batch):
        optimizer.zero_grad()
        loss = case.loss(case.model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def kind_of(value):
    return type(value).__name__, getattr(value, "placements", None)


def trained(make, *, compiled):
    """What is left after some calls: values by name, and what kind of tensors they are in."""
    torch.manual_seed(0)
    case = make()
    optimizer = optimizer_of(case)
    step = step_of(case, optimizer)
    if compiled:
        step = treadle.compile(step, model=case.model, optimizer=optimizer)
    torch.manual_seed(1 + dist.get_rank() // case.shared)
    results = {f"result {at}": step(*case.batch()) for at in range(CALLS)}
    named = dict(case.model.named_parameters())
    state = {
        f"{key} of {name}": value
        for name, each in named.items()
        for key, value in optimizer.state.get(each, {}).items()
        if isinstance(value, torch.Tensor)
    }
    grads = {f"grad of {name}": each.grad for name, each in named.items() if each.grad is not None}
    found = {**results, **named, **dict(case.model.named_buffers()), **state, **grads}
    return {k: whole(v) for k, v in found.items()}, {k: kind_of(v) for k, v in found.items()}, case


def compared(name):
    """The name of the value that is furthest from eager's, how far, how far it may be; and what is
    of another kind."""
    make = getattr(sharded_models, name)
    values, kinds, case = trained(make, compiled=False)
    ours, our_kinds, _ = trained(make, compiled=True)
    assert values.keys() == ours.keys(), values.keys() ^ ours.keys()
    assert not any(each.isnan().any() for each in ours.values())
    far = {k: (values[k] - ours[k]).abs().max().item() for k in values if values[k].numel()}
    furthest = max(far, key=far.__getitem__)
    others = {k: (kinds[k], our_kinds[k]) for k in kinds if kinds[k] != our_kinds[k]}
    return furthest, far[furthest], case.close, others


def compared_all(names):
    warnings.simplefilter("ignore")
    return {name: compared(name) for name in names}


def names_of(cases):
    return [each.__name__ for each in cases]


@pytest.fixture(scope="module")
def run_once(forks, tmp_path_factory):
    """Cases of one list in one process per rank: importing ``fully_shard`` takes seconds."""
    known = {}

    def run(cases, world):
        if cases not in known:
            launch = Launcher(forks, tmp_path_factory.mktemp("sharded"))
            known[cases] = launch(world, compared_all, names_of(cases), timeout=300)
        return [each.value for each in known[cases]]

    return run


def check(found):
    for furthest, far, close, others in found:
        assert far < close, furthest
        assert others == {}


@pytest.mark.parametrize("name", names_of(FULLY_SHARDED))
def test_fully_sharded(run_once, name):
    check([each[name] for each in run_once(FULLY_SHARDED, 2)])


@pytest.mark.parametrize("name", names_of(TENSOR_PARALLEL))
def test_tensor_parallel(run_once, name):
    check([each[name] for each in run_once(TENSOR_PARALLEL, 2)])


@pytest.mark.parametrize("name", names_of(ON_A_PLANE))
def test_on_a_plane(run_once, name):
    check([each[name] for each in run_once(ON_A_PLANE, 4)])


# -- between calls


def parts(make=sgd):
    """A model of uneven parts, its optimizer and its step."""
    torch.manual_seed(0)
    model = mlp(7, 5, 3)
    fully(model, model[0])
    optimizer = make(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def batches(count):
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return [
        (torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator))
        for _ in range(count)
    ]


def gap(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((whole(a) - whole(b)).abs().max().item() for a, b in pairs)


def evaluated_between():
    """The outer module keeps what it gathered in an eager forward without a backward."""
    model, optimizer, function = parts()
    twin, _, eager = parts()
    with torch.no_grad():
        model(batches(1)[0][0])
    step = treadle.compile(function, model=model, optimizer=optimizer)
    found = []
    for at, (x, y) in enumerate(batches(6)):
        ours = function if at % 3 == 2 else step
        found.append((ours(x, y) - eager(x, y)).abs().item())
        with torch.no_grad():
            found.append((model(x) - twin(x)).abs().max().item())
    return max(*found, gap(model, twin)), step.recompiles


def test_eager_forwards_and_steps_in_between(launch):
    for rank in launch(2, evaluated_between):
        far, recompiles = rank.value
        assert far < 4e-6
        assert recompiles == []


def saved_and_loaded(folder):
    """Through ``torch.distributed.checkpoint``, into a model that was never trained."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, function = parts(adamw)
    twin, _, eager = parts(adamw)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    for x, y in batches(3):
        step(x, y)
        eager(x, y)
    held = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(held, checkpoint_id=folder)
    model, optimizer, function = parts(adamw)
    held = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(held, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    step = treadle.compile(function, model=model, optimizer=optimizer)
    losses = [(step(x, y) - eager(x, y)).abs().item() for x, y in batches(3)]
    return max(*losses, gap(model, twin))


def test_checkpoints_are_those_of_eager(launch, tmp_path):
    for rank in launch(2, saved_and_loaded, str(tmp_path / "held")):
        assert rank.value < 4e-6


def set_between():
    """Another divisor is another graph; and gradients without an update."""
    model, optimizer, function = parts()
    twin, _, eager = parts()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    losses = []
    for at, (x, y) in enumerate(batches(4)):
        if at == 2:
            for each in (model, twin):
                each.set_gradient_divide_factor(4.0)
                each.set_force_sum_reduction_for_comms(True)
        losses.append((step(x, y) - eager(x, y)).abs().item())
    x, y = batches(1)[0]
    (twin(x) - y).square().mean().backward()
    optimizer.zero_grad()
    before = [whole(each) for each in model.parameters()]
    step(x, y, update=False)
    same = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    return max(*losses, gap(model, twin)), same, kind_of(model[0].weight.grad), step.recompiles


def test_another_plan_is_another_variant(launch):
    for rank in launch(2, set_between):
        far, same, kind, recompiles = rank.value
        assert far < 4e-6
        assert same
        assert kind[0] == "DTensor"
        assert recompiles[0] == "the settings of fully_shard changed"


def sent():
    """How often each collective stands in the artifact of a step that accumulates."""
    model, optimizer, _ = parts()

    def step(x, y):
        for half in range(2):
            (model(x) - y).square().mean().mul(1.0 + half).backward()
        optimizer.step()

    step = treadle.compile(step, model=model, optimizer=optimizer)
    step(*batches(1)[0])
    calls = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    return [calls.count(f"treadle_c10d.{name}.out") for name in (
        "all_gather_into_tensor", "reduce_scatter_tensor", "wait"
    )]  # fmt: skip


def test_a_parameter_is_gathered_once_for_several_forwards(launch):
    for rank in launch(2, sent, environment=EACH):
        assert rank.value == [4, 8, 12]


def test_what_is_sent_of_parts_is_joined(launch):
    """The first layer is dropped after its forward, and the backward does not read its weight."""
    for rank in launch(2, sent):
        assert rank.value == [2, 1, 3]


def dropped(again):
    """A stack of layers, each gathered for itself: how often it gathers, its peak, and the largest
    difference of a weight from eager's after three steps."""
    after = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[mlp(64, 96, 64) for _ in range(6)])
        fully(model, *model, reshard_after_forward=again)
        optimizer = sgd(model.parameters())

        def step(x, y, model=model, optimizer=optimizer):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(3):
            step(torch.randn(4, 64), torch.randn(4, 64))
        after.append([whole(each) for each in model.parameters()])
    calls = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    gathers = calls.count("treadle_c10d.all_gather_into_tensor.out")
    far = max((a - b).abs().max().item() for a, b in zip(*after, strict=True))
    return gathers, step.compiled.artifact.peak_bytes, far


def dropped_and_kept():
    return dropped(True), dropped(False)


def test_what_is_dropped_after_a_forward_is_gathered_again(launch):
    """Each weight of each layer, but the last, which is still there when the backward begins, and
    the very first, which the backward does not read."""
    for rank in launch(2, dropped_and_kept, environment=EACH):
        (gathers, peak, far), (once, whole_peak, same_far) = rank.value
        assert max(far, same_far) < 4e-6
        assert [gathers, once] == [24 + 9, 24]
        layer = 2 * 64 * 96 * 4
        assert peak < whole_peak - layer


def told_between():
    """``reshard_after_forward`` set between calls: how often each variant gathers, and why."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[mlp(8, 8, 8) for _ in range(3)])
    fully(model, *model)
    optimizer = sgd(model.parameters())

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = treadle.compile(step, model=model, optimizer=optimizer)
    found = []
    for drops in (None, False, True):
        if drops is not None:
            model.set_reshard_after_forward(drops)
        step(torch.randn(4, 8))
        calls = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
        found.append(calls.count("treadle_c10d.all_gather_into_tensor.out"))
    return found, step.recompiles


def test_dropping_may_be_set_between_calls(launch):
    for rank in launch(2, told_between):
        gathers, why = rank.value
        assert gathers == [5, 1, 5]
        assert set(why) == {"the settings of fully_shard changed"}


def replicas():
    """Tensor parallelism along one dim of a mesh, replicas along the other."""
    mesh = sharded_models.plane("data", "tensor")

    def made():
        torch.manual_seed(0)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(mlp(7, 8, 3), mesh["tensor"], plan)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    twin, other = made()

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def eager(x, y):
        other.zero_grad()
        loss = (twin(x) - y).square().mean()
        loss.backward()
        for each in twin.parameters():
            part = each.grad.to_local().div_(2)
            dist.all_reduce(part, group=mesh["data"].get_group())
        other.step()
        return loss

    with pytest.raises(treadle.TreadleError, match="TR-514"):
        treadle.compile(step, model=model, optimizer=optimizer, parallel=treadle.DataParallel())
    step = treadle.compile(
        step, model=model, optimizer=optimizer, parallel=treadle.DataParallel(mesh["data"])
    )
    torch.manual_seed(dist.get_rank() // 2)
    losses = []
    for _ in range(4):
        x, y = torch.randn(4, 7), torch.randn(4, 3)
        losses.append((step(x, y) - eager(x, y)).abs().item())
    return max(*losses, gap(model, twin))


def test_replicas_of_a_tensor_parallel_model(launch):
    for rank in launch(4, replicas):
        assert rank.value < 4e-6
