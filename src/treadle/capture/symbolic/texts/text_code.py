"""Finds where code builds strings, by its instructions."""

import dis
from types import CodeType

TEXT_METHODS = frozenset({"format", "join", "format_map", "write"})
"""Methods of texts that take other values, and of streams."""
_MAKES = frozenset(
    {"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE", "BUILD_STRING"}
)
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})


def makes_texts(code: CodeType) -> bool:
    """Whether code builds strings anywhere, including code defined in it."""
    if not TEXT_METHODS.isdisjoint(code.co_names) or any(map(_is_text, dis.get_instructions(code))):
        return True
    return any(map(makes_texts, codes_within(code)))


def makes_text(code: CodeType, offset: int) -> bool:
    """Whether the instruction there may."""
    for instruction in dis.get_instructions(code):
        if instruction.offset >= offset and instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            if instruction.opname in _CALLS:
                return not TEXT_METHODS.isdisjoint(code.co_names)
            return _is_text(instruction)
    return False


def codes_within(code: CodeType) -> list[CodeType]:
    """The code objects defined in it, in order."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _is_text(instruction: dis.Instruction) -> bool:
    return instruction.opname in _MAKES or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "%"
    )
