"""The arguments of a call: their leaves, and the containers around them.

During capture, a step receives copies of its arguments' containers. Changes to a copy (a new or
removed entry of a dict, an attribute) are applied to the user's own container at every call. If the
step returns or stores a copy, the call returns or stores the user's own container.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from treadle.capture.python_state.changes import Change, RunPlaces, holds, refused
from treadle.capture.python_state.container_parts import Sequenced
from treadle.capture.python_state.containers.container_changes import reference_to
from treadle.capture.python_state.flatten import Container, FlatArguments, nodes_in, replaced
from treadle.capture.python_state.introspect import parts_of
from treadle.capture.python_state.parts import MISSING, Part, Reading
from treadle.capture.python_state.plain_values import is_plain, is_same_value
from treadle.capture.python_state.reads.reads_walk import ReadsWalk


@dataclass(slots=True)
class ServedCall:
    """The call that is served, with its arguments as leaves and containers. ``is_same``: nothing
    that it depends on has changed since the previous call, including where optimizers keep their
    counters, and no user code runs in it; ``is_bare``: likewise, and no parameter whose gradient it
    clears has one. ``vouched``: watches of its inputs that were checked then."""

    arguments: FlatArguments = field(default_factory=FlatArguments.none)
    is_same: bool = False
    is_bare: bool = False
    vouched: tuple[object, ...] = ()
    _nodes: list[object] | None = None

    @property
    def leaves(self) -> list[Any]:
        """Its tensors and values, in the order of the arguments."""
        return self.arguments.leaves

    @property
    def containers(self) -> list[Container]:
        """Its containers that may hold more than their parts."""
        return self.arguments.containers

    def serve(self, arguments: FlatArguments) -> None:
        """Serve these arguments from now on."""
        self.arguments, self._nodes = arguments, None
        self.is_same = self.is_bare = False
        self.vouched = ()

    def forget(self) -> None:
        """Forget the call."""
        self.serve(FlatArguments.none())

    def leaf(self, at: int) -> object:
        """One of its leaves; ``MISSING`` between two calls."""
        leaves = self.arguments.leaves
        return leaves[at] if at < len(leaves) else MISSING

    def _container(self, at: int) -> object:
        return self.containers[at].value

    def _key(self, at: int) -> object:
        return self.arguments.keys[at]

    def read_objects(self, walk: ReadsWalk, objects: Iterable[tuple[int, str]]) -> None:
        """The parts of object leaves, given by their numbers and labels, on which a step
        depends."""
        for at, label in objects:
            walk.add_argument(label, self.leaves[at], partial(self.leaf, at))

    def read(self, walk: ReadsWalk) -> None:
        """The parts of its containers, and of keys that are objects, on which a step depends."""
        for at, container in enumerate(self.containers):
            label, find = f"argument {type(container.value).__name__}", partial(self._container, at)
            walk.add_container(label, container.value, find, container.parts)
        for at, key in enumerate(self.arguments.keys):
            if not is_plain(key):
                label = f"a key of an argument ({type(key).__name__})"
                walk.add_argument(label, key, partial(self._key, at))

    def node(self, at: int) -> object:
        """One of the containers, as they were when it was first asked for."""
        if self._nodes is None:
            self._nodes = nodes_in(self.arguments.tree)
        return self._nodes[at]


@final
@dataclass(frozen=True, slots=True)
class ArgumentLocation:
    """A place in a container among the arguments: the part ``at`` of the ``node``th."""

    call: ServedCall
    node: int
    at: int
    name: object
    label: str

    def _part(self) -> Part:
        return parts_of(self.call.node(self.node), "").parts[self.at]

    def get(self) -> object:
        """The value there now; ``MISSING`` between two calls."""
        return MISSING if self.call.arguments.tree is None else self._part().get(self.name)

    def look(self, run: RunPlaces) -> list[object]:
        """The value there in a run."""
        return [run.argument_part(self.node, self.at).get(self.name)]

    def put(self, value: object) -> None:
        """Put ``value`` there; ``MISSING`` removes it."""
        self._part().put(self.name, value)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ArgumentAlias:
    """Stands for the user's own container in a result. (Callable: so it is not taken apart.)"""

    call: ServedCall
    at: int

    def __call__(self) -> object:
        return self.call.node(self.at)


@final
class Copies:
    """The containers that the traced run gets, with their contents before it."""

    def __init__(self, tree: object, call: ServedCall) -> None:
        self._call = call
        self._nodes = nodes_in(tree)
        self._at = {id(node): at for at, node in enumerate(self._nodes)}
        self._before = [_parts(node) for node in self._nodes]

    def changes(self) -> Iterator[tuple[Change, ArgumentLocation]]:
        """The changes that the run made to them. ``CaptureError`` TR-117 for changes that cannot be
        repeated: entries that were added to or removed from lists, sets and deques."""
        for nth, node in enumerate(self._nodes):
            for at, (part, before) in enumerate(self._before[nth]):
                now = part.now()
                if part.is_same(now, before):
                    continue
                if not part.settable or (isinstance(part, Sequenced) and len(now) != len(before)):
                    error = refused(part.label, type(node).__name__)
                    raise error.seen_by(partial(_holds, nth, at))
                for name in {**before, **now}:
                    old, new = before.get(name, MISSING), now.get(name, MISSING)
                    if old is not new and not is_same_value(old, new):
                        place = ArgumentLocation(self._call, nth, at, name, part.where(name))
                        yield Change(node, at, part, name, old, new), place

    def part(self, nth: int, at: int) -> Part:
        """The part ``at`` of one of them."""
        return self._before[nth][at][0]

    def with_whole(self, value: object) -> object:
        """``value`` with ``ArgumentAlias`` in the places of these containers, and ``Reference`` in
        those of containers outside."""
        return replaced(value, lambda node: reference_to(node) or self._whole(node))

    def _whole(self, node: object) -> ArgumentAlias | None:
        at = self._at.get(id(node))
        return None if at is None else ArgumentAlias(self._call, at)


def _holds(nth: int, at: int, run: RunPlaces) -> list[object]:
    return holds(run.argument_part(nth, at))


def _parts(node: object) -> list[tuple[Part, Reading]]:
    parts = parts_of(node, "an argument").parts
    return [(part, dict(part.now())) for part in parts]
