"""The plan of ``fully_shard``, read from the modules.

Its module hooks gather parameters on separate streams, resize storages and reduce gradients. None
of this can be traced. The plan is in plain objects: one state for each call of ``fully_shard``,
with groups of parameters.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from treadle.compat.distributed.sharded_tensors import ShardedLayout
from treadle.compat.tracing import without_functions

_MODULE = "torch.distributed.fsdp"
"""Takes seconds to import: where nobody has, no model is fully sharded."""


@final
@dataclass(frozen=True, slots=True)
class ShardedParameterPlan:
    """One parameter. ``sharded``: the user's, a DTensor; ``places``: modules and names that hold
    it. ``shape``: gathered. ``rows``: of ``dim``, what each rank gives, padded. ``layout``: of what
    is gathered, if that is a DTensor still (on the axes of a mesh that nothing is gathered
    along). ``param_dtype``: of what is gathered; ``reduce_dtype``: of what is summed; ``None`` for
    those that they have."""

    sharded: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    dim: int
    rows: int
    layout: ShardedLayout | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShardedGroupPlan:
    """Parameters that are gathered and reduced together. ``gathers``: the process group along which
    each has a part; ``copies``: that of those who hold the same parts; ``None`` for no such.
    ``drops``: whether modules hold parts from the forward to the backward pass."""

    group: Any
    parameters: tuple[ShardedParameterPlan, ...]
    gathers: Any
    copies: Any
    drops: bool

    @property
    def name(self) -> str:
        """Of its modules, by their classes."""
        return ", ".join([type(each).__name__ for each in self.group.modules])

    @property
    def is_gathered(self) -> bool:
        """Whether its modules hold whole parameters now."""
        return not self.group.is_sharded

    @property
    def reduces(self) -> bool:
        """Whether a backward that runs now reduces gradients, or only adds to what is kept."""
        return bool(self.group.reduce_grads)

    @property
    def divisor(self) -> float | None:
        """By what the sum over all ranks is divided; ``None`` for how many they are."""
        return self.group.gradient_divide_factor

    @property
    def only_sums(self) -> bool:
        """Whether a mean must not be asked of the backend."""
        return bool(vars(self.group).get("force_sum_reduction_for_comms", False))

    @property
    def beyond(self) -> tuple[str, ...]:
        """What else it does, in words: none of it can be told from the group."""
        return tuple([words for holds, words in without_functions(_beyond)(self.group) if holds])


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShardedStatePlan:
    """What one call of ``fully_shard`` does around the forward of its ``modules``."""

    state: object
    modules: tuple[nn.Module, ...]
    groups: tuple[ShardedGroupPlan, ...]
    device: torch.device
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None

    def hooks(self) -> Iterator[tuple[dict[int, object], int, bool]]:
        """Where its hooks are kept, under which key, and whether they run before a forward."""
        before = [id(module._forward_pre_hooks) for module in self.modules]
        for handle in _handles(self.state):
            held = handle.hooks_dict_ref()
            if held is not None and handle.id in held:
                yield held, handle.id, id(held) in before

    def methods(self, before: object, after: object) -> dict[str, object]:
        """What a method that was registered as a forward calls, by its name in ``state``."""
        return {"_pre_forward": before, "_post_forward": after}


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with this very module."""
    return _state_of(module) is not None


def plans_of(models: Iterable[nn.Module]) -> list[ShardedStatePlan]:
    """Of all calls of ``fully_shard`` on modules of these models; of one model outer ones first."""
    return [_plan(state, is_outer=is_outer) for state, is_outer in _states_within(models)]


@final
class GatheredModules:
    """Modules of ``fully_shard`` that hold whole parameters between calls, as the outer ones do
    after a forward without a backward. A step trains the parts, and leaves what is gathered as it
    is: the next eager forward would compute with values of before."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._groups = [group for state, _ in _states_within(models) for group in _groups(state)]

    def drop(self) -> None:
        """All of them hold their parts again."""
        for each in self._groups:
            if not each.is_sharded:
                each.reshard()


def sharded_facts(models: Iterable[nn.Module]) -> tuple[object, ...]:
    """What of the plans decides a graph, and may be set at any time."""
    if _MODULE not in sys.modules:
        return ()
    return tuple(
        _facts(group, drops=_drops(state, group, is_outer=is_outer))
        for state, is_outer in _states_within(models)
        for group in _groups(state)
    )


def _facts(group: object, *, drops: bool) -> tuple[object, ...]:
    kept = vars(group)
    return (
        drops,
        kept["reduce_grads"],
        kept["all_reduce_grads"],
        kept["gradient_divide_factor"],
        kept.get("force_sum_reduction_for_comms"),
        tuple(_policies(group)),
        id(kept["mesh_info"]),
        *(words for holds, words in without_functions(_beyond)(group) if holds),
    )


def to_dtype(value: object, dtype: torch.dtype | None) -> Any:
    """The floating-point tensors within ``value`` in ``dtype``, as ``fully_shard`` finds them;
    ``None``: as they are."""
    from torch.distributed.utils import _apply_to_tensors

    def cast(tensor: Tensor) -> Tensor:
        same = not tensor.is_floating_point() or tensor.dtype == dtype
        return tensor if same else tensor.to(dtype)

    return value if dtype is None else _apply_to_tensors(cast, value)


def to_device(value: object, device: torch.device) -> Any:
    """The tensors within ``value`` on ``device``."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(lambda tensor: tensor.to(device), value)


def unsharding_methods() -> tuple[tuple[type, str], ...]:
    """What a user calls to gather a module's parameters by hand."""
    module: object = sys.modules.get(_MODULE)
    return () if module is None else ((module.FSDPModule, "unshard"),)


def resharding_methods() -> tuple[tuple[type, str], ...]:
    """And to drop them again."""
    module: object = sys.modules.get(_MODULE)
    return () if module is None else ((module.FSDPModule, "reshard"),)


def _state_of(module: nn.Module) -> object:
    if _MODULE not in sys.modules:
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def _states_within(models: Iterable[nn.Module]) -> list[tuple[object, bool]]:
    """All states of the models, in the order of their modules, and whether each is an outermost
    one: inside no other, in any of the models."""
    found: dict[int, object] = {}
    inner: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    pending = [(model, None) for model in reversed(list(models))]
    while pending:
        module, around = pending.pop()
        if (id(module), around is None) in seen:
            continue
        seen.add((id(module), around is None))
        state = _state_of(module)
        if state is not None:
            found.setdefault(id(state), state)
            if around is not None and around is not state:
                inner.add(id(state))
        outermost = state if around is None else around
        pending += [(child, outermost) for child in reversed(list(module.children()))]
    return [(state, key not in inner) for key, state in found.items()]


def _drops(state: Any, group: Any, *, is_outer: bool) -> bool:
    """Whether parameters of ``group`` are not kept from the forward to the backward pass. Unless it
    was told, the outermost module keeps its own: it is the first to need them again."""
    if is_outer and state._auto_reshard_after_forward:
        return False
    return group.post_forward_mesh_info is not None


def _groups(state: object) -> list[Any]:
    """The groups of a state: one, in versions before there could be several."""
    kept = vars(state)
    several = kept.get("_fsdp_param_groups")
    found = [kept["_fsdp_param_group"]] if several is None else several
    return [each for each in found if each is not None]


def _plan(state: Any, *, is_outer: bool) -> ShardedStatePlan:
    policy = state._mp_policy
    groups = _groups(state)
    return ShardedStatePlan(
        state,
        tuple(state._modules),
        tuple([_group_plan(each, drops=_drops(state, each, is_outer=is_outer)) for each in groups]),
        torch.device(state._device),
        policy.param_dtype if policy.cast_forward_inputs else None,
        policy.output_dtype,
    )


def _group_plan(group: Any, *, drops: bool) -> ShardedGroupPlan:
    mesh = vars(group.mesh_info)
    return ShardedGroupPlan(
        group,
        tuple(map(_parameter_plan, group.fsdp_params, _policies(group))),
        mesh.get("shard_process_group"),
        mesh.get("replicate_process_group"),
        drops,
    )


def _policies(group: Any) -> list[object]:
    """The dtypes of each parameter: of its group, in versions before it had its own."""
    kept = vars(group).get("mp_policy")
    return [vars(each)["mp_policy"] if kept is None else kept for each in group.fsdp_params]


def _parameter_plan(parameter: Any, policy: Any) -> ShardedParameterPlan:
    kept, place = vars(parameter), parameter._module_info
    spec = kept.get("_unsharded_dtensor_spec") or kept.get("_tp_spec")
    shared = zip(place.shared_modules, place.shared_param_names, strict=True)
    dim = parameter.fsdp_placement.dim
    return ShardedParameterPlan(
        parameter.sharded_param,
        ((place.module, place.param_name), *shared),
        tuple(parameter._orig_size),
        dim,
        parameter.padded_sharded_param_size[dim],
        None if spec is None else ShardedLayout(spec),
        policy.param_dtype,
        policy.reduce_dtype,
    )


def _handles(state: Any) -> list[RemovableHandle]:
    both = state._pre_forward_hook_handle, state._post_forward_hook_handle
    found: dict[int, RemovableHandle] = {}
    for handle in both:
        several = vars(handle).get("handles", (handle,))
        found |= {each.id: each for each in several}
    return list(found.values())


def _beyond(group: Any) -> list[tuple[bool, str]]:
    kept, mesh = vars(group), vars(group.mesh_info)
    held = [each._sharded_local_tensor for each in group.fsdp_params]
    sends = [type(kept[name]).__name__ for name in ("_all_gather_comm", "_reduce_scatter_comm")]
    in_part = "replicate_process_group" in mesh and kept["reduce_grads"] > kept["all_reduce_grads"]
    return [
        (kept["_all_reduce_hook"] is not None, "a hook after its reduction"),
        (sends != ["DefaultAllGather", "DefaultReduceScatter"], "custom communication"),
        (any(hasattr(each, "fsdp_pre_all_gather") for each in held), "an all-gather of one's own"),
        (any(each.offload_to_cpu for each in group.fsdp_params), "parameters on the host"),
        (in_part, "gradients that are reduced in part"),
        (bool(kept.get("reduce_scatter_unused_params")), "gradients for unused parameters"),
        (bool(mesh.get("is_spmd_mesh")), "dimensions of one mesh (dp_mesh_dims)"),
        (any(map(_keeps_gradient, group.fsdp_params)), "gradients that were not reduced"),
        (len({each.mesh_info is group.mesh_info for each in group.fsdp_params}) > 1, "two meshes"),
    ]


def _keeps_gradient(parameter: Any) -> bool:
    whole = vars(parameter).get("_unsharded_param")
    kept = parameter.unsharded_accumulated_grad is not None
    return kept or (whole is not None and whole.grad is not None)
