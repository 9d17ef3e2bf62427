"""Which rule lowers which operation. The family files fill it at import; it is read-only
afterwards."""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import torch

from treadle.compat.operators.schemas import OpOverload
from treadle.loop.expr import Array
from treadle.loop.program import TensorRef
from treadle.util.errors import VerifyError, require
from treadle.util.nested import Nested, Plain

Value = TensorRef | Array
"""A tensor while lowering: a view of a buffer, or a formula that reads no buffer."""
Lowered: TypeAlias = Value | int | float | tuple["Lowered", ...] | None
"""What a node becomes: a ``Value``; for many results a tuple, numbers and ``None`` among them."""
LoweredArgument: TypeAlias = Nested[Value | Plain]
"""An argument of an operation, with what its operands became."""
Args: TypeAlias = tuple[LoweredArgument, ...]
Kwargs: TypeAlias = Mapping[str, LoweredArgument]
Rule = Callable[..., Lowered]
"""``rule(context, *args, **kwargs)``, with arguments that are ``LoweredArgument``."""

R = TypeVar("R", bound=Rule)

_RULES: dict[OpOverload, Rule] = {}


class Unsupported(Exception):
    """A rule's refusal: the operation becomes a library call with this reason."""


def lowers(*ops: OpOverload) -> Callable[[R], R]:
    """Register the decorated rule for ``ops``; a second rule for an operation is a bug."""

    def register(rule: R) -> R:
        for op in ops:
            require(op not in _RULES, VerifyError, f"{op} has two lowering rules")
            _RULES[op] = rule
        return rule

    return register


def aten_op(name: str) -> OpOverload:
    """``"neg.default"`` -> ``torch.ops.aten.neg.default``."""
    return operator.attrgetter(name)(torch.ops.aten)


def registered() -> Mapping[OpOverload, Rule]:
    """All operations that have a rule, with it."""
    return MappingProxyType(_RULES)


def rule_for(op: OpOverload) -> Rule | None:
    """The rule of ``op``, or ``None``: then it becomes a library call."""
    return _RULES.get(op)
