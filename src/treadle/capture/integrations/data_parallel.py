"""``DistributedDataParallel`` inside a traced run: what it would send becomes part of the graph.

Its own forward tells hooks in C++, on the user's own parameters, to send gradients. The trace does
not touch those parameters, so its forward is this one instead, which does the same in the open.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from treadle.capture.distributed.communication import refuse_wrapper
from treadle.capture.distributed.gradient_sync import GradientSync, RankGroup, from_first_rank
from treadle.capture.explain_errors import here
from treadle.capture.integrations.integration import Integration, Patch, TracedRun
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.distributed.collectives import name_of_group
from treadle.compat.distributed.data_parallel import WrapperPlan, moved, plan_of, sends_buffers
from treadle.compat.hooks import reducer_methods
from treadle.util.errors import CaptureError


def forward_of(sync: GradientSync) -> Callable[..., object]:
    """The replacement of the wrapper's ``forward``."""

    def forward(wrapper: DistributedDataParallel, *args: object, **kwargs: object) -> object:
        return _forward(wrapper, sync, args, kwargs)

    return forward


def _forward(
    wrapper: DistributedDataParallel,
    sync: GradientSync,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    plan = plan_of(wrapper)
    if plan.beyond:
        raise _refused(wrapper, plan)
    group = group_of(plan)
    averages = torch.is_grad_enabled() and wrapper.require_backward_grad_sync
    first = sync.is_first_forward(wrapper)
    if plan.buffers and sends_buffers(wrapper, first=first):
        _send_buffers(wrapper, plan, group)
    leaves, tree = flatten_containers((args, kwargs))
    args, kwargs = unflatten([moved(leaf, plan.device) for leaf in leaves], tree)
    result = wrapper.module(*args, **kwargs)
    if wrapper.require_forward_param_sync != averages:
        wrapper.require_forward_param_sync = averages
    if torch.is_grad_enabled():  # a forward without gradients changes nothing for others' backward
        sync.expect(_parameters(wrapper, plan), group if averages else None)
    return result


def group_of(plan: WrapperPlan) -> RankGroup:
    """The process group of a plan."""
    return RankGroup(name_of_group(plan.group), plan.group.size())


def _parameters(wrapper: DistributedDataParallel, plan: WrapperPlan) -> list[Tensor]:
    named = wrapper.module.named_parameters(remove_duplicate=False)
    return [parameter for name, parameter in named if name in plan.parameters]


def _send_buffers(wrapper: DistributedDataParallel, plan: WrapperPlan, group: RankGroup) -> None:
    with torch.no_grad():
        for name, buffer in wrapper.module.named_buffers():
            if name in plan.buffers:
                buffer.copy_(from_first_rank(buffer, group))


def _refused(wrapper: object, plan: WrapperPlan) -> CaptureError:
    return CaptureError(
        f"{type(wrapper).__name__} has {' and '.join(plan.beyond)}, which treadle cannot capture",
        code="TR-501",
        where=here(),
        remedy="do not use it, or pass the wrapped module with parallel=treadle.DataParallel()",
    )


def _patches(run: TracedRun) -> Iterable[Patch]:
    yield DistributedDataParallel, "forward", forward_of(run.sync)
    for owner, name in reducer_methods():
        yield owner, name, refuse_wrapper


DATA_PARALLEL = Integration(name="torch.nn.parallel.DistributedDataParallel", patches=_patches)
