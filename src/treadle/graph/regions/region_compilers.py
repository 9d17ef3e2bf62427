"""Regions for other compilers: one operator each, and one interface for all compilers.

::

    compiler:  (module, inputs)  ->  function of tensors that gives a tuple of tensors
    operator:  treadle_regions::<compiler>_<digest>(Tensor[] inputs) -> Tensor[]

``module`` is a graph of functional ATen operations, ``inputs`` are like those it will get. The
operator is defined where a step is prepared, before anything is looked up in the cache, so that an
artifact that names it can run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from treadle.compat.dynamo import compile_module
from treadle.compat.operators.custom_op import CustomOp
from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.util.errors import LoweringError, kind_of
from treadle.util.memory import with_own_memory

RegionCompiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., object]]
"""Takes a graph and inputs like those of its calls; what it returns is called with tensors."""

NAMESPACE = "treadle_regions"
"""Where the operators of regions are."""
_COMPILERS: dict[str, RegionCompiler] = {"inductor": compile_module}


def register_region_compiler(name: str, compiler: RegionCompiler) -> None:
    """Register a compiler that rules of ``Regions`` can name. ``LoweringError`` TR-318 for a name
    that is taken, or that has other characters than letters and digits, and for a compiler that is
    not a function."""
    pair: tuple[Any, Any] = name, compiler  # users' code is not always typed
    if not isinstance(pair[0], str) or not name.isidentifier() or "_" in name:
        raise LoweringError(
            f"the name {name!r} has other characters than letters and digits",
            code="TR-318",
            remedy="use letters and digits, and a letter first",
        )
    if name in (*_COMPILERS, "native", "eager"):
        raise LoweringError(
            f"the name {name!r} is taken",
            code="TR-318",
            remedy="use another name than native, eager, " + ", ".join(_COMPILERS),
        )
    if not callable(pair[1]):
        raise LoweringError(
            f"{kind_of(compiler)} is not a function, so it cannot compile a region",
            code="TR-318",
            remedy="pass a function of a graph and its inputs that returns a function",
        )
    _COMPILERS[name] = compiler


def region_compiler(name: str) -> RegionCompiler:
    """The compiler of that name; ``LoweringError`` TR-318 if there is none."""
    if name not in _COMPILERS:
        raise LoweringError(
            f"there is no region compiler {name!r}",
            code="TR-318",
            remedy=f"use native, eager, {', '.join(_COMPILERS)}, or register it with "
            "treadle.register_region_compiler",
        )
    return _COMPILERS[name]


@dataclass
class CompiledRegion:
    """One region, compiled at its first call or ahead of it: the same function either way."""

    module: fx.GraphModule
    compiler: RegionCompiler
    _function: Callable[..., object] | None = field(default=None)

    def compile(self, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """What computes it, made once; ``inputs`` may be fake."""
        if self._function is None:
            self._function = self.compiler(self.module, inputs)
        return self._function

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Its results. What shares the memory of an input, or of another result, is copied."""
        return with_own_memory(self.compile(inputs)(*inputs), inputs)


def define(name: str, region: CompiledRegion, results: Callable[[], list[Tensor]]) -> OpOverload:
    """The operator of that name, defined if it is not yet. ``results``: fake tensors like its
    results."""
    if name not in _DEFINED:
        schema = f"{name}(Tensor[] inputs) -> Tensor[]"
        CustomOp(schema, fake=results, kernel=region, namespace=NAMESPACE)
        _DEFINED[name] = region
    operator: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def compiler_of(op: object) -> str:
    """Which compiler made the operator; empty for all others.

    ``treadle_regions.inductor_1f0a.default``  ->  ``"inductor"``
    """
    if not isinstance(op, OpOverload) or op.namespace != NAMESPACE:
        return ""
    return schema_of(op).name.removeprefix(f"{NAMESPACE}::").partition("_")[0]


_DEFINED: dict[str, CompiledRegion] = {}


def compiled_region(name: str) -> CompiledRegion:
    """What the operator of that name calls."""
    return _DEFINED[name]
