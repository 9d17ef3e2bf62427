"""``fully_shard`` inside a traced run: what its hooks would do becomes part of the graph.

Before the forward of a module, each of its parameters, of which this rank holds a part::

    c = convert(p)                      to the policy's param_dtype
    f = wait(all_gather(pad(c)))        the parts of all ranks, one below the other
    w = f[:rows]                        without the padding: what the module computes with

and where the gradient of ``w`` is final::

    s = wait(reduce_scatter(pad(g)))    in the policy's reduce_dtype: the mean over ranks
    p.grad += convert(s[:own rows])

(Zhao et al., 2023; Rajbhandari et al., 2020, stage 3.) After a forward the module holds its parts
again. Which parameters are gathered again for the backward pass (``reshard_after_forward``) is
decided on the graph, by ``passes/comm/sharding/gather_again.py``; this module records where each
group is gathered.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.explain_errors import here
from treadle.capture.integrations.integration import Integration, Patch, TracedRun
from treadle.compat.distributed.collectives import collective_op, name_of_group
from treadle.compat.distributed.fully_sharded import (
    ShardedGroupPlan,
    ShardedParameterPlan,
    ShardedStatePlan,
    plans_of,
    resharding_methods,
    sharded_facts,
    to_device,
    to_dtype,
    unsharding_methods,
)
from treadle.compat.distributed.sharded_tensors import draw_methods, layout_of, local_of, placed_as
from treadle.compat.tracing import traced_nodes
from treadle.targets.registry import target_for
from treadle.util.errors import CaptureError

GatherSpan = tuple[tuple[int, int], int]
"""The nodes of a trace between which a parameter is gathered, and a number shared by the parameters
of its group that are gathered for the same forward."""
_EXACT = (torch.float32, torch.bfloat16)
"""Dtypes in which a sum over ranks does not overflow before it is divided."""


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients become means: ``before`` and ``after`` divide, ``op`` joins."""

    before: float = 1.0
    op: str = "sum"
    after: float = 1.0


def reduction_of(plan: ShardedGroupPlan, dtype: torch.dtype) -> Reduction:
    """The division of ``fully_shard``, so that rounding is the same: the backend's own mean where
    that is safe, otherwise partly before and partly after the sum, both near the square root."""
    groups = [gathers for gathers in (plan.gathers, plan.copies) if gathers is not None]
    ranks = 1
    for group in groups:
        ranks *= group.size()
    if dtype in _EXACT and not plan.only_sums:
        if plan.divisor is None:
            return Reduction(op="avg" if ranks > 1 else "sum")
        return Reduction(before=plan.divisor)
    total = float(ranks) if plan.divisor is None else plan.divisor
    if dtype in _EXACT:
        return Reduction(after=total)
    before = 1.0
    while total % before == 0 and total / before > before:
        before *= 2
    return Reduction(before, "sum", total / before)


class _Gathered(torch.autograd.Function):
    """The whole parameter from the parts of all ranks; backward, the mean of their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, held: "_Held") -> Tensor:
        ctx.held, ctx.dtype, ctx.layout = held, part.dtype, layout_of(part)
        ctx.rows, layout = local_of(part).shape[held.plan.dim], held.plan.layout
        whole = _gather(local_of(part).detach(), held.plan, held.group)
        return whole if layout is None else layout.with_dtype(whole.dtype).around(whole)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, None]:
        held: _Held = ctx.held
        (grad,) = grads
        plan, group = held.plan, held.group
        if plan.layout is not None:
            grad = local_of(placed_as(grad, plan.layout))
        if plan.reduce_dtype is not None:
            grad = grad.to(plan.reduce_dtype)
        grad = grad if held.kept is None else held.kept + grad
        held.kept = None if group.reduces else grad
        if not group.reduces:
            return None, None
        _check(group)
        mean = _reduce(grad, plan, group).to(ctx.dtype)
        return ctx.layout.around(mean.narrow(plan.dim, 0, ctx.rows)), None


def _gather(part: Tensor, plan: ShardedParameterPlan, group: ShardedGroupPlan) -> Tensor:
    if plan.param_dtype is not None and part.is_floating_point():
        part = part.to(plan.param_dtype)
    ranks = group_of_ranks(group.gathers)
    if ranks is None:
        return part.clone()
    padded = _padded(part, plan.dim, plan.rows)
    start, wait = collective_op("all_gather_into_tensor"), collective_op("wait_tensor")
    parts = wait(start(padded, ranks.ranks, ranks.name))
    if plan.dim:
        parts = torch.cat(parts.chunk(ranks.ranks), plan.dim)
    return parts.narrow(plan.dim, 0, plan.shape[plan.dim])


def _reduce(grad: Tensor, plan: ShardedParameterPlan, group: ShardedGroupPlan) -> Tensor:
    """The part here of the mean of the gradients, padded still."""
    divided = reduction_of(group, grad.dtype)
    grad = _divided(grad, divided.before)
    ranks, copies = group_of_ranks(group.gathers), group_of_ranks(group.copies)
    wait = collective_op("wait_tensor")
    if ranks is not None:
        grad = _padded(grad, plan.dim, ranks.ranks * plan.rows)
        grad = torch.cat(grad.chunk(ranks.ranks, plan.dim)) if plan.dim else grad.contiguous()
        start = collective_op("reduce_scatter_tensor")
        grad = wait(start(grad, divided.op, ranks.ranks, ranks.name))
    if copies is not None:
        grad = wait(collective_op("all_reduce")(grad, divided.op, copies.name))
    return _divided(grad, divided.after)


def group_of_ranks(group: distributed.ProcessGroup | None) -> RankGroup | None:
    """A process group of a plan; ``None`` where there is no other rank."""
    if group is None or group.size() == 1:
        return None
    return RankGroup(name_of_group(group), group.size())


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """``x`` with zeros appended, up to so many rows."""
    missing = rows - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _divided(x: Tensor, by: float) -> Tensor:
    return x if by == 1 else x / by


@final
@dataclass(frozen=True, slots=True, eq=False)
class _GatheredWhole:
    """A gathered parameter, and the part that it was gathered from, with or without a gradient."""

    whole: Tensor
    of: tuple[int, int, bool]


@final
@dataclass(slots=True, eq=False)
class _Held:
    """A parameter of a group while a step is traced. ``part``: the tensor that is traced in its
    place; ``note`` is called with the span in which a parameter is gathered that is dropped after a
    forward; ``times``: how often it was gathered. ``kept``: the gradient of the whole parameter, if
    a backward was not to reduce it."""

    plan: ShardedParameterPlan
    group: ShardedGroupPlan
    part: Tensor
    note: "Callable[[tuple[int, int], _Held], None]"
    times: int = 0
    gathered: _GatheredWhole | None = None
    kept: Tensor | None = None

    def gather(self) -> None:
        """Make modules hold the whole parameter. It is gathered again only if it may have
        changed."""
        wanted = self.part.requires_grad and torch.is_grad_enabled()
        now = self.part._version, local_of(self.part)._version, wanted
        if self.gathered is None or self.gathered.of != now:
            start = traced_nodes()
            self.gathered = _GatheredWhole(_Gathered.apply(self.part, self), now)
            if self.group.drops:
                self.note((start, traced_nodes()), self)
            self.times += 1
        self._put(self.gathered.whole)

    def show(self) -> None:
        """Make modules hold the parameter that was gathered last, if any."""
        if self.gathered is not None:
            self._put(self.gathered.whole)

    def drop(self) -> None:
        """Make modules hold the part."""
        self._put(self.part)

    def _put(self, value: Any) -> None:
        for module, name in self.plan.places:
            module._parameters[name] = value


@final
class _Forward:
    """What one state does around the forwards of its modules."""

    def __init__(self, plan: ShardedStatePlan, model: "_ShardedModel") -> None:
        self.held = [
            _Held(parameter, group, _now(parameter), model.note)
            for group in plan.groups
            for parameter in group.parameters
        ]
        self._plan = plan
        self._model = model
        self._left: set[int] = set()  # modules that have to run before it drops what it gathered
        self._depth = 0  # forwards of its own that run, one within another

    def before(self, module: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        """Gather, and convert the module's inputs."""
        for group in self._plan.groups:
            _check(group)
        self._depth += 1
        self._left = self._left or set(map(id, self._plan.modules))
        if self._model.outer is None:
            self._model.outer = self
            if not target_for(self._plan.device).on_host:
                args, kwargs = to_device((args, kwargs), self._plan.device)
        for held in self.held:
            held.gather()
        return to_dtype((args, kwargs), self._plan.input_dtype)

    def after(self, module: nn.Module, args: object, result: object) -> object:
        """Drop what was gathered, and convert the module's outputs."""
        self._depth -= 1
        self._left.discard(id(module))
        if not self._left and not self._depth:
            self.drop()
        if self._model.outer is self and not self._depth:
            self._model.outer = None
            self._model.drop()
        return to_dtype(result, self._plan.output_dtype)

    def drop(self) -> None:
        """Make its modules hold parts."""
        self._left.clear()
        for held in self.held:
            held.drop()


@final
class _ShardedModel:
    """All states of the models of a step. ``outer``: the one whose forward runs, around others;
    ``spans`` gets where what is dropped after a forward is gathered."""

    def __init__(self, plans: Iterable[ShardedStatePlan], spans: list[GatherSpan]) -> None:
        self.outer: _Forward | None = None
        self._spans = spans
        self._numbers: dict[tuple[ShardedGroupPlan, int], int] = {}
        self.states = {id(plan.state): _Forward(plan, self) for plan in plans}

    def note(self, span: tuple[int, int], held: _Held) -> None:
        """Note that a parameter is gathered in ``span``."""
        number = self._numbers.setdefault((held.group, held.times), len(self._numbers))
        self._spans.append((span, number))

    def drop(self) -> None:
        """Make all modules hold parts."""
        for state in self.states.values():
            state.drop()

    def keeps(self) -> bool:
        """Whether a gradient is left that nobody has reduced."""
        return any(held.kept is not None for state in self.states.values() for held in state.held)

    def runs_again(self, begins: bool) -> None:
        """Called when a checkpointed region begins or ends to run again in a backward; its modules
        were gathered when it ran first."""
        if not begins:
            self.drop()
            return
        for state in self.states.values():
            for held in state.held:
                held.show()


@contextmanager
def fully_sharded(
    models: Mapping[str, nn.Module], spans: list[GatherSpan]
) -> Iterator[Callable[[bool], None]]:
    """Inside, modules that were given to ``fully_shard`` behave as described above. Returns the
    function to call when a checkpointed region begins and ends to run again. The modules hold
    traced tensors already. ``spans`` gets the spans in which parameters are gathered that are
    dropped after a forward."""
    plans = plans_of(models.values())
    sharded = _ShardedModel(plans, spans)
    with ExitStack() as undo:
        for plan in plans:
            forward = sharded.states[id(plan.state)]
            for held, key, is_before in plan.hooks():
                _put(undo, held, key, forward.before if is_before else forward.after)
            for name, ours in plan.methods(forward.before, forward.after).items():
                _put(undo, vars(plan.state), name, ours)
        undo.callback(sharded.drop)
        facts = sharded_facts(models.values())
        yield sharded.runs_again
        if sharded.keeps() or facts != sharded_facts(models.values()):
            raise _accumulates()


def _put(undo: ExitStack, target: Any, key: object, value: object) -> None:
    if key in target:
        undo.callback(target.__setitem__, key, target[key])
    else:
        undo.callback(target.pop, key, None)
    target[key] = value


def _now(plan: ShardedParameterPlan) -> Any:
    """The tensor that its modules hold now."""
    module, name = plan.places[0]
    return module._parameters[name]


def _refuse_unshard(module: nn.Module, *_: object, **__: object) -> None:
    """The replacement of ``unshard``."""
    raise CaptureError(
        f"the step calls {type(module).__name__}.unshard(), and treadle cannot follow what it "
        "gathers",
        code="TR-513",
        where=here(),
        remedy="remove the call: treadle decides for the whole step when a parameter is gathered",
    )


def _refuse_draws(*_: object, **__: object) -> None:
    """The replacement of DTensor's handling of random draws."""
    raise CaptureError(
        "the step draws random numbers for a DTensor, where each rank takes its part of one "
        "random stream of the device",
        code="TR-515",
        where=here(),
        remedy=(
            "draw for this rank's shard (use_local_output=True, x.to_local()), with generators "
            "that you seed on each rank"
        ),
    )


def _nothing(*_: object, **__: object) -> None:
    """The replacement of ``reshard``: modules hold parts between forwards anyway."""


def _check(group: ShardedGroupPlan) -> None:
    """TR-511 if a group uses a feature of ``fully_shard`` that its plan does not cover."""
    if group.beyond:
        raise CaptureError(
            f"fully_shard has {' and '.join(group.beyond)} for {group.name}, which treadle "
            "cannot capture",
            code="TR-511",
            where=here(),
            remedy="do not use it in a compiled step",
        )


def _accumulates() -> CaptureError:
    return CaptureError(
        "the step ends while set_requires_gradient_sync(False) keeps unsharded gradients in the "
        "model, where no later call would find them",
        code="TR-512",
        remedy=(
            "call set_requires_gradient_sync(True) before the last backward of the step, or "
            "leave it on: gradients then accumulate in .grad"
        ),
    )


def _patches(_: TracedRun) -> Iterable[Patch]:
    for methods, ours in (
        (unsharding_methods, _refuse_unshard),
        (resharding_methods, _nothing),
        (draw_methods, _refuse_draws),
    ):
        for owner, name in methods():
            yield owner, name, ours


FULLY_SHARDED = Integration(name="torch.distributed.fsdp", patches=_patches)
