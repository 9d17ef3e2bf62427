"""Parts of a step as texts, from which ``graph/text/parsing.py`` recreates the same parts.

::

    type      f32[4, 8] strides [1, 4] on cuda:0       without strides: contiguous; without on: cpu
    argument  x.1  [1, 2]  (x, None)  1.0  -0.0  inf  'mean'  torch.float32  device('cpu')
    target    mul.Tensor  mm  _c10d_functional.all_reduce  python._operator.add
    note      forward, module 'h.0', region 3, asked must_save, at net.py:7: y = x @ w
    constant  _tensor_constant0 [1.0, 2.0]             or its bytes, if there are many
"""

import functools
import math
import operator
import re
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import fx, nn

from treadle.algebra.extents import Size, same_sizes
from treadle.algebra.strides import contiguous_strides
from treadle.compat.fake import is_fake
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dynamic import is_sized
from treadle.graph.core.node_info import NodeInfo
from treadle.graph.core.operators import operation_name
from treadle.graph.core.types import TensorType, type_of_tensor
from treadle.util.literals import literal_text, numbers_text

_ELSEWHERE = {"phase", "where"}
_NOT_SHOWN = {"name", "asked_at", "draw", "lost"}
"""What a capture notes for the stages that follow it at once."""
NOTES = tuple(field.name for field in fields(NodeInfo) if field.name not in _ELSEWHERE | _NOT_SHOWN)
"""What is noted of a node beside its phase and its source line, if anything."""
_noted = operator.attrgetter(*NOTES)
USUAL_DEVICE = torch.device("cpu")
"""Where a tensor is of which the text says nothing else."""
PYTHON = {"_operator": operator, "math": math, "torch": torch}
"""Modules whose functions a graph may call; those that compute with sizes."""
_PLAIN_NAME = re.compile(r"[^\s'\"#,](?:[^\n\r'\"#]*[^\s'\"#])?")
_PLAIN_NOTE = re.compile(r"[\w.]+")


def type_text(value: object) -> str:
    """The type of a node's ``val``, with strides and device where they are not the usual."""
    match value:
        case torch.Tensor() if value.layout is not torch.strided:
            return f"{value.layout}"
        case torch.Tensor() if is_sized(value):
            return _strided_text(type_of_tensor(value))
        case torch.Tensor():
            return _plain_text(value.dtype, tuple(value.shape), value.stride(), value.device)
        case tuple() | list():
            return f"({', '.join(map(type_text, value))})"
        case _:
            return type(value).__name__


@functools.lru_cache(maxsize=4096)
def _plain_text(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device
) -> str:
    """Of sizes that are numbers: the values of a graph have few types."""
    return _strided_text(TensorType(dtype, shape, strides, device))


def _strided_text(tensor_type: TensorType) -> str:
    return f"{tensor_type}{_strides_text(tensor_type)}{_device_text(tensor_type.device)}"


def _strides_text(tensor_type: TensorType) -> str:
    if same_sizes(contiguous_strides(tensor_type.shape), tensor_type.strides):
        return ""
    return f" strides [{', '.join(map(str, tensor_type.strides))}]"


def _device_text(device: torch.device) -> str:
    return "" if device == USUAL_DEVICE else f" on {device}"


def value_text(arg: object, names: Mapping[fx.Node, str]) -> str:
    """An argument: a value of the graph, a literal, or lists of them."""
    if type(arg) in (int, bool, str):  # before what asks Python for the class of each
        return repr(arg)
    match arg:
        case fx.Node():
            return names.get(arg, f"<foreign {arg}>")
        case tuple():
            inside = ", ".join(value_text(item, names) for item in arg)
            return f"({inside},)" if len(arg) == 1 else f"({inside})"
        case list():
            return f"[{', '.join(value_text(item, names) for item in arg)}]"
        case slice():
            parts = (value_text(start, names) for start in (arg.start, arg.stop, arg.step))
            return f"slice({', '.join(parts)})"
        case Size():
            return str(arg)
        case _:
            return literal_text(arg)


def operation_text(target: object) -> str:
    """``aten.mm.default`` -> ``mm``: as short as ``operation_of`` understands it."""
    if isinstance(target, OpOverload):
        return _overload_text(target)
    functions = (types.BuiltinFunctionType, types.FunctionType)
    if isinstance(target, functions) and target.__module__ in PYTHON:
        return f"python.{target.__module__}.{target.__name__}"
    return f"<{operation_name(target)}>"  # ``parse`` refuses it


@functools.cache
def _overload_text(target: OpOverload) -> str:
    whole = str(target)
    shorter = (operation_name(target), whole.removesuffix(".default"))
    return next((text for text in shorter if operation_of(text) is target), whole)


def operation_of(text: str) -> Any:
    """What ``operation_text`` calls so; ``None`` for nothing.

    Names of ATen come before libraries: ``mul.Tensor`` is ``aten.mul.Tensor``.
    """
    parts = text.split(".")
    if len(parts) == 3 and parts[0] == "python" and parts[1] in PYTHON:
        return vars(PYTHON[parts[1]]).get(parts[2])
    ways = {
        1: [["aten", parts[0], "default"]],
        2: [["aten", *parts], [*parts, "default"]],
        3: [parts],
    }
    operators = (_operator(*way) for way in ways.get(len(parts), []))
    return next((operator_ for operator_ in operators if operator_ is not None), None)


def _operator(library: str, name: str, overload: str) -> OpOverload | None:
    value: object = torch.ops
    for part in (library, name, overload):
        try:
            value = getattr(value, part)  # the way to an operator whose name is data
        except AttributeError:
            return None
    return value if isinstance(value, OpOverload) else None


def name_text(name: str) -> str:
    """A name of the user's at the end of a line, quoted if it could be misread."""
    return name if _PLAIN_NAME.fullmatch(name) else repr(name)


def note_text(known: NodeInfo) -> str:
    """What a node belongs to; its source line comes last, as it is."""
    parts = [known.phase] if known.phase else []
    for key, value in zip(NOTES, _noted(known), strict=True):
        if value is True:
            parts.append(key)
        elif value is not None and value is not False and value != "":
            text = str(value)
            word = isinstance(value, str) and not _PLAIN_NOTE.fullmatch(text)
            parts.append(f"{key} {text!r}" if word or _is_digits(value) else f"{key} {text}")
    where = known.where.replace("\n", " ").strip()
    return ", ".join([*parts, *([f"at {where}"] if where else [])])


def _is_digits(value: object) -> bool:
    return isinstance(value, str) and value.lstrip("-").isdecimal()


def constant_text(owner: nn.Module | None, path: str) -> str:
    """A tensor of the graph's own: its name and its numbers, or its bytes if there are many."""
    value = operator.attrgetter(path)(owner)
    if not isinstance(value, torch.Tensor) or is_fake(value) or value.layout is not torch.strided:
        return path
    numbers = numbers_text(value)
    return f"{path} {numbers}" if numbers else path
