"""The rules every step obeys between passes."""

import torch
from torch import fx

from treadle.graph.core.node_info import has_value, info, known_value, value_of
from treadle.graph.core.operators import is_item, is_mutable
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import show_type
from treadle.graph.text.printing import show_around
from treadle.util.errors import VerifyError

PHASES = ("forward", "backward", "optimizer")


def verify(step: StepGraph) -> None:
    """Inputs first, definitions before uses, a value and a phase on every node, no mutation, no
    container used as a whole, one return, and a signature that fits; ``VerifyError`` shows the
    lines around the fault."""
    defined: set[fx.Node] = set()
    seen_work = False
    nodes = list(step.graph.nodes)
    for node in nodes:
        operands = node.all_input_nodes
        if not defined.issuperset(operands):
            missing = next(operand for operand in operands if operand not in defined)
            raise _fault(node, f"{node} uses {missing} before it is defined")
        if node.op != "placeholder":
            seen_work = True
        elif seen_work:
            raise _fault(node, f"{node} comes after work")
        _verify_node(node)
        defined.add(node)
    if not nodes or nodes[-1].op != "output":
        raise VerifyError("the graph does not end in a return")
    _verify_signature(step)


def _verify_node(node: fx.Node) -> None:
    match node.op:
        case "output":
            if not isinstance(node.args[0], tuple):
                raise _fault(node, "the return is not a tuple")
            return
        case "call_function":
            phase = info(node).phase
            if phase not in PHASES:
                raise _fault(node, f"{node} has no phase: {phase!r}")
            if is_mutable(node):
                raise _fault(node, f"{node} writes to its argument: {node.target}")
            require_unpacked(node)
        case "placeholder" | "get_attr":
            pass
        case other:
            raise _fault(node, f"{node} is a {other}, not an operation")
    if not has_value(node):
        raise _fault(node, f"{node} has no value")


def require_unpacked(node: fx.Node) -> None:
    """``VerifyError``, with the node and its users, for a container that is used as a whole."""
    value = known_value(node)
    if isinstance(value, torch.Tensor) or not isinstance(value, tuple | list):
        return  # tensors first: those that stand in ask Python for their class in the second check
    whole = [user for user in node.users if not is_item(user)]
    if whole:
        users = "\n".join(f"  {user.format_node()}" for user in node.users)
        raise VerifyError(
            f"{node} gives several values, and {whole[0]} uses them as a whole; its users:\n"
            f"{users}\n{show_around(node.graph, node)}"
        )


def _verify_signature(step: StepGraph) -> None:
    inputs, outputs = step.signature.inputs, step.signature.outputs
    placeholders, returned = step.placeholders, step.returned
    if len(placeholders) != len(inputs):
        raise VerifyError(f"{len(placeholders)} inputs, but {len(inputs)} in the signature")
    if len(returned) != len(outputs):
        raise VerifyError(f"{len(returned)} results, but {len(outputs)} in the signature")
    written: dict[int, str] = {}
    for node, output in step.outputs():
        if output.writes is None:
            continue
        if not 0 <= output.writes < len(inputs):
            raise VerifyError(f"{output.name} writes input {output.writes}, which is not there")
        if output.writes in written:
            both = f"{written[output.writes]} and {output.name}"
            raise VerifyError(f"{both} write the same input {inputs[output.writes].name}")
        written[output.writes] = output.name
        _verify_write(node, placeholders[output.writes], output.name)


def _verify_write(node: fx.Node | None, target: fx.Node, name: str) -> None:
    if node is None:
        raise VerifyError(f"{name} writes nothing to {target}")
    new, old = value_of(node), value_of(target)
    if not _fits(new, old):
        reason = f"{name} writes {show_type(new)} to {target}: {show_type(old)}"
        raise _fault(node, reason)


def _fits(new: object, old: object) -> bool:
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    return (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device)


def _fault(node: fx.Node, reason: str) -> VerifyError:
    return VerifyError(f"{reason}\n{show_around(node.graph, node)}")
