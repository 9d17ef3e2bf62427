"""The roots from which a later call can find everything that a captured run read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from treadle.capture.python_state.code.frames import CodeOwner
from treadle.capture.python_state.ownership import BUILTINS, LOADED, owner_of
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.compat.hooks import tensor_hooks
from treadle.compat.switches import getters_named


@final
@dataclass(frozen=True, slots=True)
class Globals:
    """Variables of a module that code of the run mentioned. ``whole``: it read all of them.
    ``deep``: whether what they hold is followed."""

    values: dict[str, object]
    names: frozenset[str]
    whole: bool
    deep: bool


@final
@dataclass(frozen=True, slots=True)
class ReadRoots:
    """Beside the function, its models and its optimizers. ``process``: labels of what was asked of
    the process, ``theirs``: names that users' and installed code mentions, ``modules``: those that
    it looked up by name. ``shared``: objects of libraries that it asked for by name, by labels."""

    globals: tuple[Globals, ...]
    process: Mapping[str, Callable[[], object]]
    theirs: frozenset[str]
    seeds: tuple[Generator, ...]
    shared: Mapping[str, object]
    modules: frozenset[str]

    def add_to(
        self,
        walk: ReadsWalk,
        function: Callable[..., object],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
    ) -> None:
        """Add all roots, in an order that is the same in every process, because the walk numbers
        what it meets."""
        for prefix, model in models.items():
            walk.add(prefix, model)
        for prefix, optimizer in optimizers.items():
            walk.add(prefix or "optimizer", optimizer)
        walk.add("", function)
        for model in models.values():
            for name, parameter in model.named_parameters():
                for hook in tensor_hooks(parameter):
                    walk.add(name, hook)
        for variables in self.globals:
            space, names = variables.values, variables.names
            names |= space.keys() - {"__builtins__"} if variables.whole else frozenset[str]()
            there = frozenset(name for name in names if name in space)
            walk.add_names("", space, names, deep=variables.deep)
            walk.add_names("", BUILTINS, names - there, deep=True)
        for label, read in self.process.items():
            walk.add_computed(label, read)
        for name, getter in getters_named(self.theirs):
            walk.add_computed(f"torch.{name}()", getter)
        walk.add("", Tensor)
        for generator in self.seeds:
            walk.add_computed("a generator's initial seed", generator.initial_seed)
        for label, shared in self.shared.items():
            walk.add(label, shared)
        for name in sorted(self.modules & LOADED.keys()):
            if owner_of(LOADED[name]) >= CodeOwner.INSTALLED:
                walk.add(name, LOADED[name])
