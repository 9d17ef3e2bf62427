"""The target of a compile: the device, the options, and the facts about them that are in a key."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from treadle.compat.switches import switches
from treadle.compiler.measured.ceilings import ceilings
from treadle.compiler.measured.operation_times import OperationTimes
from treadle.graph.text.canonical import text_of_value
from treadle.options import Options, deciding
from treadle.passes.registered import registered_late
from treadle.runtime.kernels.build import Build, build
from treadle.runtime.machine import Machine, machine
from treadle.runtime.store.cache import Cache
from treadle.runtime.workspace import Workspaces
from treadle.targets.measure import to_words
from treadle.targets.model import DeviceModel
from treadle.targets.record import DeviceTarget
from treadle.targets.registry import model_for, target_for

if TYPE_CHECKING:  # only a compile has them
    from treadle.passes.comm.cost import CommunicationModel
    from treadle.runtime.kernels.tune import Trials


@dataclass(frozen=True)
class Target:
    """Where a step is to run: the device, the options, whether PyTorch's kernels must do
    (``library``), and how to learn what library calls allocate inside, and how long they take
    (``None``: not at all).
    ``like``: the device to estimate for, where it is another; ``ceilings``: what was measured of
    this one. ``trials``: how to learn which schedule of a kernel is fastest. ``kept``: bytes that
    are there while the step runs, beside its own. ``communication``: what its collectives cost,
    the same on all ranks; ``None`` if it has none."""

    device: str
    options: Options
    library: bool = False
    workspaces: Workspaces | None = None
    times: OperationTimes | None = None
    like: str = ""
    kept: int = 0
    ceilings: DeviceModel | None = None
    trials: "Trials | None" = None
    communication: "CommunicationModel | None" = None

    @property
    def rounds_once(self) -> bool:
        """Whether several of eager's operations may share one rounding."""
        return self.options.numerics != "eager"

    @property
    def record(self) -> DeviceTarget:
        """What is known of that kind of device."""
        return target_for(self.device, self.options.target)

    @property
    def hardware(self) -> DeviceModel:
        """The description that costs are estimated with."""
        model = model_for(self.like) if self.like else self.ceilings or self.record.model
        return replace(model, reserve=model.reserve + self.kept)


def facts_beside(target: Target, here: Machine) -> dict[str, str]:
    """Those that are not of the step itself."""
    return {
        "device": target.device,
        "like": target.like,
        "kept": str(target.kept),
        "ceilings": json.dumps(to_words(target.hardware), sort_keys=True),
        "communication": repr(target.communication or ""),
        "passes": ", ".join(map(repr, registered_late())),
        "kernels": "PyTorch's" if target.library else "generated",
        **{name: text_of_value(value) for name, value in deciding(target.options).items()},
        **here.facts,
    }


def target_of(
    device: str, options: Options, build: Build, *, cache: Cache, kept: int = 0
) -> tuple[Target, Machine]:
    """Where a step is to run, and on what; ``kept``: as of the target."""
    here = machine(torch.device(device), switches(), build.identity)
    target = Target(
        device,
        options.decisive(),
        library=not build.generates,
        workspaces=Workspaces(cache, device, here.identity),
        times=OperationTimes(cache, device, here.speed),
        kept=kept,
    )
    by_rates = options.measure and not target.record.on_host
    if by_rates or options.method.estimator == "measured":
        target = replace(target, ceilings=ceilings(target.record, device, cache, here))
    return target, here


def build_for(device: str, options: Options, cache: Cache) -> Build:
    """What makes functions of generated code on ``device``; nothing where none is wanted."""
    if not options.codegen:
        return Build.without_compiler()
    return build(cache, device=device, target=options.target)


def key_of(facts: Mapping[str, str]) -> str:
    """Same facts, same artifact, in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
