"""From the steps of an artifact to the actions of a call: done once, before the first call.

::

    launch    allocate the buffers that it fills; call the function with its arrays of pointers
    call      allocate what its out-variant writes; call the operator on its arguments
    import    copy an input from the host
    each      then let go of the buffers that nothing reads any more
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

import treadle.runtime.execute.host_copies  # pyright: ignore[reportUnusedImport]
import treadle.runtime.kernels.packed  # pyright: ignore[reportUnusedImport]
import treadle.runtime.kernels.recurrent_cudnn  # pyright: ignore[reportUnusedImport]
import treadle.runtime.kernels.recurrent_onednn  # pyright: ignore[reportUnusedImport]
import treadle.runtime.ranks.collectives  # noqa: F401  # pyright: ignore[reportUnusedImport]
from treadle.compat.operators.operator_facts import Effect, facts_by_name
from treadle.compat.operators.schemas import direct_call
from treadle.runtime.execute.actions import Action, Actions
from treadle.runtime.execute.bindings import Bindings, Live, sizes_array, whole
from treadle.runtime.execute.functional import updating
from treadle.runtime.execute.halves import widened
from treadle.runtime.execute.incoming import INCOMING, Incoming, imported
from treadle.runtime.execute.library_calls import CallAllocating, CallInto, resolve
from treadle.runtime.execute.loops import RUNNERS, Repeatable
from treadle.runtime.kernels.launch_table import NativeLaunch
from treadle.runtime.kernels.loader import Functions
from treadle.runtime.kernels.rng import FUNCTION, OPERATOR, drawer
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Launch, Storage
from treadle.util.errors import RuntimeFailure
from treadle.util.expected import require_expected


@final
@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything needed to make actions of an artifact's steps. ``programs``: those of its loops,
    by name; ``filled``: the buffers of calls that a step has filled so far."""

    artifact: Artifact
    functions: Functions
    programs: Mapping[str, Repeatable]
    bindings: Bindings
    live: Live
    incoming: Incoming
    filled: set[str] = field(default_factory=set[str])

    def actions(self) -> Actions:
        """All of them."""
        actions = Actions(self.artifact, self.functions.joiners)
        results = {view.buffer for view in self.artifact.results if view is not None}
        releases = self.artifact.releases or ((),) * len(self.artifact.steps)
        for index, step in enumerate(self.artifact.steps):
            actions.add(index, self._step(step))
            dead = tuple(name for name in releases[index] if name not in results)
            if dead:
                actions.add(index, [functools.partial(self.live.release, dead)])
        return actions

    def unfilled(self) -> list[BufferSpec]:
        """After ``actions``: buffers without elements, which no step fills."""
        specs = self.artifact.buffers.values()
        empty = [spec for spec in specs if spec.place is Storage.CALL and 0 in spec.shape]
        return [spec for spec in empty if spec.name not in self.filled]

    def _step(self, step: Launch | CallStep) -> list[Action]:
        host_input = imported(self.artifact, step)
        if isinstance(step, Launch):
            return self._launch(step)
        if host_input is not None:
            self.filled.update(name for name in step.outputs if name is not None)
            return [functools.partial(self.incoming.fill, host_input)]
        return self._call(step)

    def _launch(self, step: Launch) -> list[Action]:
        actions = self._allocations([name for row in step.buffers for name in row])
        native = self.functions.native.get(step.function)
        if native is not None:
            arrays = self.bindings.pointers(step.buffers), sizes_array(step.sizes)
            return [*actions, NativeLaunch(native, *arrays, len(step.buffers))]
        function = self.functions.device.get(step.function)
        if function is None:
            raise RuntimeFailure(f"no source defines {step.function}", code="TR-402")
        storages = self.bindings.storages(step.buffers)
        pointers = self.bindings.pointers(step.buffers) if self.functions.joiners else None
        return [*actions, function(storages, step.sizes, pointers)]

    def _call(self, step: CallStep) -> list[Action]:
        args: list[object] = [None] * len(step.args)
        kwargs: dict[str, object] = {}
        for position, value in enumerate(step.args):
            self.bindings.argument(value, (args, position))
        for name, value in step.kwargs.items():
            self.bindings.argument(value, (kwargs, name))
        name = step.outputs[0] if step.out and step.outputs else None
        if name is not None:
            actions = self._allocations([name])
            target = step.into or whole(self.artifact.buffers[name])
            self.bindings.argument(target, (kwargs, "out"))
            return [*actions, CallInto(self._operator(step.out), args, kwargs, target)]
        own = step.outputs[: len(step.outputs) - len(step.updates)]
        into = step.outputs[len(own) :]
        allocations = self._allocations([output for output in into if output is not None])
        self.filled.update(output for output in own if output is not None)
        specs = tuple(self.artifact.buffers[o] if o is not None else None for o in own)
        if Effect.CONDITION in facts_by_name(step.op).effects:
            return [functools.partial(_require, args)]
        if step.op == INCOMING:
            op = self.incoming.gradient
        elif step.updates:
            op = updating(step.op.split(".")[1])
            places = tuple(o and whole(self.artifact.buffers[o]) for o in into)
            self.bindings.argument(places, (kwargs, "out"))
        elif step.bodies:
            op = RUNNERS[step.op](step.bodies, self.programs)
        else:
            op = widened(step.op, direct_call(resolve(step.op)))
        return [*allocations, CallAllocating(op, args, kwargs, specs, self.live.define)]

    def _operator(self, name: str) -> Callable[..., object]:
        """PyTorch's operator, or our own on top of a function of the artifact."""
        if name == OPERATOR:
            return drawer(self.functions.native[FUNCTION])
        return direct_call(resolve(name))

    def _allocations(self, names: Sequence[str]) -> list[Action]:
        """Actions that allocate the buffers of ``Storage.CALL`` that no step has filled yet."""
        specs = [self.artifact.buffers[name] for name in dict.fromkeys(names)]
        new = [s for s in specs if s.place is Storage.CALL and s.name not in self.filled]
        self.filled.update(spec.name for spec in new)
        return [functools.partial(self.live.allocate, spec) for spec in new]


def _require(args: list[object]) -> None:
    """Fails for a list whose tensors are bound at each call, since it has no tensor yet."""
    (holds,) = args
    assert isinstance(holds, Tensor)
    require_expected(holds)
