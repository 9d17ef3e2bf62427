"""What is compiled for each of some sixty steps, written down to be compared after a refactoring.

``PYTHONPATH=src:. python benchmarks/recorded_entries.py record DIR`` writes for each step what the
cache would hold (sources, plan, arguments, log); ``compare DIR`` compiles all again and names each
step whose entry differs, with the first place where it does. ``--device cuda`` on a GPU;
``--only NAME,...`` for some of them.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from ordinary_steps import generative, sequences, tables, training, vision
from ordinary_steps.kit import ROWS, Kit
from tests.models import architectures

import treadle
from treadle.options import Options

ROOMS = (generative, sequences, tables, training, vision)  # importing one fills ROWS
BUDGETED = ("gpt2", "llama", "bert", "qwen3", "t5", "mixtral")


def _architectures() -> Iterator[str]:
    for name, made in vars(architectures).items():
        public = callable(made) and getattr(made, "__module__", "") == architectures.__name__
        if public and not name.startswith("_") and name != "tokens":
            yield name


def _transformer(name: str, device: str, options: Options) -> bytes:
    torch.manual_seed(0)
    model, batch = getattr(architectures, name)()
    model = model.to(device).train()
    batch = {key: value.to(device) for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    return step.prepare(batch).entry


def _ordinary(name: str, device: str, options: Options) -> bytes:
    torch.manual_seed(0)
    setup = ROWS[name](Kit(torch.device(device)))
    step = treadle.compile(
        setup.step, model=setup.models, optimizer=setup.optimizers, options=options
    )
    return step.prepare(*setup.batch()).entry


def steps() -> dict[str, Callable[[str, Path], bytes]]:
    """Every step that is recorded: of a device and a fresh cache, the bytes of its entry."""

    def of(make: Callable[[str, str, Options], bytes], name: str, **chosen: Any):
        return lambda device, cache: make(name, device, Options(cache_dir=cache, **chosen))

    found = {f"transformers/{name}": of(_transformer, name) for name in _architectures()}
    found |= {
        f"budget/{name}": of(_transformer, name, memory=0.4)
        for name in _architectures()
        if name in BUDGETED
    }
    return found | {f"ordinary/{name}": of(_ordinary, name) for name in ROWS}


def text_of(entry: bytes) -> str:
    """One value a line, in the order of the entry, so that two of them can be told apart."""
    lines: list[str] = []

    def walk(path: str, value: object) -> None:
        match value:
            case dict():
                for key, item in value.items():
                    walk(f"{path}.{key}", item)
            case list():
                for index, item in enumerate(value):
                    walk(f"{path}[{index}]", item)
            case str():
                lines.extend(f"{path}: {line}" for line in value.splitlines() or [""])
            case _:
                lines.append(f"{path}: {value!r}")

    walk("", json.loads(entry))
    return "\n".join(lines) + "\n"


def compiled(name: str, make: Callable[[str, Path], bytes], device: str) -> str:
    """The text of a step's entry, or the error that compiling it ends with."""
    with tempfile.TemporaryDirectory() as cache:
        try:
            return text_of(make(device, Path(cache)))
        except treadle.TreadleError as error:
            return f"{name}: {error.code}\n"


def _first_difference(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    for one, two in zip(old, new, strict=False):
        if one != two:
            return f"  - {one[:300]}\n  + {two[:300]}"
    return f"  {len(old)} lines before, {len(new)} after"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    wanted = {n: f for n, f in steps().items() if not chosen.only or n in chosen.only.split(",")}
    differing = 0
    for name, make in wanted.items():
        file = chosen.folder / f"{name.replace('/', '-')}.txt"
        found = compiled(name, make, chosen.device)
        if chosen.action == "record":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(found)
        elif (before := file.read_text()) != found:
            differing += 1
            print(f"{name} differs\n{_first_difference(before, found)}", flush=True)
    print(f"{len(wanted)} steps, {differing} differ", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
