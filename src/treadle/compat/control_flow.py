"""PyTorch's control-flow functions while a step is traced.

They pass their bodies to a PyTorch compiler, which cannot work inside a running trace. A user may
hold such a function under any name, so the function itself is patched, and not an entry of a
module.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.cond import cond
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

_FUNCTIONS: Mapping[str, Any] = {
    "cond": cond,
    "while_loop": while_loop,
    "map": map_over,
    "scan": scan,
    "associative_scan": associative_scan,
}
NAMES = tuple(_FUNCTIONS)
"""The functions that there are."""

_INSTEAD: dict[str, list[Callable[..., object]]] = {name: [] for name in NAMES}
"""What is called instead: of the traces that run, the innermost last."""


def _call_cond(*args: object, **kwargs: object) -> object:
    from treadle.compat.control_flow import call_instead  # these are not the globals it runs with

    return call_instead("cond", *args, **kwargs)


def _call_while_loop(*args: object, **kwargs: object) -> object:
    from treadle.compat.control_flow import call_instead

    return call_instead("while_loop", *args, **kwargs)


def _call_map(*args: object, **kwargs: object) -> object:
    from treadle.compat.control_flow import call_instead

    return call_instead("map", *args, **kwargs)


def _call_scan(*args: object, **kwargs: object) -> object:
    from treadle.compat.control_flow import call_instead

    return call_instead("scan", *args, **kwargs)


def _call_associative_scan(*args: object, **kwargs: object) -> object:
    from treadle.compat.control_flow import call_instead

    return call_instead("associative_scan", *args, **kwargs)


_CALLS: Mapping[str, FunctionType] = {
    "cond": _call_cond,
    "while_loop": _call_while_loop,
    "map": _call_map,
    "scan": _call_scan,
    "associative_scan": _call_associative_scan,
}


def call_instead(name: str, *args: object, **kwargs: object) -> object:
    """What the function of that name does now."""
    return _INSTEAD[name][-1](*args, **kwargs)


@contextlib.contextmanager
def functions_replaced(
    wrap: Callable[[str, Callable[..., object]], Callable[..., object]],
) -> Iterator[None]:
    """While inside, each function does what ``wrap`` gives for its name and for what it did."""
    with contextlib.ExitStack() as undo:
        for name, function in _FUNCTIONS.items():
            code = function.__code__
            original = FunctionType(
                code, function.__globals__, function.__name__, function.__defaults__
            )
            original.__kwdefaults__ = function.__kwdefaults__
            _INSTEAD[name].append(wrap(name, original))
            undo.callback(_INSTEAD[name].pop)
            undo.callback(setattr, function, "__code__", code)
            function.__code__ = _CALLS[name].__code__
        yield
