"""Artifacts as JSON text and back: data only, so a saved step cannot run code when loaded.

Numbers, strings and ``None`` stand for themselves; everything else is tagged::

    (1, 2)          ->  {"tuple": [1, 2]}
    torch.float32   ->  {"dtype": "float32"}
    inf             ->  {"float": "inf"}
    View("a", ...)  ->  {"view": ["a", "float32", [2, 3], [3, 1], 0]}
    a Size          ->  {"size": ...}      see ``algebra/extents.py``
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from treadle.algebra.extents import Size, as_int
from treadle.algebra.guards import Guard
from treadle.algebra.polynomial import from_data, to_data
from treadle.runtime.store.artifact import (
    Artifact,
    BufferSpec,
    CallStep,
    Launch,
    Source,
    Storage,
    View,
)
from treadle.util.errors import RuntimeFailure, require
from treadle.util.generators import GeneratorRef

FORMAT = 10

_TYPES = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_TORCH_NAMES: Mapping[str, Mapping[str, Any]] = {
    tag: {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}
    for kind, tag in _TYPES.items()
}


def artifact_to_bytes(artifact: Artifact) -> bytes:
    """The artifact as UTF-8 JSON. ``RuntimeFailure`` (TR-405) for an argument that is not data."""
    return json.dumps(artifact_to_dict(artifact), separators=(",", ":")).encode()


def artifact_from_bytes(blob: bytes) -> Artifact:
    """``artifact_from_bytes(artifact_to_bytes(a)) == a``, constants by value."""
    try:
        return artifact_from_dict(json.loads(blob))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RuntimeFailure(
            f"this is not a saved step: {error!r}",
            code="TR-405",
            remedy="remove it and compile the step again",
        ) from error


def artifact_to_dict(artifact: Artifact) -> dict[str, object]:
    """Only dicts with string keys, lists, strings, numbers, booleans and ``None``."""
    return {
        "format": FORMAT,
        "device": artifact.device,
        "sources": [
            [s.language, s.text, list(s.functions), list(s.spans)] for s in artifact.sources
        ],
        "buffers": [_from_spec(spec) for spec in artifact.buffers.values()],
        "steps": [_from_step(step) for step in artifact.steps],
        "releases": [list(names) for names in artifact.releases],
        "inputs": list(artifact.inputs),
        "results": [encode(result) for result in artifact.results],
        "arena_bytes": artifact.arena_bytes,
        "peak_bytes": artifact.peak_bytes,
        "constants": {name: _from_tensor(t) for name, t in artifact.constants.items()},
        "guards": [[to_data(g.formula), g.sign, g.answer] for g in artifact.guards],
        "bodies": {name: artifact_to_dict(body) for name, body in artifact.bodies.items()},
        "untouched": artifact.untouched,
        "host_bytes": artifact.host_bytes,
    }


def artifact_from_dict(data: Mapping[str, Any]) -> Artifact:
    """The inverse of ``artifact_to_dict``."""
    known = data["format"] == FORMAT
    require(known, RuntimeFailure(f"saved in format {data['format']}", code="TR-405"))
    specs = [_to_spec(entry) for entry in data["buffers"]]
    return Artifact(
        device=data["device"],
        sources=tuple(_to_source(entry) for entry in data["sources"]),
        buffers={spec.name: spec for spec in specs},
        steps=tuple(_to_step(entry) for entry in data["steps"]),
        releases=tuple(tuple(names) for names in data["releases"]),
        inputs=tuple(data["inputs"]),
        results=tuple(decode(result) for result in data["results"]),
        arena_bytes=data["arena_bytes"],
        peak_bytes=data["peak_bytes"],
        constants={name: _to_tensor(entry) for name, entry in data["constants"].items()},
        guards=tuple(Guard(from_data(g[0]), g[1], g[2]) for g in data["guards"]),
        bodies={name: artifact_from_dict(body) for name, body in data["bodies"].items()},
        untouched=int(data["untouched"]),
        host_bytes=int(data["host_bytes"]),
    )


def _to_source(data: Sequence[Any]) -> Source:
    language, text, functions, spans = data
    return Source(language, text, tuple(functions), tuple((a, b) for a, b in spans))


def encode(value: object) -> object:
    """An argument of a call as JSON data; see the table at the top."""
    match value:
        case Size():
            return {"size": to_data(value.formula)}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [encode(value.real), encode(value.imag)]}
        case list():
            return [encode(item) for item in value]
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case View():
            layout = [encode(strides) for strides in (list(value.shape), list(value.strides))]
            layout.append(encode(value.offset))
            return {"view": [value.buffer, _name(value.dtype), *layout]}
        case torch.device():
            return {"device": str(value)}
        case GeneratorRef():
            return {"generator": value.number}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {_TYPES[type(value)]: _name(value)}
        case _:
            raise RuntimeFailure(
                f"an argument of a saved call cannot be {value!r}",
                code="TR-405",
                remedy="this is a bug in treadle; please report it",
            )


def decode(data: object) -> Any:
    """The inverse of ``encode``."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, body),) = data.items()
    match tag:
        case "tuple":
            return tuple(decode(item) for item in body)
        case "view":
            name, dtype, shape, strides, offset = body
            layout = tuple(decode(shape)), tuple(decode(strides)), decode(offset)
            return View(name, _dtype(dtype), *layout)
        case "size":
            return as_int(from_data(body))
        case "float":
            return float(body)
        case "complex":
            return complex(decode(body[0]), decode(body[1]))
        case "device":
            return torch.device(body)
        case "generator":
            return GeneratorRef(body)
        case _:
            return _TORCH_NAMES[tag][body]


def _name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    return _TORCH_NAMES["dtype"][name]


def _from_spec(spec: BufferSpec) -> list[object]:
    layout = [encode(list(spec.shape)), encode(list(spec.strides))]
    place = spec.place.value
    return [
        spec.name, _name(spec.dtype), *layout, place, spec.offset, spec.unsized, spec.device
    ]  # fmt: skip


def _to_spec(data: Sequence[Any]) -> BufferSpec:
    name, dtype, shape, strides, place, offset, unsized, device = data
    layout = tuple(decode(shape)), tuple(decode(strides))
    return BufferSpec(name, _dtype(dtype), *layout, Storage(place), offset, unsized, device)


def _from_step(step: Launch | CallStep) -> dict[str, object]:
    if isinstance(step, Launch):
        return {
            "launch": step.function,
            "buffers": [list(names) for names in step.buffers],
            "sizes": [encode(list(sizes)) for sizes in step.sizes],
            "kernels": list(step.kernels),
            "bytes_moved": step.bytes_moved,
            "origin": step.origin,
            "shown": step.shown,
        }
    return {
        "call": step.op,
        "args": [encode(arg) for arg in step.args],
        "kwargs": {name: encode(arg) for name, arg in step.kwargs.items()},
        "outputs": list(step.outputs),
        "out": step.out,
        "reason": step.reason,
        "origin": step.origin,
        "into": encode(step.into),
        "bodies": list(step.bodies),
        "updates": list(step.updates),
    }


def _to_step(data: Mapping[str, Any]) -> Launch | CallStep:
    if "launch" in data:
        return Launch(
            function=data["launch"],
            buffers=tuple(tuple(names) for names in data["buffers"]),
            sizes=tuple(tuple(decode(sizes)) for sizes in data["sizes"]),
            kernels=tuple(data["kernels"]),
            bytes_moved=data["bytes_moved"],
            origin=data["origin"],
            shown=data["shown"],
        )
    return CallStep(
        op=data["call"],
        args=tuple(decode(arg) for arg in data["args"]),
        kwargs={name: decode(arg) for name, arg in data["kwargs"].items()},
        outputs=tuple(data["outputs"]),
        out=data["out"],
        reason=data["reason"],
        origin=data["origin"],
        into=decode(data["into"]),
        bodies=tuple(data["bodies"]),
        updates=tuple(data["updates"]),
    )


def _from_tensor(tensor: torch.Tensor) -> dict[str, object]:
    """The raw bytes of a tensor in row-major order; an executable lays them out as its buffer
    says."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": _name(tensor.dtype),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "data": base64.b64encode(raw.numpy().tobytes()).decode(),
    }


def _to_tensor(data: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _dtype(data["dtype"]), tuple(data["shape"])
    raw = bytearray(base64.b64decode(data["data"]))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).to(data["device"])
