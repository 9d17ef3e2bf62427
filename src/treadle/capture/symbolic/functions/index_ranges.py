"""Ranges of sizes that are indices: ``x[range(len(y)), y]``.

Python makes ranges of real integers only. So a step for many sizes would become one for each size,
and a size that depends on values could not be used. Code with a range in an index is rewritten to
call a function of treadle (``source_rewriting``), which gives the numbers as a tensor where one of
the bounds is a size.
"""

import ast
import dis
from types import CodeType, FrameType

import torch

from treadle.capture.symbolic.numbers import is_number, sized
from treadle.capture.symbolic.size_numbers import is_size
from treadle.capture.symbolic.texts.text_code import codes_within
from treadle.compat.unsized import is_unsized
from treadle.util.frames.branch_analysis import called_name


def span(function: object, *bounds: object) -> object:
    """``function(*bounds)`` in an index."""
    if function is range:
        sizes = [sized(bound) if is_number(bound) else bound for bound in bounds]
        if any(is_size(size) or is_unsized(size) for size in sizes):
            return torch.arange(*sizes)  # type: ignore[arg-type]
    return function(*bounds)  # type: ignore[operator]


def names(code: CodeType) -> bool:
    """Whether code may have a range in an index, or what is defined in it."""
    if "range" in code.co_names and any(map(_looks_up, dis.get_instructions(code))):
        return True
    return any(map(names, codes_within(code)))


def calls_range(frame: FrameType) -> bool:
    """Whether ``frame`` makes a range just now, which may be in an index."""
    return called_name(frame) == "range" and names(frame.f_code)


def is_span(node: ast.expr) -> bool:
    """Whether an entry of an index is a call of ``range``."""
    match node:
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
            return not any(isinstance(arg, ast.Starred) for arg in args)
        case _:
            return False


def _looks_up(instruction: dis.Instruction) -> bool:
    is_entry = instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    return is_entry or instruction.opname in ("BINARY_SUBSCR", "STORE_SUBSCR")
