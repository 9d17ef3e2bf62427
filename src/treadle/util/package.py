"""treadle's own code: where it is, and its exact version."""

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
VERSION = "0.2.0"


@functools.cache
def own_digest() -> str:
    """sha256 over treadle's own source: what one version cached is nothing to another, and the
    same goes for one edit of a checkout and the next."""
    digest = hashlib.sha256()
    for path in sorted(_sources(str(PACKAGE))):  # plain strings: every start waits for this
        digest.update(path.removeprefix(str(PACKAGE)).encode() + b"\0")
        with open(path, "rb", buffering=0) as source:
            digest.update(hashlib.sha256(source.read()).digest())
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    for each, _, names in os.walk(folder):
        yield from (os.path.join(each, name) for name in names if name.endswith(".py"))
