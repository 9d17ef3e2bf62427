"""Graphs of Dynamo, AOTAutograd and Inductor."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch._C import _autograd as autograd
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy


def through_autograd(
    module: fx.GraphModule,
    inputs: Sequence[object],
    forward: Callable[..., object],
    backward: Callable[..., object],
    partition: Callable[..., object],
) -> Callable[..., object]:
    """A graph of Dynamo's as a function with a backward: traced jointly, cut by ``partition``, its
    parts compiled by ``forward`` (inference graphs as well) and ``backward``."""
    from torch._dynamo.backends.common import aot_autograd  # late: as above

    compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
    return compiler(module, inputs)


def compile_module(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    """What Inductor makes of ``module``, which returns a tuple of tensors, for inputs like these;
    they may be fake."""
    import torch._inductor  # late: it takes a second to import

    compiled: Any = torch._inductor.compile(module, list(inputs))
    return compiled


def boxed(call: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """``call`` told to AOTAutograd as one that takes its arguments in a list that it may empty."""
    vars(call)["_boxed_call"] = True
    return call


def note_on(module: fx.GraphModule, value: object) -> None:
    """Give a module, and AOTAutograd's copies of it, ``value`` along."""
    module.meta["treadle"] = value


def noted_on(module: fx.GraphModule) -> object:
    """What a module was given along, if anything."""
    return module.meta.get("treadle")


def mutated_inputs(joint: fx.Graph) -> list[int]:
    """Positions of the placeholders of AOTAutograd's joint graph that are written when the forward
    has run; ``InputMutationAOTOutput`` stands for the new value of one among the results."""
    (output,) = joint.find_nodes(op="output")
    places = [node.meta.get("desc") for node in joint.find_nodes(op="placeholder")]
    told = output.meta.get("desc") or ()
    kept = [each for each in told if type(each).__name__ == "InputMutationAOTOutput"]
    return [places.index(each.mutated_input) for each in kept]


def input_kinds(module: fx.GraphModule, inputs: Sequence[object]) -> tuple[str, ...]:
    """What each input of Dynamo's graph is to it: ``"parameter"``, ``"buffer"``, ``"scalar"``, or
    ``""`` for what a call brings. Inputs that belong to a module are static, and no others; of
    these, parameters are ``nn.Parameter``. A number that changes is passed as a tensor."""
    places = module.graph.find_nodes(op="placeholder")
    return tuple(_input_kind(node, given) for node, given in zip(places, inputs, strict=True))


def _input_kind(place: fx.Node, given: object) -> str:
    if isinstance(given, Parameter):
        return "parameter"
    if (place.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
        return "buffer"
    argument = place.meta.get("grapharg")
    return "scalar" if argument is not None and argument.pass_arg_as_tensor else ""


def primal_kind(place: fx.Node, kinds: Sequence[str]) -> str:
    """What a placeholder of AOTAutograd's is, by its own word for it: as ``input_kinds``, which
    ``kinds`` are, or ``"tangent"`` or ``"seed"``."""
    told: Any = place.meta.get("desc")
    match type(told).__name__:
        case "PlainAOTInput":
            at: int = told.idx
            return kinds[at] if at < len(kinds) else ""
        case "ParamAOTInput":
            return "parameter"
        case "BufferAOTInput":
            return "buffer"
        case "TangentAOTInput":
            return "tangent"
        case name if name.startswith("Philox"):
            return "seed"
        case _:
            return ""


def stack_of(node: fx.Node) -> str:
    """Where a node of a joint graph was called, as Python prints a stack."""
    return node.meta.get("stack_trace") or ""


def copy_stack(node: fx.Node, other: fx.Node) -> None:
    """Let ``node`` be called where ``other`` is."""
    node.meta["stack_trace"] = stack_of(other)


def traced_value(node: fx.Node) -> object:
    """The fake value of a node of Dynamo's graph, which AOTAutograd has not traced yet."""
    return node.meta.get("example_value")


def checkpoint_of(node: fx.Node) -> tuple[CheckpointPolicy, int | None] | None:
    """What a checkpoint policy says of a node of a joint graph, and the number of its region."""
    policy = node.meta.get("recompute")
    if not isinstance(policy, CheckpointPolicy):
        return None
    return policy, node.meta.get("ac_graph_id")


def keeps_graph() -> bool:
    """Inside a backward: whether there may be another one of the same graph."""
    return autograd._get_current_graph_task_keep_graph()


def has_saved_tensor_hooks() -> bool:
    """Whether what autograd saves now goes through hooks of the user's."""
    return bool(autograd._top_saved_tensors_default_hooks(True))


@contextmanager
def as_written() -> Iterator[None]:
    """While a trace runs, what ``torch.compile`` and ``Module.compile`` wrap runs as it was
    written: the trace takes its operations one by one. PyTorch's default is an error."""
    from torch._dynamo import config  # late: it takes seconds, and not every start traces

    with config.patch(error_on_nested_fx_trace=False):
        yield


def captured_graphs() -> int:
    """How many graphs ``torch.compile`` has captured in this process, whatever the backend."""
    utilities = sys.modules.get("torch._dynamo.utils")  # importing Dynamo takes seconds
    return 0 if utilities is None else utilities.counters["stats"]["unique_graphs"]
