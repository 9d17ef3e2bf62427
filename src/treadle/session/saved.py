"""Saved steps: the results of compiles in a file, for reuse instead of a new compile.

The file holds cache entries under their own keys, among them what was captured (``starts``).
Loading puts them into the cache; at its first call the step starts from there as any other does,
and traces nothing if it reads what the saved one read. Otherwise it is captured, and its key
decides whether the saved entries fit. So a saved step never runs for a function, a model or a
PyTorch version that it was not made for.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.compiler.compiled import Compiled
from treadle.options import Options, deciding
from treadle.runtime.kernels.build import build
from treadle.runtime.kernels.compilers import LIBRARY
from treadle.runtime.store.bundle import SAVE_AGAIN, Bundle, read_bundle, write_bundle
from treadle.runtime.store.cache import Cache
from treadle.session.starts import add_records, records_of
from treadle.util.errors import RuntimeFailure, TreadleError

_KEY = re.compile("[0-9a-f]{64}")
_WORDS = {
    "graph": "the step itself: its function, model, optimizer, shapes or dtypes",
    "constants": "the values of constants",
    "sizes": "the ranges of dynamic sizes",
    "guards": "the assumptions about sizes",
    "costs": "the registered costs of operations",
    "treadle": "the version of treadle",
    "torch": "the version of PyTorch",
    "libraries": "the version of Python, NumPy, SciPy or Triton",
    "switches": "PyTorch's own switches",
    "memory": "the memory budget",
    "threads": "the number of threads",
    "compiler": "the compiler",
    "device": "the device",
    "machine": "the model of the machine",
    "kernels": "whether kernels are generated",
    "codegen": "the option codegen",
    "fuse": "the option fuse",
    "numerics": "the option numerics",
    "optimizer_state": "the option optimizer_state",
    "rng": "the option rng",
    "skip": "the option skip",
    "passes": "what users registered",
}


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file held, beside its cache entries: the options, and each variant's facts."""

    options: Mapping[str, object]
    variants: tuple[Mapping[str, str], ...]

    def applied(self, options: Options) -> Options:
        """``options`` with those that decide what is compiled as they were saved."""
        return replace(options, **self.options)

    def difference(self, facts: Mapping[str, str]) -> str:
        """Why no saved variant serves a step with these facts; empty if one does."""
        changed = [_changed(saved, facts) for saved in self.variants]
        fewest = min(changed, key=len, default=["graph"])
        words = ", ".join(_WORDS.get(name, name) for name in fewest)
        return f"the saved step does not fit: {words} changed" if fewest else ""


def _changed(saved: Mapping[str, str], facts: Mapping[str, str]) -> list[str]:
    return [name for name, value in facts.items() if saved.get(name) != value]


def save(path: Path, variants: Iterable[Compiled], cache: Cache) -> None:
    """Every variant's artifact and, where they are compiled ahead, its libraries."""
    entries: dict[str, bytes] = {}
    starts: list[str] = []
    facts: list[dict[str, str]] = []
    options: dict[str, object] = {}
    for saved_program in (program for variant in variants for program in variant.programs):
        options = deciding(saved_program.options)
        if not saved_program.options.method.is_named:
            raise TreadleError(
                "a step that is planned by a function of yours cannot be saved",
                code="TR-001",
                remedy="compile it with a planner that treadle has by name",
            )
        facts.append(dict(saved_program.facts))
        entries[saved_program.key] = saved_program.entry
        for start in saved_program.start.keys:
            if (record := cache.get(start)) is not None:
                entries[start] = record
                starts.append(start)
        machine = build(
            cache, device=saved_program.artifact.device, target=saved_program.options.target
        )
        for key in machine.library_keys(saved_program.artifact.all_sources):
            library = cache.payload(key, LIBRARY)
            if library is not None:  # otherwise it is compiled again from its source
                entries[key + LIBRARY] = library
    manifest = {"options": options, "variants": facts, "starts": starts}
    write_bundle(path, Bundle(manifest, entries))


def load_saved(path: Path, cache: Cache) -> Saved:
    """Put the entries of a file into ``cache``. TR-405 when it is damaged or something else."""
    bundle = read_bundle(path)
    try:
        options, variants = bundle.manifest["options"], bundle.manifest["variants"]
        saved = Saved(dict(options), tuple(dict(variant) for variant in variants))
        saved.applied(Options())
        keys = bundle.manifest.get("starts", ())  # files of earlier versions have none
        starts = {str(key): records_of(bundle.entries[key]) for key in keys}
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise RuntimeFailure(
            f"{path} holds no step: {error!r}", code="TR-405", remedy=SAVE_AGAIN
        ) from error
    for name, data in bundle.entries.items():
        key = name.removesuffix(LIBRARY)
        if not _KEY.fullmatch(key):
            raise RuntimeFailure(
                f"{path}: {name!r} is not a key of a cache", code="TR-405", remedy=SAVE_AGAIN
            )
        if key in starts:  # the cache may have what other processes read
            add_records(cache, key, starts[key])
        elif cache.payload(key, name[len(key) :]) is None:
            cache.put_path(key, name[len(key) :], data)
    return saved
