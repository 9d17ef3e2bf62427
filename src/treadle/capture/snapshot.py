"""Copies of what a step may change, so that a trial run can be rolled back."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.python_state.container_parts import Entries
from treadle.capture.python_state.reads.object_graph import Location, Node, Watched
from treadle.capture.symbolic.host_draws import put_states, states
from treadle.compat.distributed.sharded_tensors import layout_of


class Snapshot:
    """Parameters, buffers, gradients, optimizer state and hyper-parameters, other tensors and
    places that are given, and the random generators. ``restore`` keeps every tensor object as it
    was."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        others: Sequence[Tensor] = (),
        places: Sequence[Location] = (),
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        slots = [
            _buffer(module, name)
            for model in models.values()
            for module in model.modules()
            for name in module._buffers
        ]
        self._places = [(place, place.get()) for place in (*slots, *places)]
        parameters = [p for model in models.values() for p in model.parameters()]
        buffers = [b for model in models.values() for b in model.buffers()]
        self._grads = [(p, p.grad) for p in parameters]
        grads = [p.grad for p in parameters if p.grad is not None]
        leaves = [other for other in others if other.is_leaf and layout_of(other) is None]
        self._others = [(t, t.detach(), t.requires_grad, t.grad) for t in leaves]
        grads += [leaf.grad for leaf in leaves if leaf.grad is not None]
        self._states = [(optimizer, _state_of(optimizer)) for optimizer in optimizers.values()]
        state = [
            value
            for _, entries in self._states
            for entry in entries.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        ]
        tensors = {id(t): t for t in [*parameters, *buffers, *grads, *state, *others]}
        self._values = [(t, t.detach().clone()) for t in tensors.values()]
        self._groups = [
            (group, {key: value for key, value in group.items() if key != "params"})
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
        ]
        self._random = torch.get_rng_state()
        self._host = states()
        self._own = [(generator, generator.get_state()) for generator in generators]
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Restore everything."""
        for tensor, memory, flag, grad in self._others:
            tensor.data = memory
            tensor.requires_grad_(flag)
            tensor.grad = grad
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        for place, value in self._places:
            place.put(value)
        for parameter, grad in self._grads:
            parameter.grad = grad
        for optimizer, entries in self._states:
            optimizer.state.clear()
            optimizer.state.update({key: dict(entry) for key, entry in entries.items()})
        for group, values in self._groups:
            group.update(values)
        self.restore_random()

    def restore_random(self) -> None:
        """Restore only the random generators."""
        torch.set_rng_state(self._random)
        put_states(self._host)
        for generator, state in self._own:
            generator.set_state(state)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _buffer(module: nn.Module, name: str) -> Location:
    node = Node(dict, name, module._buffers)
    node.watched.append(Watched(Entries(name, module._buffers), None, {}))
    return Location(node, 0, name, name)


def _state_of(optimizer: Optimizer) -> dict[Tensor, dict[str, object]]:
    return {parameter: dict(entry) for parameter, entry in optimizer.state.items()}
