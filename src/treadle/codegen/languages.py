"""The languages that kernels can be printed in, by name."""

from collections.abc import Mapping

from treadle.codegen.cpp.text import CppPrinter
from treadle.codegen.printer import MakePrinter, Printer
from treadle.codegen.triton.text import TritonPrinter
from treadle.loop.program import Buffer
from treadle.targets.cpu import CPP
from treadle.targets.cuda import TRITON
from treadle.util.errors import TreadleError, require

_PRINTERS: dict[str, MakePrinter] = {CPP: CppPrinter, TRITON: TritonPrinter}


def add_language(name: str, printer: MakePrinter) -> None:
    """Let targets name another language; ``TreadleError`` TR-001 for a name that is taken."""
    require(
        name not in _PRINTERS, TreadleError(f"there is a language {name} already", code="TR-001")
    )
    _PRINTERS[name] = printer


def printer_of(name: str, buffers: Mapping[str, Buffer], *, contract: bool) -> Printer:
    """The printer for the kernels of one plan over these buffers."""
    return _PRINTERS[name](buffers, contract)
