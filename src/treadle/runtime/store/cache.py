"""A content-addressed store on disk: compiled code and saved artifacts, each under its key.

An entry is one file::

    entry  =  payload  "TREADLE1"  sha256(payload)

The trailer makes one rename enough for the payload and its checksum together, and a dynamic
linker does not mind bytes after the end of a shared library. An entry that is truncated or
altered is an entry that is missing.
"""

import hashlib
import os
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from treadle.util.errors import RuntimeFailure

_MARK = b"TREADLE1"
_TRAILER = len(_MARK) + 32
_STALE_SECONDS = 3600
_TEMPORARY = ".partial-"
_LARGE = 256  # an entry of more than this part of the limit
_FOLDERS = 256  # by the first two digits of the keys
_LONGEST_WAIT = 120.0  # seconds: rather compile twice than wait for a lock that nobody releases


def content_key(*parts: str | bytes) -> str:
    """The key of the entry that these parts determine: sha256 over each part with its length."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


class Cache:
    """``get``, ``put`` and ``path`` by key; ``lock`` so that two processes do one job once.

    Reads need only a readable directory. The first write that fails moves all later writes to
    a private temporary directory, with one warning; that directory goes with this object.
    """

    def __init__(
        self, directory: Path | str, *, limit_bytes: int = 2 << 30, warn: bool = True
    ) -> None:
        self.directory = Path(directory)
        self.warn = warn
        self.limit_bytes = limit_bytes
        self._private: Path | None = None

    @property
    def writable(self) -> bool:
        """False once a write has failed and the temporary directory took over."""
        return self._private is None

    def get(self, key: str) -> bytes | None:
        """The payload, or ``None`` when the entry is missing, truncated or altered."""
        return self.payload(key, "")

    def put(self, key: str, payload: bytes) -> None:
        """Store ``payload`` at once: a reader sees all of it or none of it."""
        self._store(key, "", payload)

    def path(self, key: str, suffix: str) -> Path | None:
        """The file of a checked entry, for a reader that needs a path (a dynamic linker)."""
        entry = self._find(key, suffix)
        return None if entry is None else entry[0]

    def payload(self, key: str, suffix: str) -> bytes | None:
        """``get`` for an entry with a suffix."""
        entry = self._find(key, suffix)
        return None if entry is None else entry[1]

    def put_path(self, key: str, suffix: str, payload: bytes) -> Path:
        """``put``, and the path of the entry."""
        return self._store(key, suffix, payload)

    @contextmanager
    def lock(self, key: str) -> Generator[None]:
        """Hold the lock of ``key`` against other processes; no lock in a private directory, nor
        where another process holds it for longer than ``_LONGEST_WAIT``."""
        lock = None
        try:
            path = self._root() / "locks" / f"{key[:2]}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(str(path))
            lock.acquire(timeout=_LONGEST_WAIT)
        except OSError:  # ``Timeout`` is one
            lock = None  # at worst the same work is done twice
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in _entries(self._root()))

    def count(self) -> int:
        """The number of entries, without those of a temporary directory."""
        return sum(1 for _ in _entries(self.directory))

    def clear(self) -> tuple[int, int]:
        """Remove every entry; gives how many and their bytes. What is in use stays in use."""
        removed = [(path, size) for _, size, path in _entries(self.directory)]
        for path, _ in removed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise RuntimeFailure(f"cannot remove {path}: {error}", code="TR-404") from error
        return len(removed), sum(size for _, size in removed)

    def _find(self, key: str, suffix: str) -> tuple[Path, bytes] | None:
        for root in (self.directory, self._private):
            if root is None:
                continue
            path = _entry(root, key, suffix)
            payload = _read(path)
            if payload is not None:
                with suppress(OSError):
                    os.utime(path)  # the least recently used go first
                return path, payload
        return None

    def _store(self, key: str, suffix: str, payload: bytes) -> Path:
        data = payload + _MARK + hashlib.sha256(payload).digest()
        try:
            path = _write(_entry(self._root(), key, suffix), data)
        except OSError as error:
            if self._private is not None:
                raise RuntimeFailure(
                    f"cannot write {len(data)} bytes to {self._private}: {error}",
                    code="TR-404",
                    remedy="free some disk space, or point TMPDIR to a directory with space",
                ) from error
            self._fall_back(error)
            return self._store(key, suffix, payload)
        large = len(data) * _LARGE > self.limit_bytes
        if large or (key[1] == "0" and (key[2] == "0" or self._may_be_full(path.parent))):
            self._evict(path)
        return path

    def _root(self) -> Path:
        return self._private or self.directory

    def _fall_back(self, error: OSError) -> None:
        try:
            self._private = Path(tempfile.mkdtemp(prefix="treadle-"))
        except OSError as second:
            raise RuntimeFailure(
                f"neither the cache directory {self.directory} nor a temporary directory can be "
                f"written: {error}; {second}",
                code="TR-404",
                remedy="point TREADLE_CACHE_DIR to a directory with space that can be written",
            ) from second
        weakref.finalize(self, shutil.rmtree, str(self._private), ignore_errors=True)
        if not self.warn:
            return
        warnings.warn(
            f"the cache directory {self.directory} cannot be written ({error}); compiled code "
            "is kept in a temporary directory and will be compiled again by the next process",
            RuntimeWarning,
            stacklevel=4,
        )

    def _may_be_full(self, folder: Path) -> bool:
        """Whether ``folder`` has its part of half the limit: keys are spread evenly over all."""
        sizes = [size for _, size, _ in _entries(self._root(), folder.name)]
        return sum(sizes) * _FOLDERS * 2 > self.limit_bytes

    def _evict(self, keep: Path) -> None:
        """Remove the least recently used entries until the rest fits the limit.

        That reads the size of every entry. So only one in 16 small entries triggers it if its own
        folder suggests that the limit is near, and otherwise one in 256; a few small entries may
        exceed the limit.
        """
        entries = sorted(_entries(self._root()))
        excess = sum(size for _, size, _ in entries) - self.limit_bytes
        for _, size, path in entries:
            if excess <= 0:
                return
            if path != keep:
                path.unlink(missing_ok=True)  # a process that has it mapped keeps the inode
                excess -= size


def _entry(root: Path, key: str, suffix: str) -> Path:
    return root / key[:2] / (key + suffix)


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    payload, trailer = data[:-_TRAILER], data[-_TRAILER:]
    if len(data) < _TRAILER or trailer != _MARK + hashlib.sha256(payload).digest():
        return None
    return payload


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path


def _entries(root: Path, folders: str = "[0-9a-f][0-9a-f]") -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, path) of each entry; what a killed writer left behind is removed."""
    for path in root.glob(f"{folders}/*"):
        try:
            status = path.stat()
        except OSError:
            continue  # another process evicted it just now
        if not path.name.startswith(_TEMPORARY):
            yield status.st_mtime, status.st_size, path
        elif time.time() - status.st_mtime > _STALE_SECONDS:
            with suppress(OSError):
                path.unlink()
