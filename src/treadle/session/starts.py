"""Starts without a trace: a capture of the same step by another process, found in the cache.

::

    the start key    treadle, PyTorch, Python and the number of GPUs; the step's code; the kinds of
                     its models and optimizers; the key of the call (``variants/guards``); the
                     options
    a record         the reads of the run, the capture and the build as data
    the sizes key    the same for the call without its sizes: which dims calls like it had, of
                     steps that were compiled for many sizes

A record is used if this process has the same objects in every place that the run read;
``capture/stored`` makes the comparison. Otherwise the step is captured as usual.
"""

import json
import platform
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast, final

import torch

from treadle.capture.argument_containers import ServedCall
from treadle.capture.stored.captured import captured_again, captured_data
from treadle.capture.stored.codec import Decoder, Encoder, UserObjects
from treadle.capture.stored.inputs import InputText, input_texts_of
from treadle.capture.stored.names import (
    NotStored,
    builtin_text,
    code_digest,
    kind_text,
    value_text,
)
from treadle.capture.stored.origin import StepObjects
from treadle.capture.stored.reads import Data, read_again
from treadle.compiler.compiled import Compiled, StartRecord, StoredBuild
from treadle.compiler.stored_build import built_again
from treadle.graph.text.canonical import text_of_value
from treadle.options import Options, deciding
from treadle.passes.registered import is_anything_registered
from treadle.report.stages import Clock
from treadle.runtime.execute.arena import Arena
from treadle.runtime.store.cache import Cache, content_key
from treadle.session.user_step import UserStep
from treadle.session.variants.guards import GuardKey, Ignored, PassedParameter
from treadle.session.variants.new_call import NewCall
from treadle.session.variants.seen_sizes import SeenDims, without_sizes
from treadle.util.package import own_digest

_MOST_RECORDS = 4
"""Of one start key: the same step where what it reads differs, the newest first. Each that does not
serve costs a walk over what the step reads."""


def _gpus() -> str:
    """How many there are, which PyTorch's code asks for in steps (autocast on a GPU does) and
    remembers in a variable: whether it was asked before must not tell processes apart."""
    return f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_initialized() else ""


def records_of(entry: bytes | None) -> list[Data]:
    """Those that an entry of the cache has, the newest first."""
    return [] if entry is None else cast("list[Data]", json.loads(zlib.decompress(entry)))


def add_records(cache: Cache, start: str, records: Sequence[Data]) -> None:
    """Keep ``records`` beside those that the cache has under a start key, ahead of them."""
    older = [each for each in records_of(cache.get(start)) if each not in records]
    kept = [*records, *older][:_MOST_RECORDS]
    cache.put(start, zlib.compress(json.dumps(kept).encode(), 1))


@final
class Starts:
    """Those of one step."""

    def __init__(
        self, step: UserStep, options: Options, cache: Cache, call: ServedCall, arena: Arena
    ) -> None:
        self._step, self._options, self._cache = step, options, cache
        self._call, self._arena = call, arena
        self._differs = ""  # of the newest record that did not serve

    def find(self, key: GuardKey, call: NewCall, known: Iterable[Compiled]) -> Compiled | None:
        """What serves a call with this key, if another process captured and compiled it: with few
        numbers that change, the newest. ``known``: variants that may run for it."""
        self._differs = ""
        try:
            starts = [self._start_key(each) for each in dict.fromkeys((key, key.of_any_values()))]
        except NotStored:
            return None
        records = [
            (start, record)
            for start in filter(None, starts)
            for record in records_of(self._cache.get(start))
        ]
        records.sort(key=lambda each: cast("int", each[1]["numbers"]))
        inputs: list[InputText] = []
        if records:
            inputs = input_texts_of(self._objects(), call.args, call.kwargs, call.dims)
        for start, record in records:
            try:
                compiled = self._again(start, record, inputs, known)
            except NotStored as error:
                self._differs = self._differs or str(error)
                continue
            if compiled is None or not compiled.artifact.fits(call.sizes):
                continue
            captured = compiled.captured
            if captured.optimizers.agrees() and captured.dependencies.hold():
                return compiled
        return None

    def keep(self, key: GuardKey, compiled: Compiled) -> None:
        """For other processes, if that can be: also for calls that find other gradients where it
        makes no difference, such as the first ones."""
        ignored = Ignored.of(compiled.captured)
        others = key.without_grads(ignored)
        keys = {key, others, key.without_values(ignored), others.without_values(ignored)}
        try:
            starts = [start for each in keys if (start := self._start_key(each))]
            record = self._record(compiled) if starts else {}
        except NotStored as error:
            compiled.start = StartRecord(reason=str(error), differs=self._differs)
            return
        for start in starts:
            add_records(self._cache, start, [record])
        compiled.start = StartRecord(tuple(starts), differs=self._differs)

    def sizes(self, key: GuardKey) -> list[SeenDims]:
        """Dims that calls like this one had in other processes, the newest first."""
        try:
            place = self._start_key(without_sizes(key).of_any_values(), "sizes")
        except NotStored:
            return []
        records = records_of(self._cache.get(place)) if place else []
        return [SeenDims.of_data(record) for record in records]

    def keep_sizes(self, key: GuardKey, dims: SeenDims, compiled: Compiled) -> None:
        """Say to other processes that ``compiled``, which is kept, is for these dims."""
        alike = without_sizes(key).of_any_values()
        places = {
            self._start_key(each, "sizes")
            for each in (alike, alike.without_grads(Ignored.of(compiled.captured)))
        }
        record = dims.data()
        for place in places:
            if records_of(self._cache.get(place))[:1] != [record]:
                add_records(self._cache, place, [record])
        compiled.start = replace(compiled.start, keys=(*compiled.start.keys, *places))

    def _start_key(self, key: GuardKey, what: str = "start") -> str:
        """Empty for what is not looked for: what depends on more than is said here."""
        options = self._options
        chosen = is_anything_registered() or options.regions.chooses
        if chosen or options.watched or options.carries or self._step.group is not None:
            return ""
        return content_key(what, *self._facts(key))

    def _facts(self, key: GuardKey) -> list[str]:
        function = self._step.function
        if isinstance(function, MethodType):
            function = function.__func__
        code = kind_text(type(function))
        if isinstance(function, FunctionType):
            code = code_digest(function.__code__)
        elif isinstance(function, BuiltinFunctionType):
            code = builtin_text(function)  # of which there are no reads
        kinds = (self._step.models, self._step.optimizers)
        if key.hooks or key.plans or any(isinstance(e, PassedParameter) for e in key.same):
            raise NotStored("hooks, fully_shard or parameters among the arguments")
        return [
            own_digest(),
            f"{torch.__version__} {torch.version.git_version}",
            platform.python_version(),
            _gpus(),
            code,
            *(f"{name} {kind_text(type(value))}" for each in kinds for name, value in each.items()),
            *(text_of_value(value) for value in deciding(self._options).values()),
            value_text(
                (
                    key.arguments,
                    key.structure,
                    key.same,
                    len(key.identity),
                    key.training,
                    key.parameters,
                    key.optimizers,
                    key.modes,
                    key.grads,
                )
            ),
        ]

    def _objects(self) -> StepObjects:
        step = self._step
        return StepObjects(step.function, step.models, step.optimizers, self._call, step.eight_bits)

    def _record(self, compiled: Compiled) -> Data:
        captured = compiled.captured
        if captured.stored.data is None:
            raise NotStored(captured.stored.reason)
        objects = self._objects()
        ignored = Ignored.of(captured).grads
        of_parameters = enumerate(objects.parameters)
        return {
            "reads": captured.stored.data,
            "numbers": len(captured.dependencies.counters) + captured.inputs.run_time_numbers(),
            "ignored": [at for at, each in of_parameters if id(each) in ignored],
            "captured": captured_data(captured, objects),
            "build": Encoder(UserObjects(objects)).data(compiled.stored()),
        }

    def _again(
        self,
        start: str,
        record: Mapping[str, object],
        inputs: Sequence[InputText],
        known: Iterable[Compiled],
    ) -> Compiled | None:
        objects, clock = self._objects(), Clock()
        with clock.stage("start"):
            ignored = cast("list[int]", record["ignored"])
            reads = read_again(cast("Data", record["reads"]), objects, inputs, ignored)
            captured = captured_again(cast("Data", record["captured"]), reads, objects)
            build = Decoder(UserObjects(objects)).value(record["build"])
        stored = cast("StoredBuild", build)
        return built_again(
            captured,
            stored,
            start,
            self._options,
            cache=self._cache,
            clock=clock,
            known=known,
            arena=self._arena,
        )
