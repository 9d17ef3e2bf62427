"""Modules of Python's standard library with one or two facts each."""

import argparse
import decimal
import dis
import inspect
import linecache
import opcode
import random
import re
import traceback
import tracemalloc
import weakref

from treadle.capture.integrations.integration import (
    GeneratorState,
    Integration,
    ProcessState,
    SharedGenerator,
)


def _decimal_context() -> object:
    """The decimal context without the flags that an operation sets."""
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp


_DECIMAL = ProcessState("the decimal context", _decimal_context)


def _state_of(generator: random.Random) -> GeneratorState | None:
    """The state of a generator; ``None`` if its numbers come from the system."""
    if isinstance(generator, random.SystemRandom):
        return None
    return GeneratorState(generator.getstate, generator.setstate)


STANDARD_LIBRARY = (
    Integration(name="argparse", namespaces=(argparse.Namespace,)),
    Integration(  # a capture looks up bytecode with it: its lists of numbers are none of the step's
        name="dis", tracing_files=(str(dis.__file__), str(opcode.__file__))
    ),
    Integration(name="decimal", process_state={"decimal": _DECIMAL, "Decimal": _DECIMAL}),
    Integration(
        name="random",
        shared_generator=SharedGenerator(
            "Python's random",
            random,
            random._inst,
            GeneratorState(random.getstate, random.setstate),
            random.choice,
        ),
        generators={random.Random: _state_of},
    ),
    Integration(
        name="re",
        caches={"re": frozenset({"_cache", "_cache2"})},
        unchangeable=(re.Pattern,),
    ),
    Integration(name="sys", caches={"sys": frozenset({"path_importer_cache"})}),
    Integration(
        name="threading",
        caches={"threading": frozenset({"_active", "_limbo", "_dangling", "_shutdown_locks"})},
    ),
    Integration(
        name="linecache",
        caches={"linecache": frozenset({"cache"})},
        background_files=frozenset({str(linecache.__file__)}),
    ),
    *(
        Integration(name=module.__name__, background_files=frozenset({str(module.__file__)}))
        for module in (inspect, traceback, tracemalloc, weakref)
    ),
)
