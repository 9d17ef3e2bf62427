"""Random programs over the state of ``python_state.py``, and each of them in two equal worlds: one
whose step is compiled, and one that runs eagerly."""

import builtins
import itertools
import linecache
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import treadle
import treadle.capture.step
from contract.python_state import LAYERS, Layer, Leaf, Scope
from contract.python_values import HEADER, LEAVES, SCOPES, WRAPS
from contract.torch_state import TORCH, TorchState

CACHE = Path(tempfile.gettempdir()) / f"treadle-worlds-{os.getuid()}"
OPTIONS = treadle.Options(codegen=False, progress=False, cache_dir=CACHE, max_cached=64)
SECONDS = 30  # that one call may take


@dataclass(frozen=True)
class Change:
    """Something done to the state between two calls, and what takes it back."""

    label: str
    do: str
    undo: str
    shared: bool = False  # done once for both worlds


@dataclass(frozen=True)
class Probe:
    """One value that a step reads. ``label``: of which kinds it is made."""

    label: str
    text: str
    call: str
    changes: tuple[Change, ...]


@dataclass
class Maker:
    """Makes probes; each gets numbers of its own."""

    random: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    not_yet: frozenset[str] = frozenset()

    def _pick(self, kinds: tuple[Any, ...]) -> Any:
        return self.random.choice([each for each in kinds if each.name not in self.not_yet])

    def probe(self, scope: Scope | None = None, leaf: Leaf | None = None) -> Probe:
        scope, leaf = scope or self._pick(SCOPES), leaf or self._pick(LEAVES)
        layers = [self._pick(LAYERS) for _ in range(self.random.choice((0, 1, 1, 1, 2, 2, 3, 4)))]
        return self.of(scope, layers, leaf)

    def of(self, scope: Scope, layers: list[Layer], leaf: Leaf) -> Probe:
        n, numbers = next(self.numbers), [next(self.numbers) for _ in [*layers, leaf]]
        before, value = self._built(layers, leaf, numbers)
        looked = self.random.randrange(len(layers)) if layers and self._odds(0.2) else None
        if looked is not None and not layers[looked].looks:
            looked = None
        path = scope.inner.format(n=n)
        for at, (layer, number) in enumerate(zip(layers, numbers, strict=False)):
            if looked == at:
                break
            path = self.random.choice(layer.reads).format(o=path, n=number)
        looks = leaf.looks if looked is None else layers[looked].looks
        look = self.random.choice(looks)
        number = numbers[-1] if looked is None else numbers[looked]
        e = self.random.choice(WRAPS).replace("{e}", look.format(o=path, n=number))
        text = before + scope.text.format(n=n, c=value, e=e)
        label = " / ".join((scope.name, *(each.name for each in layers), leaf.name))
        label += f" : {look if looked is None else f'{layers[looked].name} {look}'}"
        call = scope.call.format(n=n)
        return Probe(label, text, call, self._kept(self._changes(scope, n, layers, leaf, numbers)))

    def of_module(self) -> Probe:
        """One of PyTorch's kinds that stands beside others."""
        kinds = tuple(each for each in TORCH if not each.shared and "opt = " not in each.before)
        return self.of_torch(self._pick(kinds))

    def of_torch(self, kind: TorchState | None = None, look: str | None = None) -> Probe:
        kind = kind or self._pick(TORCH)
        n, look = next(self.numbers), look or self.random.choice(kind.looks)
        scope = f"def probe{n}(x):\n    return {look.format(n=n)}"
        edits = [tuple(text.format(n=n) for text in edit) for edit in kind.edits]
        changes = [
            Change(f"{kind.name}: {label[0]}", *edit, shared=kind.shared)
            for label, edit in zip(kind.edits, edits, strict=True)
        ]
        before = kind.before.format(n=n)
        return Probe(
            f"{kind.name} : {look}", f"{before}\n{scope}", f"probe{n}(x)", self._kept(changes)
        )

    def _kept(self, changes: Iterable[Change]) -> tuple[Change, ...]:
        return tuple(each for each in changes if each.label not in self.not_yet)

    def _odds(self, chance: float) -> bool:
        return self.random.random() < chance

    def _built(self, layers: list[Layer], leaf: Leaf, numbers: list[int]) -> tuple[str, str]:
        """Text that must run before, and an expression that makes the whole."""
        value = self.random.choice(leaf.values).format(n=numbers[-1])
        before = [leaf.before.format(n=numbers[-1])]
        for layer, number in reversed(list(zip(layers, numbers, strict=False))):
            if layer.before:
                before.append(layer.before.format(n=number, c=value))
            value = layer.build.format(n=number, c=value)
        return "\n".join([each for each in before if each] + [""]), value

    def _changes(
        self, scope: Scope, n: int, layers: list[Layer], leaf: Leaf, numbers: list[int]
    ) -> Iterator[Change]:
        """Everything that may be done to a probe's state."""
        root = scope.root.format(n=n)
        yield self._replaced(scope.name, root, scope.put.replace("{n}", str(n)), layers, leaf)
        for do, undo in scope.edits:
            _, c = self._built(layers, leaf, numbers)
            yield Change(f"{scope.name}: {do}", do.format(n=n, c=c), undo.format(n=n))
        o = root
        for at, (layer, number) in enumerate(zip(layers, numbers, strict=False)):
            inner = layer.reads[0].format(o=o, n=number)
            for put in layer.puts:
                text = put.replace("{n}", str(number)).replace("{o}", o)
                yield self._replaced(f"{layer.name}: {put}", inner, text, layers[at + 1 :], leaf)
            for do, undo in layer.edits:
                made = [each.format(o=o, n=number) for each in (do, undo)]
                yield Change(f"{layer.name}: {do}", *made)
            o = inner
        for do, undo in leaf.edits:
            made = [each.format(o=o, n=numbers[-1]) for each in (do, undo)]
            yield Change(f"{leaf.name}: {do}", *made)

    def _replaced(
        self, label: str, place: str, put: str, layers: list[Layer], leaf: Leaf
    ) -> Change:
        """A value newly made takes the place of the old one."""
        before, value = self._built(layers, leaf, [next(self.numbers) for _ in [*layers, leaf]])
        undo = put.replace("{{", "{").replace("}}", "}").replace("{v}", "_old")
        do = put.replace("{{", "{").replace("}}", "}").replace("{v}", value)
        return Change(f"{label} := new", f"_old = {place}\n{before}{do}", undo)


STEP = "def step(x, given=None):\n    return [{terms}]\n"


def program_of(probes: list[Probe]) -> str:
    """The text that defines ``step``."""
    terms = ", ".join(f"x * {each.call}" for each in probes)
    return "\n".join([*(each.text for each in probes), STEP.format(terms=terms)])


class World:
    """A module made of a program, and a model."""

    _count = itertools.count()

    def __init__(self, text: str, tag: str = "") -> None:
        """``tag``: of worlds that are the same one in several processes."""
        self.tag = tag or f"world{next(self._count)}"
        self.module = ModuleType(tag or "world")
        self.space = vars(self.module)
        self.modules = set(sys.modules)
        self.builtins = set(vars(builtins))
        if tag:
            sys.modules[tag] = self.module
        torch.manual_seed(0)
        self.space["model"] = nn.Module()
        self.run(HEADER)
        self.run(text, keep=True)
        self.step = self.space["step"]

    def run(self, text: str, *, keep: bool = False) -> None:
        """Execute in this world. ``keep``: so that messages can show its lines."""
        text = text.replace("@TAG@", self.tag)
        name = f"<{self.tag}>"
        if keep:
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(_code(text, name), self.space)

    def arguments(self, size: int = 2) -> tuple[Any, ...]:
        x = torch.tensor([0.5, -1.25, 2.0, 0.125][:size], dtype=torch.float64)
        given = self.space["ARGUMENTS"]
        return (x, dict(given)) if given else (x,)

    def close(self) -> None:
        linecache.cache.pop(f"<{self.tag}>", None)
        for name in set(sys.modules) - self.modules:
            if name.startswith(self.tag):
                del sys.modules[name]
        for name in set(vars(builtins)) - self.builtins:
            if self.tag in name:
                delattr(builtins, name)


_CODES: dict[str, Any] = {}


def _code(text: str, name: str) -> Any:
    if text is HEADER or text == HEADER:
        if "" not in _CODES:
            _CODES[""] = compile(text, "<header>", "exec")
        return _CODES[""]
    return compile(text, name, "exec")


class Recompiles(Exception):
    """A call asked for a new variant."""


@contextmanager
def no_compiling() -> Iterator[None]:
    """Raise ``Recompiles`` where a call would be captured."""

    def refuse(*_: object, **__: object) -> Any:
        raise Recompiles

    original = treadle.capture.step.capture
    treadle.capture.step.capture = refuse
    try:
        yield
    finally:
        treadle.capture.step.capture = original


class TooSlow(Exception):
    """A call did not return."""


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    def over(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def same(ours: Any, theirs: Any) -> bool:
    """Bit for bit; numbers that are not a number are equal."""
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if not isinstance(ours, torch.Tensor):
        return type(ours) is type(theirs) and (ours == theirs or ours != ours)
    alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return alike and bool(torch.allclose(ours, theirs, rtol=1e-12, atol=0, equal_nan=True))
