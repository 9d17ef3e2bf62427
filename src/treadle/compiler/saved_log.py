"""The log of a compile in an entry of the cache or of a saved step, without source lines."""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from treadle.graph.rewrite.passes import PassReport
from treadle.graph.text.canonical import SourceLines
from treadle.passes.comm.simulate import timeline_from_data
from treadle.passes.memory.decisions import Decision
from treadle.report.log import BodyNotes, CompileLog, KernelInfo, Notes, StagePass
from treadle.runtime.store.artifact import Artifact
from treadle.runtime.store.serialize import artifact_to_dict
from treadle.schedule.timeline import timeline_from


def saved_bytes(artifact: Artifact, log: CompileLog) -> bytes:
    """An artifact and its log as one JSON document: what a cache and a saved step hold."""
    told = {"texts": log.texts, "notes": asdict(log.notes)}
    packed = zlib.compress(json.dumps(told).encode())
    data = {"artifact": artifact_to_dict(artifact), "log": base64.b64encode(packed).decode()}
    return json.dumps(data, separators=(",", ":")).encode()


def read_log(blob: bytes) -> CompileLog:
    """That of an entry."""
    told = json.loads(zlib.decompress(base64.b64decode(json.loads(blob)["log"])))
    texts = {str(name): str(text) for name, text in told["texts"].items()}
    return CompileLog(texts, _notes(told["notes"]))


def log_with_lines(log: CompileLog, lines: SourceLines) -> CompileLog:
    """With the source lines of this run in place of their numbers."""
    texts = {name: lines.fill(text) for name, text in log.texts.items()}
    notes = log.notes
    decisions = tuple(
        replace(decision, where=lines.fill(decision.where)) for decision in notes.decisions
    )
    line = notes.timeline
    if line is not None:
        held = tuple(replace(value, where=lines.fill(value.where)) for value in line.held)
        line = replace(line, held=held)
    kernels = {name: _filled(kernel, lines) for name, kernel in notes.kernels.items()}
    calls = tuple(_filled(call, lines) for call in notes.calls)
    notes = replace(notes, decisions=decisions, kernels=kernels, calls=calls, timeline=line)
    notes = replace(notes, micro_batches=lines.fill(notes.micro_batches))
    filled = CompileLog(texts, notes)
    filled.pass_seconds = log.pass_seconds
    return filled


def _filled(info: KernelInfo, lines: SourceLines) -> KernelInfo:
    return replace(info, where=lines.fill(info.where))


def _notes(data: Mapping[str, Any]) -> Notes:
    kernels = {name: _info(kernel) for name, kernel in data["kernels"].items()}
    calls = tuple(_info(call) for call in data["calls"])
    decisions = tuple(Decision(**decision) for decision in data["decisions"])
    line = data["timeline"]
    passes = tuple(
        StagePass(record["stage"], PassReport(**record["report"])) for record in data["passes"]
    )
    timeline = None if line is None else timeline_from(line)
    told = data["communication"]
    communication = None if told is None else timeline_from_data(told)
    bodies = {name: _body_notes(body) for name, body in data["bodies"].items()}
    sizes = dict(data["sizes"])
    found = decisions, kernels, calls, timeline, passes, sizes, communication, bodies
    split = data["micro_batches"]
    return Notes(*found, bound_bytes=data["bound_bytes"], micro_batches=split)


def _body_notes(data: Mapping[str, Any]) -> BodyNotes:
    kernels = {name: _info(kernel) for name, kernel in data["kernels"].items()}
    return BodyNotes(kernels, tuple(_info(call) for call in data["calls"]))


def _info(data: Mapping[str, Any]) -> KernelInfo:
    fields: dict[str, Any] = {**data, "operations": tuple(data["operations"])}
    return KernelInfo(**fields)
