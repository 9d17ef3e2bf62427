"""Which rule lowers which operation. Filled at import by the family files, read-only after."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from treadle.compat.operators import OpOverload
from treadle.loop.expr import Array
from treadle.loop.program import TensorRef
from treadle.util.errors import VerifyError, require

Value = TensorRef | Array
"""A tensor while lowering: a view of a buffer, or a formula that reads no buffer."""
Rule = Callable[..., Any]
"""``rule(context, *args, **kwargs)``: a ``Value``; for many results their tuple, and ``None``."""

_RULES: dict[OpOverload, Rule] = {}


class Unsupported(Exception):
    """A rule's refusal: the operation becomes a library call with this reason."""


def lowers(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Register the decorated rule for ``ops``; a second rule for an operation is a bug."""

    def register(rule: Rule) -> Rule:
        for op in ops:
            require(op not in _RULES, VerifyError, f"{op} has two lowering rules")
            _RULES[op] = rule
        return rule

    return register


def aten_op(name: str) -> OpOverload:
    """``"neg.default"`` -> ``torch.ops.aten.neg.default``."""
    return operator.attrgetter(name)(torch.ops.aten)


def rule_for(op: OpOverload) -> Rule | None:
    """The rule of ``op``, or ``None``: then it becomes a library call."""
    return _RULES.get(op)
