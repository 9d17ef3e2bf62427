"""A compiled step among the ranks of its process groups: the same on all of them, or on none.

::

    x: f32[4, 8]  # batch                                 the graph as it was captured,
    mm: f32[4, 2] = mm(x, w)                              with the user's line of each node
    all_reduce: f32[16] = all_reduce(mul, sum, group 0)
    ...
    communication 1: treadle_c10d.all_reduce.out(f32[16], sum, group 0)
    communication 2: treadle_c10d.wait.out(f32[16])       what runs in the end: buckets, and order

Kernels need not be the same: hosts may differ in their processors.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, distributed, fx, nn
from torch.nn.parallel import DistributedDataParallel

from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.capture.refuse import device_of
from treadle.compat.distributed.collectives import collective_op, group_named, name_of_group
from treadle.compat.distributed.data_parallel import plan_of
from treadle.compat.distributed.fully_sharded import plans_of
from treadle.compat.operators.operator_facts import Effect, facts_by_name
from treadle.compiler.compiled import Compiled
from treadle.graph.core.collectives import collective_of, collectives_in, is_same_on_all_ranks
from treadle.graph.core.node_info import info
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import short_dtype
from treadle.graph.text.printing import show
from treadle.runtime.ranks.peers import Peers, peers_of
from treadle.runtime.ranks.votes import VariantText
from treadle.runtime.store.artifact import Artifact, CallStep, View
from treadle.util.errors import TreadleError
from treadle.util.nested import leaves

_NO_LINE = "a call, which has no line"


def groups_of(step: StepGraph) -> tuple[str, ...]:
    """The names of the groups of more than one rank in which the step communicates."""
    names = dict.fromkeys(collective.group for collective in collectives_in(step.graph))
    return tuple([name for name in names if group_named(name).size() > 1])


def common_text(step: StepGraph, artifact: Artifact) -> VariantText:
    """What all ranks have to have in common of a step: its graph, and what runs. Only what they
    send, where each holds a part of its own, whose sizes and offsets are in its graph."""
    alike = is_same_on_all_ranks(step)
    names = dict.fromkeys(collective.group for collective in collectives_in(step.graph))
    numbers = {name: f"group {at}" for at, name in enumerate(names)}  # names are a rank's own
    inputs = [f"{entry.role} {entry.name}" for entry in step.signature.inputs]
    texts = show(step).splitlines() if alike else inputs  # sizes differ where ranks have parts
    nodes = _nodes_by_line(step, len(texts)) if alike else [None] * len(texts)
    lines = [_line(text, node, numbers) for text, node in zip(texts, nodes, strict=True)]
    wheres = ["" if node is None else info(node).where for node in nodes]
    sent = [
        (_step_line(line_step, numbers), line_step.origin)
        for line_step in artifact.steps
        if isinstance(line_step, CallStep)
        and _communicates(line_step)
        and (alike or not _waits(line_step))
    ]
    lines += [f"communication {at}: {text}" for at, (text, _) in enumerate(sent, 1)]
    return VariantText(tuple(lines), tuple(wheres + [where for _, where in sent]))


def _nodes_by_line(step: StepGraph, count: int) -> list[fx.Node | None]:
    """The node that each line of ``show`` is about."""
    inputs: list[fx.Node | None] = [node for node, _ in step.inputs()]
    others = [node for node in step.graph.nodes if node.op not in ("placeholder", "output")]
    nodes = inputs + others
    return nodes + [None] * (count - len(nodes))


def _line(text: str, node: fx.Node | None, groups: Mapping[str, str]) -> str:
    if node is None:
        return text
    if node.op == "get_attr":
        return f"{text}  # {_digest(node)}"
    started = collective_of(node)
    if started is None:
        return text
    return text.removesuffix(f"{started.group})") + f"{groups[started.group]})"


def _digest(node: fx.Node) -> str:
    """Of the values of a constant."""
    owner = node.graph.owning_module
    value = None if owner is None else _attribute(owner, str(node.target))
    if not isinstance(value, Tensor):
        return repr(value)
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def _attribute(owner: nn.Module, path: str) -> object:
    holder, _, name = path.rpartition(".")
    return vars(owner.get_submodule(holder)).get(name) or dict(owner.named_buffers()).get(path)


def _communicates(step: CallStep) -> bool:
    return Effect.COMMUNICATES in facts_by_name(step.op).effects


def _waits(step: CallStep) -> bool:
    """Whether it waits: when a rank does that is its own matter."""
    return step.op == str(collective_op("wait_tensor"))


def _step_line(step: CallStep, groups: Mapping[str, str]) -> str:
    arguments = [
        _argument(argument, groups) for argument in leaves(step.args, *step.kwargs.values())
    ]
    return f"{step.out or step.op}({', '.join(arguments)})"


def _argument(value: object, groups: Mapping[str, str]) -> str:
    if isinstance(value, View):
        return f"{short_dtype(value.dtype)}{list(value.shape)}"
    return groups.get(value, value) if isinstance(value, str) else str(value)


def peers_in(compiled: Compiled) -> list[Peers]:
    """The other ranks of each group in which a step communicates."""
    device = torch.device(compiled.artifact.device)
    return [peers_of(group_named(name), device) for name in compiled.groups]


def tell_ranks(compiled: Compiled | None, error: BaseException) -> None:
    """A call that was to run as ``compiled`` raised ``error`` on this rank, before it began among
    the ranks or as it ran eagerly."""
    for peer in peers_in(compiled) if compiled is not None else ():
        peer.raised(error)


def tell_refusal(
    models: Mapping[str, nn.Module],
    group: RankGroup | None,
    last: Compiled | None,
    error: Exception,
) -> None:
    """A call cannot become a step on this rank. Ranks whose calls fail alike lose nothing by it;
    on those that run a step it is TR-502, before or within its first collective. ``last``: the
    variant before, whose groups are asked; else those of ``group`` and of the wrappers."""
    known = last.groups if last is not None else ()
    groups = [group_named(name) for name in known] or _groups_around(models, group)
    if isinstance(error, TreadleError):
        kind, where = error.code, f"{error.where or _NO_LINE}: {error.message}"
    else:
        kind, where = type(error).__name__, f"{error}".partition("\n")[0]
    text = VariantText((f"no step: {kind}",), (where,))
    for process_group in groups:
        peers_of(process_group, device_of(models)).refused(text)


def _groups_around(
    models: Mapping[str, nn.Module], group: RankGroup | None
) -> "list[distributed.ProcessGroup]":
    """Those of more than one rank that a step of these models will communicate in."""
    candidates: list[Any] = [] if group is None else [group_named(group.name)]
    modules = {module for model in models.values() for module in model.modules()}
    candidates += [
        plan_of(module).group for module in modules if isinstance(module, DistributedDataParallel)
    ]
    for plan in plans_of(models.values()):
        candidates += [name for group in plan.groups for name in (group.gathers, group.copies)]
    by_name = {
        name_of_group(candidate): candidate
        for candidate in candidates
        if candidate is not None and candidate.size() > 1
    }
    return [by_name[name] for name in sorted(by_name)]


def agree_on_start(models: Mapping[str, nn.Module], group: RankGroup) -> None:
    """Before ranks get the first one's parameters and buffers: they have the same of them."""
    held = [
        (f"{name}.{path}" if name else path, tensor)
        for name, model in models.items()
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    if group.ranks == 1 or not held:
        return
    lines = [f"{name}: {short_dtype(tensor.dtype)}{list(tensor.shape)}" for name, tensor in held]
    text = VariantText(("start with:", *lines), ("",) * (len(lines) + 1))
    peers = peers_of(group_named(group.name), held[0][1].device)
    peers.begin(text)
    peers.end()


@final
class RankCall:
    """One call of a variant among the ranks of its groups; of one that does not communicate,
    nothing. ``begin``, then ``end``, or ``failed`` if the call fails."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._peers: Sequence[Peers] = ()

    def begin(self) -> None:
        """All ranks are about to run the same: TR-502 to TR-506 on each of them otherwise."""
        common = self._compiled.common
        if common is not None:
            self._peers = peers_in(self._compiled)
            for peer in self._peers:
                peer.begin(common)

    def end(self) -> None:
        """This rank has done its part."""
        for peer in self._peers:
            peer.end()

    def failed(self, error: BaseException) -> None:
        """The others need not wait for this rank."""
        for peer in self._peers:
            peer.raised(error)
