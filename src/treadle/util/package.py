"""treadle's own code: where it is, and which treadle this is, to the letter."""

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
VERSION = "0.1.0"


@functools.cache
def own_digest() -> str:
    """sha256 over treadle's own source: what one version cached is nothing to another, and the
    same goes for one edit of a checkout and the next."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
