"""A saved step on disk: named payloads in one file, each checked, written at once.

::

    file   =  "treadle step 1 " sha256(index) " " length(index) "\\n"  index  payload*
    index  =  {"manifest": {...}, "entries": [[name, length, sha256], ...]}
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.util.errors import RuntimeFailure

_HEAD = "treadle step 1"
SAVE_AGAIN = "save the step again; without the file it is compiled at its first call"


@dataclass(frozen=True, slots=True)
class Bundle:
    """``manifest`` is JSON data; ``entries`` are bytes by name."""

    manifest: Mapping[str, Any]
    entries: Mapping[str, bytes]


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Replace ``path`` at once: a reader sees the old file or the new one."""
    rows = [[name, len(data), _digest(data)] for name, data in bundle.entries.items()]
    index = json.dumps({"manifest": bundle.manifest, "entries": rows}).encode()
    head = f"{_HEAD} {_digest(index)} {len(index)}\n".encode()
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as file:
            file.writelines([head, index, *bundle.entries.values()])
        os.replace(partial, path)
    except OSError as error:
        raise RuntimeFailure(
            f"cannot write {path}: {error}", code="TR-405", remedy="choose a writable place"
        ) from error
    finally:
        with suppress(OSError):
            os.unlink(partial)


def read_bundle(path: Path) -> Bundle:
    """``RuntimeFailure`` TR-405 unless the file is whole, to the last byte."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RuntimeFailure(
            f"{path} cannot be read: {error.strerror}",
            code="TR-405",
            remedy="give the path of a file that Step.save wrote",
        ) from None
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeFailure(
            f"{path} is not a saved step, or is damaged: {error}",
            code="TR-405",
            remedy=SAVE_AGAIN,
        ) from error


def _parse(data: bytes) -> Bundle:
    head, _, rest = data.partition(b"\n")
    kind, _, facts = head.decode("ascii").partition(_HEAD + " ")
    _hold(not kind and bool(facts), "its header is wrong")
    digest, length = facts.split(" ")
    index = rest[: int(length)]
    _hold(_digest(index) == digest, "its index is damaged")
    parsed = json.loads(index)
    entries: dict[str, bytes] = {}
    at = len(index)
    for name, size, expected in parsed["entries"]:
        entries[name] = rest[at : at + size]
        at += size
        _hold(_digest(entries[name]) == expected, f"entry {name} is damaged")
    _hold(at == len(rest), "it has trailing bytes")
    return Bundle(parsed["manifest"], entries)


def _hold(condition: bool, words: str) -> None:
    if not condition:
        raise ValueError(words)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
