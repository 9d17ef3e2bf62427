"""Operations with sizes that depend on the step's own values: each is a call of PyTorch's kernel.

::

    before:  r: i64[u0, 1] = nonzero(m);  n: int = sym_size(r, 0);  z: f32[u0] = zeros([n])
    after:   r: i64[32, 1] = at_run_time[nonzero](m);  n: int = at_run_time[sym_size](r, 0);  ...

The sizes that a value shows are upper bounds of the true ones, for the memory plan. Nothing else
may be concluded from them, so the operation is wrapped, and no pass or rule matches it.
"""

from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import final

from treadle.compat.fake import FakeTensor
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.node_info import Value


@final
@dataclass(frozen=True, eq=False)
class DataDependentOp:
    """The target of such a node. ``val``: what it gives, as fake tensors and numbers of known
    sizes; ``unsized``: for each result whether its true sizes (or number) are others."""

    op: OpOverload | FunctionType | BuiltinFunctionType
    val: Value
    unsized: tuple[bool, ...]

    @property
    def __name__(self) -> str:
        return f"at_run_time[{self.op_name}]"

    @property
    def op_name(self) -> str:
        """How the operation is called in an artifact."""
        if isinstance(self.op, OpOverload):
            return str(self.op)
        return f"python.{self.op.__module__}.{self.op.__name__}"

    def __call__(self, *_: object, **__: object) -> Value:
        """The type of the result, in storages of its own."""
        return fresh(self.val)


def fresh(value: Value) -> Value:
    """A value of the same type in storages of its own."""
    if isinstance(value, tuple | list):
        return type(value)(map(fresh, value))
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return value.new_empty_strided(value.shape, value.stride())
