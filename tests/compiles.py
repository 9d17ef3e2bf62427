"""How tests compile C++: each text once in a run, and with less work where machine code is not the
question."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from treadle.codegen.cpp import text
from treadle.runtime.kernels import build, compilers
from treadle.runtime.kernels.compilers import Compiler

FOLDER = "TREADLE_TESTS_COMPILED"
"""The variable that says where the libraries of this run are: workers and the programs that tests
start, each with a cache of its own, have many kernels in common."""


def quick(_cache: object = None) -> Compiler | None:
    """The compiler, asked for a quarter of the work on each file: ``-Og`` instead of ``-O3``."""
    found = compilers.find_cxx("")
    if found is None:
        return None
    return replace(found, flags=tuple("-Og" if each == "-O3" else each for each in found.flags))


def quickly(put: Callable[[object, str, object], None] = setattr) -> None:
    """From now on compile with less work: ``quick``, and each step as one file. Several files
    compile side by side, but each of them reads the same three hundred lines of helpers and is
    linked, which is half of what a small one costs."""
    put(build, "remembered_cxx", quick)
    put(text, "_UNITS", 1)


def share() -> None:
    """From now on this process compiles what no process of the run has compiled."""
    compile_text = compilers._compile

    def once(text: str, compiler: Compiler) -> bytes:
        folder = os.environ.get(FOLDER)
        if folder is None or text == compilers._PROBE:  # whether it compiles is what is asked
            return compile_text(text, compiler)
        library = Path(folder) / compilers.library_key(text, compiler)
        if not library.exists():
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as written:
                written.write(compile_text(text, compiler))
            os.replace(written.name, library)
        return library.read_bytes()

    compilers._compile = once
