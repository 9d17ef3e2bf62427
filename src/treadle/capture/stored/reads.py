"""What a captured run read, as data, and the same read again by another process.

The snapshot itself is not stored. Another process makes its own, by the same walk from the same
roots: for each object, in the order of the walk, the data lists the names that the run read. Both
snapshots have a text, and the capture serves the other process exactly if the texts are equal.
"""

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast, final

from treadle.capture.integrations.registry import SHARED_OBJECTS
from treadle.capture.python_state.external import process_questions
from treadle.capture.python_state.ownership import is_machinery, owner_of
from treadle.capture.python_state.parts import Reading
from treadle.capture.python_state.reads.object_graph import ObjectReads
from treadle.capture.python_state.reads.read_names import ReadNames
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.python_state.reads.roots import Globals, ReadRoots
from treadle.capture.stored.codec import Decoder, Encoder, UserObjects
from treadle.capture.stored.inputs import InputText, differing_inputs
from treadle.capture.stored.names import NotStored, codes_within, module_of, variables_of
from treadle.capture.stored.origin import ReadsOrigin, StepObjects
from treadle.capture.stored.reads_text import ReadsText, first_difference
from treadle.capture.tensors.tensor_effects import HeldTensor
from treadle.compat.tensors import storage_key

Data = dict[str, object]
"""What JSON can hold."""


@final
@dataclass(frozen=True, slots=True)
class StoredReads:
    """The reads of a run as ``data``; ``None`` where another process cannot read the same, and
    ``reason`` says why."""

    data: Data | None
    reason: str = ""

    @staticmethod
    def of(
        step: StepObjects,
        graph: ReadsGraph,
        origin: ReadsOrigin,
        before: Callable[[object, int], Reading | None],
        inputs: Callable[[], Sequence[InputText]],
    ) -> "StoredReads":
        """``before``: what a part of an object held before the run. ``inputs``: texts of them."""
        try:
            data = _reads_data(step, graph, origin, before)
            return StoredReads({**data, "inputs": list(inputs())})
        except NotStored as error:
            return StoredReads(None, str(error))


def _reads_data(
    step: StepObjects,
    graph: ReadsGraph,
    origin: ReadsOrigin,
    before: Callable[[object, int], Reading | None],
) -> Data:
    if origin.own:
        raise NotStored("numbers that change, gradients or the state of optimizers are read")
    if origin.names.whole_kinds and step.call.containers:
        raise NotStored("all that an object among the arguments has is read")
    text = ReadsText(graph.nodes, step.parameters, lambda node, at: before(node.value, at))
    lines = [*text.lines(graph.by_identity), _aliases(graph, step)]
    covered = {id(code) for code in codes_within(text.codes.values())}
    for code in origin.codes:
        if id(code) not in covered:
            raise NotStored(
                f"{code.co_qualname} in {code.co_filename} ran, and nothing that the step reads "
                "leads to it, for example because a decorator hides it"
            )
    encoder, names = Encoder(UserObjects(step)), origin.names
    of_tensors = Encoder(UserObjects(step, graph.nodes, graph.by_identity))
    return {
        "text": lines,
        "roots": _roots_data(origin.roots),
        "mentioned": None if names.mentioned is None else sorted(names.mentioned),
        "of library": sorted(names.of_library),
        "read": _table(graph.of_objects, encoder),
        "objects": [list(each) for each in origin.objects],
        "tensors": [_found(find, of_tensors) for find in origin.tensors()],
    }


def read_again(
    data: Data, step: StepObjects, inputs: Sequence[InputText], ignored: Collection[int]
) -> ReadsGuard:
    """What this process has in the places that the run read. ``inputs``: the texts of its inputs;
    ``ignored``: parameters whose gradients do not matter. ``NotStored`` where it is not what the
    run found."""
    others = differing_inputs(cast("list[InputText]", data["inputs"]), inputs, ignored)
    if others is not None:
        raise NotStored(f"an input: {first_difference(*others)}")
    roots = _roots(cast("Data", data["roots"]))
    decoder = Decoder(UserObjects(step))
    mentioned = None if data["mentioned"] is None else frozenset(_texts(data["mentioned"]))
    stored = iter(_rows(cast("Data", data["read"]), decoder))

    def of(_: object) -> ObjectReads:
        read = next(stored, None)
        if read is None:
            raise NotStored("there are other objects")
        return read

    names = ReadNames(
        of=of,
        whole_kinds=frozenset(),
        mentioned=mentioned,
        of_library=frozenset(_texts(data["of library"])),
        ours=lambda value: value is step.call or is_machinery(value),
        owner=owner_of,
    )
    walk = ReadsWalk(names, bound=step.parameters)
    objects = [(at, label) for at, label in cast("list[tuple[int, str]]", data["objects"])]
    if any(at >= len(step.call.leaves) for at, _ in objects):
        raise NotStored("there are other arguments")

    def tensors() -> list[Callable[[], object]]:
        try:
            found = Decoder(UserObjects(step, walk.graph.nodes)).values(data["tensors"])
        except IndexError:
            raise NotStored("there are fewer objects") from None
        return cast("list[Callable[[], object]]", found)

    ReadsOrigin(roots, names, tuple(objects), tensors).add_to(walk, step)
    step.call.read(walk)
    graph = walk.end()
    reads = ReadsGuard(graph)
    if walk.opaque:
        raise NotStored(walk.opaque[0])
    lines = ReadsText(graph.nodes, step.parameters).lines(graph.by_identity)
    lines.append(_aliases(graph, step))
    before = _texts(data["text"])
    if lines != before:
        raise NotStored(first_difference(before, lines))
    return reads


def _aliases(graph: ReadsGraph, step: StepObjects) -> str:
    """Which of the tensors that were found are the same one, and which are of one memory, also with
    a parameter."""
    first = {storage_key(each): -1 - at for at, each in enumerate(step.parameters)}
    keys = [storage_key(fact.place.get()) for fact in graph.tensors.facts]
    memory = [at if key is None else first.setdefault(key, at) for at, key in enumerate(keys)]
    return f"tensors: the same {list(graph.tensors.same)}, of one memory {memory}"


def _found(find: Callable[[], object], encoder: Encoder) -> object:
    """The way to a tensor."""
    if isinstance(find, HeldTensor) and find.place is None:
        raise NotStored("a tensor that is nowhere between calls")
    return encoder.data(find)


def _texts(data: object) -> list[str]:
    return cast("list[str]", data)


def _roots_data(roots: ReadRoots) -> Data:
    if roots.seeds:
        raise NotStored("the seed of a generator")
    return {
        "globals": [
            [_module(space), sorted(space.names), space.whole, space.deep]
            for space in roots.globals
        ],
        "process": list(roots.process),
        "theirs": sorted(roots.theirs),
        "shared": [[label, *_shared_name(value)] for label, value in roots.shared.items()],
        "modules": sorted(roots.modules),
    }


def _roots(data: Data) -> ReadRoots:
    rows = cast("list[tuple[str, list[str], bool, bool]]", data["globals"])
    asked = set(_texts(data["process"]))
    shared = cast("list[tuple[str, int, str]]", data["shared"])
    return ReadRoots(
        tuple(
            Globals(_variables(module, deep=deep), frozenset(names), whole, deep)
            for module, names, whole, deep in rows
        ),
        {label: read for label, read in process_questions(None) if label in asked},
        frozenset(_texts(data["theirs"])),
        (),
        {label: _shared(at, name) for label, at, name in shared},
        frozenset(_texts(data["modules"])),
    )


def _shared_name(value: object) -> tuple[int, str]:
    """Of which library it is, and its name there."""
    for at, known in enumerate(SHARED_OBJECTS):
        if isinstance(value, known.kind):
            name = known.name(value)
            if known.named(name) is value:
                return at, name
    raise NotStored("a shared object without a name")


def _shared(at: int, name: str) -> object:
    found = SHARED_OBJECTS[at].named(name)
    if found is None:
        raise NotStored(f"there is no {SHARED_OBJECTS[at].kind.__name__} {name} yet")
    return found


def _module(space: Globals) -> str:
    """The module that has them; nothing where none of the names is there, as in the globals of a
    text that was executed."""
    if space.whole or space.names & space.values.keys():
        return module_of(space.values)
    return ""


def _variables(module: str, *, deep: bool) -> dict[str, object]:
    """Those of a module. One of PyTorch's or of Python's library that the run was the first to
    import is imported, as the step would do."""
    if not module:
        return {}
    if not deep:
        importlib.import_module(module.removesuffix("!"))
    variables = variables_of(module)
    if variables is None:
        raise NotStored(f"the module {module} is not loaded")
    return variables


def _table(reads: Sequence[ObjectReads], encoder: Encoder) -> Data:
    """Each that differs once, and which of them each object has."""
    kinds: dict[ObjectReads, int] = {}
    numbers = [kinds.setdefault(read, len(kinds)) for read in reads]
    return {"kinds": [encoder.data(read) for read in kinds], "of": numbers}


def _rows(data: Data, decoder: Decoder) -> list[ObjectReads]:
    kinds = cast("list[ObjectReads]", decoder.values(data["kinds"]))
    return [kinds[at] for at in cast("list[int]", data["of"])]
