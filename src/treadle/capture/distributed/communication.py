"""Communication with other processes inside a traced run: refused, because it would never happen.

A collective that the step calls is an operation of the trace. ``DistributedDataParallel`` sends
gradients from C++ hooks on the user's own parameters, which the trace does not touch. So its
forward, without which it sends nothing, is intercepted instead. Python hooks on the accumulators of
those parameters, which other wrappers set, are detected.
"""

from collections.abc import Iterable, Mapping
from typing import NoReturn

from torch import nn

from treadle.capture.explain_errors import Line, here, show_line
from treadle.capture.failures import refused_communication
from treadle.compat.distributed.collectives import NAMESPACE
from treadle.compat.hooks import accumulator_hooks
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import traced_targets
from treadle.util.errors import CaptureError, with_article


def refuse_wrapper(wrapper: object, *_: object, **__: object) -> NoReturn:
    """The replacement of a wrapper's forward, and of the functions that send for it."""
    raise refused_communication(
        f"runs {with_article(type(wrapper).__name__)}, which sends gradients itself", here()
    )


def refuse_collectives(lines: Iterable[tuple[int, Line]]) -> None:
    """TR-130 if an operation of the trace in progress communicates. ``lines``: the user's line that
    runs from each of some nodes on."""
    asked: set[int] = set()  # targets by their ids: a trace has few, at many nodes
    for at, target in enumerate(traced_targets()):
        if id(target) in asked:
            continue
        asked.add(id(target))
        if not isinstance(target, OpOverload) or target.namespace == NAMESPACE:
            continue  # functional collectives are nodes like any other
        if facts_of(target).communicates:
            line = max((entry for entry in lines if entry[0] <= at), default=(0, ("", 0)))[1]
            raise refused_communication(f"calls {target}", show_line(line))


def refuse_accumulator_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """TR-131 if a hook stands where a parameter's gradient is accumulated."""
    for name, parameter in parameters.items():
        if accumulator_hooks(parameter):
            raise CaptureError(
                "a hook is registered at the autograd node that accumulates the gradient of "
                f"{name}: a captured step has its own node there, so the hook would never run",
                code="TR-131",
                remedy="use parameter.register_post_accumulate_grad_hook, which is captured, or "
                "unwrap the model",
            )
