"""Where new values of inputs are written: as early as every reader of the old value allows.

::

    before:  g = f(w); w2 = w - g; y = mm(x, w2); loss = ...    returned: loss, w2 (writes w)
    after:   g = f(w); w2 = w - g; w <- w2; y = mm(x, w); loss = ...

Library calls read the new value from the input, so it is not stored twice. Formulas read it where
it is computed, which fuses. A call that returns an input with some elements replaced writes those
into it, and nothing is copied::

    before:  y = index_add(w, 0, i, rows); ...                  returned: y (writes w)
    after:   w <- index_add(w, 0, i, rows); ...
"""

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TypeGuard

from treadle.loop.expr import Array
from treadle.loop.program import (
    BufferKind,
    Call,
    Compute,
    Origin,
    Step,
    TensorRef,
    may_end_the_call,
)
from treadle.loop.traverse import buffers_in
from treadle.lower.context import Builder, element, fresh_axes
from treadle.lower.registry import Value
from treadle.lower.scalars import cast

Writes = Mapping[str, tuple[Value, Origin]]
"""By the input that changes, its new value."""


def write_in_place(
    builder: Builder, writes: Writes, results: tuple[TensorRef | None, ...]
) -> Writes:
    """Calls that give an input with other elements at some places write into it, where nobody reads
    what was there afterwards. The write-backs that are left."""
    kept = {ref.buffer for ref in results if ref is not None}
    left, makers = dict(writes), _makers(builder.steps)
    for target, (value, _) in writes.items():
        at = makers.get(value.buffer) if isinstance(value, TensorRef) else None
        if target not in left or at is None:
            continue
        group = _written_with(builder.steps[at], left, kept)
        if target in group:
            steps = _written_by_call(builder, group, at, left, writes)
            if steps is not None:
                builder.steps, makers = steps, _makers(steps)
                for name in group:
                    del left[name]
    return left


def _makers(steps: Sequence[Step]) -> dict[str, int]:
    """Where calls stand that could write a result into an input, by the buffers that they are the
    first to write."""
    first: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in step.writes:
            first.setdefault(name, at)
    return {name: at for name, at in first.items() if _may_write_into_input(steps[at])}


def _may_write_into_input(step: Step) -> TypeGuard[Call]:
    return isinstance(step, Call) and bool(step.continued) and step.into is None


def _written_with(step: Step, left: Writes, kept: AbstractSet[str]) -> dict[str, TensorRef]:
    """The inputs that a call may write its results into, by what else reads them and the results:
    each with the result. Of a call of several all that ``left`` has, at once."""
    assert isinstance(step, Call), step
    group: dict[str, TensorRef] = {}
    for result, argument in step.continued:
        value, _ = left.get(argument.buffer, (None, None))
        if isinstance(value, TensorRef) and value.buffer == result:
            group[argument.buffer] = value
    others = kept | {name for key in left if key not in group for name in _read_by(left[key][0])}
    return {target: value for target, value in group.items() if not {target, value.buffer} & others}


def _read_by(value: Value) -> tuple[str, ...]:
    return (value.buffer,) if isinstance(value, TensorRef) else buffers_in(value.body)


def _written_by_call(
    builder: Builder, group: Mapping[str, TensorRef], at: int, left: Writes, writes: Writes
) -> list[Step] | None:
    """The steps, of which the call ``at`` that makes new values of the inputs of ``group`` writes
    to these: after the last reader of what was there, and when every condition is known to hold.
    ``left``: those of ``writes`` that no step writes yet."""
    call = builder.steps[at]
    assert isinstance(call, Call), call
    read = [ref.buffer for ref in call.refs]
    given = {argument.buffer: argument for _, argument in call.continued}
    alone = all(given[key] == builder.whole(key) and read.count(key) == 1 for key in group)
    alike = all(_is_alike(builder, value, key) for key, value in group.items())
    written = {name for step in builder.steps[:at] for name in step.writes}
    others = {name for name in {*read} - group.keys() if name in writes}
    if not alone or not alike or not others <= written - left.keys():
        return None  # it would read another value where it is moved to
    waits = [n for n, step in enumerate(builder.steps) if not group.keys().isdisjoint(step.reads)]
    waits += may_end_the_call(builder.steps)
    last = max([at, *waits])
    passed = builder.steps[at + 1 : last + 1]
    if any(not set(call.writes).isdisjoint(step.reads) for step in passed):
        return None
    if call.is_in_order and any(isinstance(step, Call) and step.is_in_order for step in passed):
        return None
    names = {value.buffer: key for key, value in group.items()}
    before = [step for n, step in enumerate(builder.steps[: last + 1]) if n != at]
    after = [step.renamed(names) for step in builder.steps[last + 1 :]]
    return [*before, call.renamed(names), *after]


def place_write_backs(builder: Builder, writes: Writes, alike: dict[Hashable, Compute]) -> None:
    """Append a copy into each input of ``writes`` right after its value and its last reader, and
    not before every condition of the step is known to hold and all collectives are over: a call
    that a dead rank ends is undone by having written nothing.

    A value that aliases an input about to be overwritten goes through a temporary first. ``alike``:
    the copies so far, by what is copied into what, also for other graphs of the step.
    """
    sources = {
        target: (_detached(builder, target, value, origin, writes), origin)
        for target, (value, origin) in writes.items()
    }
    copies = {
        target: _copy_into(builder, target, value, origin, alike)
        for target, (value, origin) in sources.items()
    }
    last_read: dict[str, int] = {}
    last_write: dict[str, int] = {}
    for position, step in enumerate(builder.steps):
        last_read.update(dict.fromkeys(step.reads, position))
        last_write.update(dict.fromkeys(step.writes, position))
    known = max(may_end_the_call(builder.steps), default=-1)
    after: dict[int, list[Step]] = {}
    there: dict[int, dict[str, str]] = {}
    for target, copy in copies.items():
        produced = [last_write.get(name, -1) for name in copy.reads]
        position = max([known, last_read.get(target, -1), *produced])
        after.setdefault(position, []).append(copy)
        value, _ = sources[target]
        if isinstance(value, TensorRef) and _is_alike(builder, value, target):
            there.setdefault(position, {})[value.buffer] = target
    steps = after.get(-1, [])
    current = there.get(-1, {})
    for position, step in enumerate(builder.steps):
        reads_new = isinstance(step, Call) and not current.keys().isdisjoint(step.reads)
        steps.append(step.renamed(current) if reads_new else step)
        steps.extend(after.get(position, []))
        current |= there.get(position, {})
    builder.steps = steps


def _is_alike(builder: Builder, value: TensorRef, target: str) -> bool:
    """Whether the input holds the value as its own buffer does: a view of one is one of both."""
    mine, other = builder.whole(value.buffer), builder.whole(target)
    places = {builder.buffers[name].device for name in (value.buffer, target)}
    is_whole = value == mine and mine == replace(other, buffer=value.buffer)
    return is_whole and len(places) == 1


def _detached(
    builder: Builder, target: str, value: Value, origin: Origin, writes: Mapping[str, object]
) -> Value:
    """``value``, or a copy of it when its storage is an input that changes."""
    if isinstance(value, TensorRef) and value.buffer not in writes:
        there = builder.buffers[value.buffer].device == builder.buffers[target].device
        return value if there else builder.local(value, origin)
    if isinstance(value, TensorRef):
        value = builder.local(value, origin)
    if not isinstance(value, TensorRef) or value.buffer not in writes:
        return value
    return builder.copied(f"{value.buffer}_old", value, origin)


def _copy_into(
    builder: Builder, target: str, value: Value, origin: Origin, alike: dict[Hashable, Compute]
) -> Step:
    """The step that writes ``value`` into the input; another device takes a library call.
    ``alike``: gets the first step of each kind."""
    whole = builder.whole(target)
    formulas = builder.has_formulas(whole.dtype, value.dtype)
    if not formulas or builder.buffers[target].device != builder.device:
        is_formula = isinstance(value, Array)
        stored = builder.compute(f"{target}_new", value, origin) if is_formula else value
        return Call(
            "aten.copy.default", (whole, stored), {}, (target,), origin, out="aten.copy.out"
        )
    refs = [ref for ref in (whole, value) if isinstance(ref, TensorRef)]
    key = tuple([replace(ref, buffer="") for ref in refs])
    like = alike.get(key)
    if like is not None:
        old, new = (like.output.buffer, *like.reads), [ref.buffer for ref in refs]
        return like.renamed(dict(zip(old, new, strict=True)), origin)
    axes = fresh_axes(whole.shape)
    copy = Compute(whole, Array(axes, cast(element(value, axes), whole.dtype)), origin)
    if isinstance(value, TensorRef) and copy.reads == (value.buffer,):
        alike[key] = copy
    return copy


def drop_dead_steps(
    builder: Builder, inputs: tuple[str, ...], results: tuple[TensorRef | None, ...]
) -> None:
    """Remove steps and buffers nobody reads. Calls whose order counts stay, since they may advance
    a generator, and checks, since they may raise."""
    live = {ref.buffer for ref in results if ref is not None} | set(inputs)
    kept: list[Step] = []
    for step in reversed(builder.steps):
        stays = isinstance(step, Call) and step.is_in_order
        is_check = isinstance(step, Call) and not step.outputs
        if live.isdisjoint(step.writes) and not stays and not is_check:
            continue
        if isinstance(step, Call) and not stays and len(step.outputs) > 1:
            names = tuple(name if name in live else None for name in step.outputs)
            kept.append(replace(step, outputs=names))
        else:
            kept.append(step)
        live.update(step.reads, step.writes)
    builder.steps = kept[::-1]
    builder.buffers = {
        name: buffer
        for name, buffer in builder.buffers.items()
        if name in live or buffer.kind is BufferKind.INPUT
    }
    builder.constants = {
        name: data for name, data in builder.constants.items() if name in builder.buffers
    }
