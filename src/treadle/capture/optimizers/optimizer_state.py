"""``optimizer.state`` as a captured step sees it: the traced state tensors of each parameter.

::

    optimizer.state[p]["exp_avg"]   the state before the update, or after it, as it is at that point
    optimizer.state[p]["step"]      a tensor without dims, from the counter of the call
    optimizer.state[p]["exp_avg"] *= mask   the very tensor, or a new one of its kind: the state
                                            from then on, in the old one's memory at the end
    p in optimizer.state            whether there is state: part of what the step rests on
    self.state[p]["old"] = p.clone()    an entry of the user's own: put there at every call
    self.state[p]["n"] += 1             a number that is read before the launch, and put after it

State that an update rule keeps belongs to the rule; all other entries are the user's own. A call
uses the tensors that are there at that time. Equal numbers under one key are one number as long as
they are equal.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self, final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.parts import MISSING
from treadle.capture.python_state.plain_values import is_plain, is_real
from treadle.capture.python_state.reads.object_graph import first_of_each, tensor_fact
from treadle.capture.symbolic.numbers import Number, Uses, is_number
from treadle.util.errors import CaptureError, with_article

Entries = dict[object, object]
Changed = tuple["StateLocation", object]


@final
@dataclass(frozen=True, slots=True)
class StateLocation:
    """An entry of the user's own in the state of a parameter, as a call finds it. ``key`` is
    ``MISSING`` for the state itself, an empty one where there is none."""

    optimizer: Optimizer
    parameter: Tensor
    key: object
    before: object = MISSING  # in the run

    @property
    def label(self) -> str:
        """The user's words for it."""
        return f"{type(self.optimizer).__name__}.state[...][{self.key!r}]"

    def get(self) -> Any:
        """The value there now, or ``MISSING``."""
        if self.key is MISSING:
            return None if self.parameter in self.optimizer.state else MISSING
        return self.optimizer.state.get(self.parameter, {}).get(self.key, MISSING)

    def put(self, value: object) -> None:
        """Put a value there; ``MISSING`` removes it."""
        if self.key is MISSING:
            self.optimizer.state.setdefault(self.parameter, {})
        elif value is MISSING:
            self.optimizer.state[self.parameter].pop(self.key, None)
        else:
            self.optimizer.state[self.parameter][self.key] = value


@final
class TracedState(MutableMapping[object, object]):
    """Replaces ``optimizer.state``; ``real`` is the original, which our own code reads.

    ``parameters``: by the id of a parameter and of what stands for it, in the order of the groups,
    the two of them. ``entries``: what the optimizer's rule has for a parameter now; nothing, if it
    has no state, or no rule. ``names``: of all that the rule keeps."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, Tensor]],
        entries: Callable[[nn.Parameter], Mapping[str, object]],
        names: Callable[[nn.Parameter], frozenset[str]],
        replace: Callable[[nn.Parameter, object, object], None],
        uses: Uses | None,
    ) -> None:
        self._optimizer = optimizer
        self._real: Any = optimizer.state
        self._parameters = parameters
        self._entries, self._names, self._replace = entries, names, replace
        self._known: dict[int, tuple[nn.Parameter, Entries, TracedEntries]] = {}
        self._assigned: dict[int, Entries] = {}  # whole ones
        self._got: set[int] = set()  # ids of those that are there from then on
        self._asks_there = False  # whether the step asked if a parameter has a state at all
        self.numbers = SharedNumbers(optimizer, uses)

    def __getattr__(self, name: str) -> object:
        """The attributes of a ``defaultdict`` that a mapping lacks, for our own code only."""
        if _asked_by_us():
            return getattr(self._real, name)
        raise refused_state(f"calls optimizer.state.{name}")

    def get(self, key: object, default: object = None) -> object:
        """As of a dict."""
        if _asked_by_us():
            return self._real.get(key, default)
        return self._found(key) if key in self else default

    def _key(self, key: object) -> Any:
        known = self._parameters.get(id(key))
        return key if known is None else known[0]

    def _found(self, key: object) -> Entries:
        """The entries of a parameter, with those of the update rule as they are now."""
        parameter = self._key(key)
        if id(parameter) not in self._known:
            names = self._names(parameter)
            real = self._real.get(parameter, {})
            if not isinstance(real, dict):
                raise refused_state(f"keeps {with_article(type(real).__name__)} in optimizer.state")
            for name in real.keys() - names:
                _check(real[name])
            own = {
                name: self.numbers.standing_in(parameter, name, value)
                for name, value in real.items()
                if name not in names
            }
            replace = functools.partial(self._replace, parameter)
            self._known[id(parameter)] = parameter, own, TracedEntries(own, names, replace)
        entries = self._known[id(parameter)][2]
        entries.renew(self._entries(parameter))
        return self._assigned.get(id(parameter), entries)

    def __getitem__(self, key: object) -> object:
        """The entries of a parameter; an empty dict if there are none."""
        if _asked_by_us():
            return self._real[key]
        entries = self._found(key)
        self._got.add(id(self._key(key)))
        return entries

    def __contains__(self, key: object) -> bool:
        self._asks_there = True
        # a question of ours: `bool(found)` would be one for every entry
        return dict.__len__(self._found(key)) > 0 or self._key(key) in self._real

    def __iter__(self) -> Iterator[object]:
        pairs = {id(leaf): leaf for _, leaf in self._parameters.values()}
        return (leaf for leaf in pairs.values() if leaf in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, key: object, value: object) -> None:
        self._found(key)
        if self._names(self._key(key)) or type(value) is not dict:
            raise refused_state("sets an entry of optimizer.state")
        self._assigned[id(self._key(key))] = value

    def __delitem__(self, key: object) -> None:
        raise refused_state("deletes an entry of optimizer.state")

    # -- after the run

    def has_own(self) -> bool:
        """Whether the step asked for entries of the user's own, or made some."""
        known = self._known.values()
        asks = self._asks_there and any(not self._names(parameter) for parameter, _, _ in known)
        return asks or any(own or entries.asked or entries.own() for _, own, entries in known)

    def changes(self) -> Iterator[Changed]:
        """The changes that the run made to the user's own entries."""
        for parameter, before, entries in self._known.values():
            now = self._assigned.get(id(parameter), entries.own())
            if not now and id(parameter) in self._got and not self._entries(parameter):
                yield StateLocation(self._optimizer, parameter, MISSING), None
            for key in {**before, **now}:
                value = now.get(key, MISSING)
                if value is before.get(key, MISSING):
                    continue
                _check(value)
                place = StateLocation(self._optimizer, parameter, key, before.get(key, MISSING))
                yield place, value

    def layout(self, needed: frozenset[object]) -> tuple[object, ...]:
        """The properties of the entries that the step read which are the same at every call of a
        variant: their keys and types, which of their tensors are identical, and values that are not
        replaced by stand-ins. ``needed``: the stand-ins whose values count."""
        state, tensors = self._optimizer.state, list[object]()
        facts: list[object] = [self.numbers.agree()]
        for parameter, _, _ in self._known.values():
            entries = state.get(parameter)
            names = self._names(parameter)
            if self._asks_there and not names:
                facts.append(entries is None)
            for key, value in (entries or {}).items():
                if key in names:
                    continue
                if isinstance(value, Tensor):
                    tensors.append(value)
                    facts.append((key, self._parameter_at(value) or tensor_fact(value)))
                elif self.numbers.is_free(parameter, key, value, needed):
                    facts.append((key, type(value)))
                else:
                    facts.append((key, type(value), repr(value)))
        tensors += [leaf.grad for leaf, _ in self._parameters.values() if leaf.grad is not None]
        return *facts, first_of_each(tensors)

    def _parameter_at(self, value: Tensor) -> int:
        return id(value) if id(value) in self._parameters else 0

    def places(self) -> dict[int, StateLocation]:
        """By its id, where a tensor of the user's own is found."""
        return {
            id(value): StateLocation(self._optimizer, parameter, key)
            for parameter, own, _ in reversed([*self._known.values()])
            for key, value in own.items()
            if isinstance(value, Tensor) and not self._parameter_at(value)
        }

    @property
    def name(self) -> str:
        """The user's words for it."""
        return f"the state of {type(self._optimizer).__name__}"


@final
class SharedNumbers:
    """The numbers among the user's own entries: equal numbers under one key share a stand-in."""

    def __init__(self, optimizer: Optimizer, uses: Uses | None) -> None:
        self._optimizer, self._uses = optimizer, uses
        self._first: dict[object, Number] = {}
        self._places: dict[object, list[tuple[Tensor, object]]] = {}
        self._roots: dict[tuple[int, object], object] = {}  # of a place that of the number there

    def standing_in(self, parameter: Tensor, key: object, value: object) -> object:
        """The stand-in for an entry."""
        if not is_real(value) or self._uses is None:
            return value
        owner = id(self), id(parameter), key
        group = key, type(value), repr(value)
        self._places.setdefault(group, []).append((parameter, key))
        if group in self._first:
            (owner,) = self._first[group].roots
        self._roots[id(parameter), key] = owner
        if group not in self._first:
            self._uses.decisions.labels[owner] = f"optimizer.state[...][{key!r}]"
            place = StateLocation(self._optimizer, parameter, key)
            self._first[group] = Number(
                value, place.get, frozenset({owner}), self._uses, scales=True
            )
        return self._first[group]

    def is_free(
        self, parameter: object, key: object, value: object, needed: frozenset[object]
    ) -> bool:
        """Whether the entry is a number that calls may change."""
        root = self._roots.get((id(parameter), key))
        return root is not None and root not in needed and is_real(value)

    def agree(self) -> tuple[bool, ...]:
        """Whether entries that share a number in the graph are equal at a call."""
        return tuple(
            all(self._at(place) == self._at(places[0]) for place in places)
            for places in self._places.values()
        )

    def _at(self, place: tuple[Tensor, object]) -> object:
        parameter, key = place
        return self._optimizer.state.get(parameter, {}).get(key)


@final
class TracedEntries(Entries):
    """The state of one parameter. The tensors of what the update rule keeps (``fixed``) may be
    read, written to, and replaced by others of their kind; which there are stays."""

    def __init__(
        self, own: Entries, fixed: frozenset[str], replace: Callable[[object, object], None]
    ) -> None:
        super().__init__(own)
        self._fixed, self._replace = fixed, replace
        self.asked = False  # for an entry that is not the rule's

    def renew(self, entries: Mapping[str, object]) -> None:
        """Replace the rule's entries."""
        for key in self._fixed & super().keys():
            super().__delitem__(key)
        super().update(entries.items())

    def own(self) -> Entries:
        """The entries that are not the rule's."""
        return {key: value for key, value in super().items() if key not in self._fixed}

    def _allow(self, keys: Iterable[object]) -> None:
        if any(key in self._fixed for key in keys):
            raise refused_state("changes which entries optimizer.state[p] has")

    def __setitem__(self, key: object, value: object) -> None:
        if key in self._fixed and super().__contains__(key):
            if value is super().__getitem__(key):
                return  # as `state[key] *= 2` sets it
            self._replace(key, value)
        else:
            self._allow((key,))
            _check(value)
        super().__setitem__(key, value)

    def __delitem__(self, key: object) -> None:
        self._allow((key,))
        super().__delitem__(key)

    def _note(self, key: object) -> None:
        self.asked = self.asked or key not in self._fixed

    def __getitem__(self, key: object) -> object:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: object, default: object = None) -> object:
        """As of a dict."""
        self._note(key)
        return super().get(key, default)

    def setdefault(self, key: object, default: object = None) -> object:
        """As of a dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: object, **named: object) -> None:
        """As of a dict."""
        for key, value in dict(*args, **named).items():
            self[key] = value

    def __ior__(self, other: object) -> Self:
        self.update(other)
        return self

    def __copy__(self) -> Entries:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Entries:
        return copy.deepcopy(self.copy(), memo)

    def pop(self, key: object, *default: object) -> object:
        """As of a dict."""
        self._allow((key,))
        return super().pop(key, *default)

    def popitem(self) -> tuple[object, object]:
        """As of a dict."""
        self._allow(self._fixed & super().keys() or ())
        return super().popitem()

    def clear(self) -> None:
        """As of a dict."""
        self._allow(self._fixed & super().keys() or ())
        super().clear()


def _of_all(name: str) -> Callable[..., object]:
    """A method of a dict whose answer depends on every entry."""
    original = getattr(dict, name)

    @functools.wraps(original)
    def call(self: TracedEntries, *args: object) -> object:
        self.asked = True
        return original(self, *args)

    return call


_OF_ALL = ("__len__", "__iter__", "__reversed__", "__eq__", "__ne__", "__or__", "__ror__",
    "__repr__", "keys", "values", "items", "copy")  # fmt: skip
for _name in _OF_ALL:
    setattr(TracedEntries, _name, _of_all(_name))


def _check(value: object) -> None:
    if not _may_stay(value):
        raise refused_state(f"keeps {with_article(type(value).__name__)} in optimizer.state")


def _may_stay(value: object) -> bool:
    if type(value) is tuple:
        return all(is_number(part) or is_plain(part) for part in value)
    return isinstance(value, Tensor) or is_number(value) or is_plain(value) or value is MISSING


def _asked_by_us() -> bool:
    return code_owner(sys._getframe(2).f_code.co_filename) is CodeOwner.OURS  # pyright: ignore


def refused_state(what: str) -> CaptureError:
    """TR-125."""
    return CaptureError(
        f"the step {what}, which is part of the graph during capture",
        code="TR-125",
        where=here(),
        remedy=(
            "reading its tensors, writing to them in place and replacing them by new tensors of "
            "the same shape works; keep your own values under other keys"
        ),
    )
