"""treadle's own code: where it is, and its exact version."""

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent.parent
VERSION = "0.2.0"
FOLDER = f"{PACKAGE}{os.sep}"
"""How the paths of treadle's own files begin."""
_COMPILED = (f"{FOLDER}examples{os.sep}", f"{FOLDER}integrations{os.sep}")


def folder_of(package: ModuleType) -> str:
    """How the paths of the files of ``package`` begin: ``.../torch/``, and not ``.../torchvision/``
    as well."""
    assert package.__file__ is not None
    return f"{os.path.dirname(package.__file__)}{os.sep}"


def is_machinery_file(path: str) -> bool:
    """Whether a file is part of the compiler. Examples, and the loops of other libraries, are what
    is compiled."""
    return path.startswith(FOLDER) and not path.startswith(_COMPILED)


def is_machinery_module(name: str) -> bool:
    """Likewise, for the name of a module."""
    is_own = name == "treadle" or name.startswith("treadle.")
    return is_own and not name.startswith("treadle.integrations.")


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
