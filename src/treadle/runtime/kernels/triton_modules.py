"""Imports generated Triton modules.

A module's text goes to a file named by its hash (the Triton compiler reads the source back from
there) and is imported once.
"""

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType

from treadle.util.errors import RuntimeFailure

_modules: dict[str, ModuleType] = {}


def module_of(folder: Path, text: str) -> ModuleType:
    """The module with this text, whose file is in ``folder``."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    if digest not in _modules:
        path = _write(folder, f"triton_{digest}.py", text)
        _modules[digest] = _import(f"treadle_triton_{digest}", path)
    return _modules[digest]


def _write(folder: Path, name: str, text: str) -> Path:
    """Write atomically, since other processes may write the same file; to another folder if this
    one is not writable."""
    path = folder / name
    if path.exists() and path.read_text() == text:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    except OSError:
        return _write(Path(tempfile.mkdtemp(prefix="treadle-")), name, text)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).replace(path)
    return path


def _import(name: str, path: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RuntimeFailure(
            f"the generated module {path} cannot be imported: {error}",
            code="TR-431",
            remedy="install triton; it comes with CUDA builds of PyTorch",
        ) from error
    return module
