"""Programs written by hand, and a small host that runs their C++ through ctypes."""

import ctypes
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from treadle.algebra.index import Axis, linear
from treadle.codegen.host import artifact_of
from treadle.loop.expr import Apply, Array, Const, Expr, Load, Reduce, ReduceKind
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Origin, Program, TensorRef
from treadle.runtime.store.artifact import Artifact, Launch, Storage, View
from treadle.schedule.launches import launches_of

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
FLAGS += ("-fno-math-errno", "-fno-trapping-math")
F32 = torch.float32


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclass
class Builder:
    """Collects buffers and steps; every method gives the ref it fills."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    steps: list[Compute | Call] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def buffer(self, shape, kind, dtype=F32, strides=None, name=None) -> TensorRef:
        name = name or f"t{len(self.buffers)}"
        strides = strides_of(shape) if strides is None else tuple(strides)
        self.buffers[name] = Buffer(name, dtype, tuple(shape), strides, kind)
        return TensorRef(name, dtype, tuple(shape), strides)

    def input(self, *shape, dtype=F32, strides=None) -> TensorRef:
        ref = self.buffer(shape, BufferKind.INPUT, dtype, strides, f"in{len(self.inputs)}")
        self.inputs.append(ref.buffer)
        return ref

    def compute(
        self, shape, fn: Callable[..., Expr], *, into: TensorRef | None = None, strides=None
    ):
        """``out[axes] <- fn(*axes)``."""
        axes = tuple(Axis(n) for n in shape)
        body = fn(*axes)
        ref = into or self.buffer(shape, BufferKind.TEMPORARY, body.dtype, strides)
        origin = Origin((f"n{len(self.steps)}",), f"line {len(self.steps)}")
        self.steps.append(Compute(ref, Array(axes, body), origin))
        return ref

    def pointwise(self, fn: str, *refs: TensorRef | float, into=None, dtype=None, strides=None):
        """A broadcasting operation on whole tensors."""
        tensors = [r for r in refs if isinstance(r, TensorRef)]
        shape = torch.broadcast_shapes(*(r.shape for r in tensors))
        source = tensors[0].dtype

        def body(*axes: Axis) -> Expr:
            values = [at(r, *axes) if isinstance(r, TensorRef) else Const(r, source) for r in refs]
            return Apply(fn, tuple(values), dtype or source)

        return self.compute(shape, body, into=into, strides=strides)

    def reduce(self, kind: ReduceKind, ref: TensorRef, dims: Sequence[int], keepdim=False):
        dims = [d % len(ref.shape) for d in dims]
        shape = [1 if d in dims else n for d, n in enumerate(ref.shape)]
        if not keepdim:
            shape = [n for d, n in enumerate(ref.shape) if d not in dims]

        def body(*axes: Axis) -> Expr:
            inner = {d: Axis(ref.shape[d]) for d in dims}
            outer = iter([a for d, a in enumerate(axes) if not (keepdim and d in dims)])
            position = [inner[d] if d in dims else next(outer) for d in range(len(ref.shape))]
            return Reduce(kind, tuple(inner.values()), at(ref, *position))

        return self.compute(shape, body)

    def mm(self, a: TensorRef, b: TensorRef) -> TensorRef:
        ref = self.buffer((a.shape[0], b.shape[1]), BufferKind.TEMPORARY, a.dtype)
        call = Call("aten.mm.default", (a, b), {}, (ref.buffer,), Origin(("mm",)), "aten.mm.out")
        self.steps.append(call)
        return ref

    def program(self, *results: TensorRef | None) -> Program:
        return Program(self.buffers, tuple(self.steps), tuple(self.inputs), results)


def at(ref: TensorRef, *axes: Axis) -> Load:
    """The element at the trailing dims of ``axes``, dims of one broadcast."""
    axes = axes[len(axes) - len(ref.shape) :]
    strides = [0 if n == 1 else s for n, s in zip(ref.shape, ref.strides, strict=True)]
    return Load(ref.buffer, linear(axes, strides, ref.offset), ref.dtype)


def kernels_of(plan: KernelPlan) -> list[Kernel]:
    return [step for step in plan.steps if isinstance(step, Kernel)]


@functools.cache
def library(text: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="treadle-test-") as folder:
        source, target = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
        source.write_text(text)
        command = ["g++", *FLAGS, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        return ctypes.CDLL(str(target))  # which stays loaded without its file


def strided(storage: torch.Tensor, view: View | TensorRef) -> torch.Tensor:
    """A view of a piece of the arena, whose own offset counts as well."""
    return storage.as_strided(view.shape, view.strides, storage.storage_offset() + view.offset)


def run_artifact(artifact: Artifact, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Run the C++ of an artifact. Inputs are written in place."""
    arena = torch.full((artifact.arena_bytes + 64,), 0xFF, dtype=torch.uint8)
    bound = dict(zip(artifact.inputs, tensors, strict=True))
    storage: dict[str, torch.Tensor] = {}
    for name, spec in artifact.buffers.items():
        elements = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
        if spec.place is Storage.INPUT:
            storage[name] = bound[name].as_strided((elements,), (1,))
        elif spec.place is Storage.ARENA:
            begin = spec.offset
            size = elements * spec.dtype.itemsize
            assert begin + size <= artifact.arena_bytes
            storage[name] = arena[begin : begin + size].view(spec.dtype)
        else:
            storage[name] = torch.empty(elements, dtype=spec.dtype)
    functions = {name: library(s.text)[name] for s in artifact.sources for name in s.functions}

    def view(v: View) -> torch.Tensor:
        return strided(storage[v.buffer], v)

    for step in artifact.steps:
        if isinstance(step, Launch):
            pointers = [storage[name].data_ptr() for names in step.buffers for name in names]
            sizes = [n for each in step.sizes for n in each]
            functions[step.function](
                (ctypes.c_void_p * len(pointers))(*pointers),
                (ctypes.c_int64 * max(len(sizes), 1))(*sizes),
                ctypes.c_int64(len(step.buffers)),
            )
        else:
            assert step.op == "aten.mm.default"
            a, b = (view(each) for each in step.args)
            name = step.outputs[0]
            assert name is not None
            spec = artifact.buffers[name]
            strided(storage[name], View(name, spec.dtype, spec.shape, spec.strides)).copy_(a @ b)
    return [None if v is None else view(v) for v in artifact.results]


def artifact(plan: KernelPlan) -> Artifact:
    """The plan in C++."""
    return artifact_of(plan, launches_of(plan), device="cpu", language="cpp")


def run_plan(plan: KernelPlan, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
    return run_artifact(artifact(plan), tensors)
