"""What capture makes of DTensors: the graph of one rank out of several, which need not be there."""

import gc
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import treadle
from treadle.capture.integrations.fully_sharded import Reduction, reduction_of
from treadle.capture.step import capture
from treadle.compat.distributed.fully_sharded import plans_of
from treadle.graph.core.collectives import collectives_in
from treadle.graph.core.signature import Role
from treadle.graph.core.verify import verify
from treadle.graph.text.printing import show
from treadle.util.expected import NotExpected


@pytest.fixture(autouse=True)
def ranks():
    """This is the last of three ranks; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    yield
    dist.destroy_process_group()
    gc.collect()


def mesh():
    return init_device_mesh("cpu", (3,))


def fully(model, *modules, **options):
    from torch.distributed.fsdp import fully_shard

    for each in (*modules, model):
        fully_shard(each, mesh=mesh(), **options)
    return model


def captured(model, function, *inputs, optimizers=None):
    found = capture(
        function, models={"": model}, optimizers=optimizers or {}, args=inputs, kwargs={}
    )
    verify(found.step)
    return found


def gradients(model):
    def step(x):
        model(x).sum().backward()

    return step


def trained(model, kind=torch.optim.SGD, **options):
    optimizer = kind(model.parameters(), **options)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, {"": optimizer}


def lines_of(found, *words):
    """The lines of the graph that begin with one of the words."""
    return [each for each in show(found.step).splitlines() if each.startswith(words)]


COMMUNICATION = ("all_", "reduce_", "wait_")


def test_parts_are_gathered_padded_and_their_gradients_reduced_to_a_mean():
    model = fully(nn.Linear(2, 4, bias=False))  # of its rows the three ranks hold 2, 2 and none
    found = captured(model, gradients(model), torch.randn(5, 2))
    assert show(found.step).splitlines() == [
        "arg0_1: f32[0, 2]  # uneven sharded parameter weight",
        "arg1_1: f32[5, 2]  # batch argument x",
        "detach: f32[0, 2] = detach(arg0_1)",
        "detach.1: f32[0, 2] = detach(detach)",
        "new_zeros: f32[2, 2] = new_zeros(detach.1, [2, 2], pin_memory=False)",
        "cat: f32[2, 2] = cat([detach.1, new_zeros])",
        "all_gather_into_tensor: f32[6, 2] = all_gather_into_tensor(cat, 3, 0)",
        "wait_tensor: f32[6, 2] = wait_tensor(all_gather_into_tensor)",
        "slice: f32[4, 2] = slice.Tensor(wait_tensor, 0, 0, 4)",
        "t: f32[2, 4] = t(slice)",
        "mm: f32[5, 4] = mm(arg1_1, t)",
        "sum: f32[] = sum(mm)",
        "ones_like: f32[] = ones_like(sum, pin_memory=False, memory_format=torch.preserve_format)",
        "expand: f32[5, 4] = expand(ones_like, [5, 4])",
        "t.1: f32[4, 5] = t(expand)",
        "mm.1: f32[4, 2] = mm(t.1, arg1_1)",
        "t.2: f32[2, 4] = t(mm.1)",
        "t.3: f32[4, 2] = t(t.2)",
        "new_zeros.1: f32[2, 2] = new_zeros(t.3, [2, 2], pin_memory=False)",
        "cat.1: f32[6, 2] = cat([t.3, new_zeros.1])",
        "reduce_scatter_tensor: f32[2, 2] = reduce_scatter_tensor(cat.1, avg, 3, 0)",
        "wait_tensor.1: f32[2, 2] = wait_tensor(reduce_scatter_tensor)",
        "slice.1: f32[0, 2] = slice.Tensor(wait_tensor.1, 0, 0, 0)",
        "detach.2: f32[0, 2] = detach(slice.1)",
        "detach.3: f32[0, 2] = detach(detach.2)",
        "return [detach.3]",
    ]
    assert found.gradients.slots[0].spec.placements == (Shard(0),)


def test_a_policy_converts_before_a_gather_and_before_a_reduction():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    model = fully(nn.Linear(2, 3, bias=False), mp_policy=policy)
    found = captured(model, gradients(model), torch.randn(5, 2))
    assert lines_of(found, *COMMUNICATION, "_to_copy", "mm") == [
        "_to_copy: bf16[1, 2] = _to_copy(detach.1, dtype=bf16)",
        "all_gather_into_tensor: bf16[3, 2] = all_gather_into_tensor(_to_copy, 3, 0)",
        "wait_tensor: bf16[3, 2] = wait_tensor(all_gather_into_tensor)",
        "_to_copy.1: bf16[5, 2] = _to_copy(arg1_1, dtype=bf16)",
        "mm: bf16[5, 3] = mm(_to_copy.1, t)",
        "_to_copy.2: f64[5, 3] = _to_copy(mm, dtype=f64)",
        "_to_copy.3: bf16[5, 3] = _to_copy(expand, dtype=bf16, layout=torch.strided, device=cpu)",
        "mm.1: bf16[3, 2] = mm(t.1, _to_copy.1)",
        "_to_copy.4: f32[3, 2] = _to_copy(t.3, dtype=f32)",
        "reduce_scatter_tensor: f32[1, 2] = reduce_scatter_tensor(_to_copy.4, avg, 3, 0)",
        "wait_tensor.1: f32[1, 2] = wait_tensor(reduce_scatter_tensor)",
    ]


def test_a_policy_says_which_parameters_are_converted():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if "param_dtype_override_fn" not in {each.name for each in fields(MixedPrecisionPolicy)}:
        pytest.skip("this version has one policy for all parameters")
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda p: torch.bfloat16 if p.dim() == 2 else p.dtype,
    )
    model = fully(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), mp_policy=policy)
    plans = [
        each for state in plans_of([model]) for group in state.groups for each in group.parameters
    ]
    assert [each.param_dtype for each in plans] == [torch.bfloat16, *[torch.float32] * 3]
    assert {each.reduce_dtype for each in plans} == {torch.float32}


def test_layers_that_are_split_sum_what_ranks_computed():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    model = parallelize_module(model, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = captured(model, gradients(model), torch.randn(5, 2))
    assert [
        (each.name, tuple(node.meta["val"].shape))
        for each, node in zip(found.step.signature.inputs, found.step.placeholders, strict=True)
        if each.role is Role.PARAMETER
    ] == [("0.weight", (1, 2)), ("0.bias", (1,)), ("2.weight", (2, 1)), ("2.bias", (2,))]
    assert lines_of(found, *COMMUNICATION) == [
        "all_reduce: f32[5, 2] = all_reduce(addmm.1, sum, 0)",
        "wait_tensor: f32[5, 2] = wait_tensor(all_reduce)",
    ]


def test_a_gradient_of_summands_is_added_before_the_update():
    """Each rank has some rows of the batch, and all of the weight."""
    model = nn.Linear(2, 2, bias=False)
    weight = distribute_tensor(model.weight.detach(), mesh(), [Replicate()])
    model.weight = nn.Parameter(weight)
    step, optimizers = trained(model, lr=0.1)
    found = captured(
        model, step, distribute_tensor(torch.randn(6, 2), mesh(), [Shard(0)]), optimizers=optimizers
    )
    assert [each.kind for each in collectives_in(found.step.graph)] == ["all_reduce"]
    (result,) = found.result.leaves
    assert result.spec.placements[0].is_partial(), "the loss, as in eager mode"


@pytest.mark.parametrize(
    ("kind", "options", "splits", "inside"),
    [
        (torch.optim.AdamW, {}, True, True),
        (torch.optim.ASGD, {}, True, True),
        (torch.optim.Rprop, {}, True, True),
        (torch.optim.Muon, {}, True, False),
        (torch.optim.Adafactor, {}, True, False),
        (torch.optim.Muon, {}, False, True),
    ],
)
def test_what_looks_at_whole_parameters_steps_outside_where_ranks_hold_parts(
    kind, options, splits, inside
):
    model = nn.Linear(3, 3, bias=False)
    placement = Shard(0) if splits else Replicate()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh(), [placement]))
    step, optimizers = trained(model, kind, lr=0.1, **options)
    found = captured(
        model,
        step,
        distribute_tensor(torch.randn(6, 3), mesh(), [Replicate()]),
        optimizers=optimizers,
    )
    assert [each.reason.code for each in found.optimizers.eager] == ([] if inside else ["TR-510"])


def test_state_starts_with_the_placements_of_its_parameter():
    model = fully(nn.Linear(2, 4, bias=False))
    step, optimizers = trained(model, torch.optim.AdamW)
    found = captured(model, step, torch.randn(5, 2), optimizers=optimizers)
    inputs = [
        each.read([torch.randn(5, 2)], found.inputs.pending) for each in found.inputs.sources[:3]
    ]
    assert [tuple(each.shape) for each in inputs] == [(0, 2), (0, 2), (0, 2)]
    assert not any(isinstance(each, DTensor) for each in inputs)
    kept = list(found.inputs.pending.values())
    assert [(each.placements, tuple(each.shape)) for each in kept] == [((Shard(0),), (4, 2))] * 2


def test_a_gradient_with_other_placements_is_not_what_was_captured():
    model = nn.Linear(2, 3, bias=False)
    weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh(), [Replicate()]))
    model.weight = weight
    weight.grad = distribute_tensor(torch.ones(3, 2), mesh(), [Replicate()])

    def step(x):
        (x @ weight.to_local().t()).sum().backward()

    found = captured(model, step, torch.randn(5, 2))
    (grad,) = [
        source
        for source, entry in zip(found.inputs.sources, found.step.signature.inputs, strict=True)
        if entry.role is Role.GRADIENT
    ]
    assert torch.equal(grad.read([], {}), torch.ones(3, 2))
    weight.grad = DTensor.from_local(torch.ones(3, 2), mesh(), [Partial()])
    with pytest.raises(NotExpected, match="placements"):
        grad.read([], {})


# -- what fully_shard does is read off


def group_of(model):
    (plan,) = plans_of([model])
    return plan.groups[0]


@pytest.mark.parametrize(
    ("dtype", "divisor", "sums", "expected"),
    [
        (torch.float32, None, False, Reduction(1.0, "avg", 1.0)),
        (torch.bfloat16, None, False, Reduction(1.0, "avg", 1.0)),
        (torch.float32, 4.0, False, Reduction(4.0, "sum", 1.0)),
        (torch.float32, None, True, Reduction(1.0, "sum", 3.0)),
        (torch.float16, None, False, Reduction(2.0, "sum", 1.5)),
        (torch.float16, 8.0, False, Reduction(4.0, "sum", 2.0)),
    ],
)
def test_means_are_divided_where_fully_shard_divides(dtype, divisor, sums, expected):
    model = fully(nn.Linear(2, 3))
    if divisor is not None:
        model.set_gradient_divide_factor(divisor)
    model.set_force_sum_reduction_for_comms(sums)
    assert reduction_of(group_of(model), dtype) == expected


def with_a_hook(model):
    model.set_all_reduce_hook(lambda gradients: None)


def with_gradients_of_unused_ones(model):
    group_of(model).group.reduce_scatter_unused_params = True


def with_communication_of_ones_own(model):
    class Own:
        pass

    group_of(model).group._all_gather_comm = Own()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_a_hook, "a hook after its reduction"),
        (with_gradients_of_unused_ones, "gradients for unused parameters"),
        (with_communication_of_ones_own, "custom communication"),
    ],
)
def test_what_cannot_be_read_off_is_refused_by_name(change, words):
    model = fully(nn.Linear(2, 3))
    change(model)
    with pytest.raises(treadle.CaptureError, match=f"TR-511.* has {words} for FSDPLinear"):
        captured(model, gradients(model), torch.randn(5, 2))


def test_parameters_on_the_host_are_refused_by_name():
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = fully(nn.Linear(2, 3), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(treadle.CaptureError, match=r"TR-511.*parameters on the host"):
        captured(model, gradients(model), torch.randn(5, 2))


def test_gradients_that_stay_whole_are_refused():
    model = fully(nn.Linear(2, 3))
    model.set_requires_gradient_sync(False)
    with pytest.raises(treadle.CaptureError, match="TR-512"):
        captured(model, gradients(model), torch.randn(5, 2))
    assert isinstance(model.weight, DTensor)


def test_a_step_that_leaves_them_whole_from_then_on_is_refused():
    model = fully(nn.Linear(2, 3))

    def step(x):
        model(x).sum().backward()
        model.set_requires_gradient_sync(False)

    with pytest.raises(treadle.CaptureError, match="TR-512"):
        captured(model, step, torch.randn(5, 2))


def test_gathering_by_hand_is_refused_and_dropping_is_not():
    model = fully(nn.Linear(2, 3))

    def gathers(x):
        model.unshard()

    def drops(x):
        loss = model(x).sum()
        model.reshard()
        loss.backward()

    with pytest.raises(treadle.CaptureError, match="TR-513"):
        captured(model, gathers, torch.randn(5, 2))
    captured(model, drops, torch.randn(5, 2))


def test_a_step_takes_back_what_was_gathered_by_hand():
    model = fully(nn.Linear(2, 3))
    step, optimizers = trained(model, lr=0.1)
    model.unshard()
    with pytest.raises(treadle.CaptureError, match=r"TR-511.*gathered"):
        captured(model, step, torch.randn(5, 2), optimizers=optimizers)
    treadle.compile(step, model=model, optimizer=optimizers[""])
    assert isinstance(model.weight, DTensor)


def test_hooks_and_modules_are_as_they_were():
    model = fully(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    before = [list(each._forward_pre_hooks.items()) for each in model.modules()]
    parameters = list(model.parameters())
    captured(model, gradients(model), torch.randn(5, 2))
    assert [list(each._forward_pre_hooks.items()) for each in model.modules()] == before
    assert all(map(lambda a, b: a is b, parameters, model.parameters()))
    (plan,) = plans_of([model])
    assert not {"_pre_forward", "_post_forward"} & vars(plan.state).keys()


def test_draws_of_one_stream_are_refused(monkeypatch):
    """As they are on GPUs."""
    from torch.distributed.tensor import _dispatch

    monkeypatch.setattr(_dispatch, "is_rng_supported_mesh", lambda mesh: True)
    weight = nn.Parameter(distribute_tensor(torch.randn(3, 2), mesh(), [Shard(0)]))
    model = nn.Module()
    model.weight = weight

    def step(x):
        nn.functional.dropout(weight).sum().backward()

    with pytest.raises(treadle.CaptureError, match="TR-515"):
        captured(model, step, torch.randn(5, 2))


def test_the_wrapper_of_before_is_refused():
    class FSDPOfOld(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 3)

    model = FSDPOfOld()
    with pytest.raises(treadle.CaptureError, match="TR-101"):
        captured(model, gradients(model), torch.randn(5, 2))
