"""Why an operation runs as a PyTorch kernel instead of a generated one: the one table of codes.

::

    "TR-312: aten.foo.default"  =  code  ": "  detail

Lowering gives such a reason to each call that was not made by choice, and ``explain``, ``strict``,
warnings and regions show it. ``docs/reference/errors.md`` has each code.
"""

import enum


class ReasonCode(enum.StrEnum):
    """A stable code; ``sentence`` says what it means."""

    SIZES_FROM_VALUES = "TR-150"
    DTYPE = "TR-311"
    NO_RULE = "TR-312"
    CUSTOM_OPERATION = "TR-313"
    REFUSED = "TR-314"
    CHOSEN = "TR-315"
    NO_CODEGEN = "TR-316"
    SMALL_REGION = "TR-317"

    @property
    def sentence(self) -> str:
        """What it means, for a person."""
        return _SENTENCES[self]

    def because(self, detail: str) -> str:
        """The reason of one call: the code, and what it is about."""
        return f"{self}: {detail}"


_SENTENCES = {
    ReasonCode.SIZES_FROM_VALUES: "a size depends on values, so it is known only at run time",
    ReasonCode.DTYPE: "no code is generated for this dtype",
    ReasonCode.NO_RULE: "no lowering rule says what one element of the result is",
    ReasonCode.CUSTOM_OPERATION: "a custom operation, which treadle cannot see inside",
    ReasonCode.REFUSED: "the lowering rule does not cover this call",
    ReasonCode.CHOSEN: "the options of the step select PyTorch's kernel",
    ReasonCode.NO_CODEGEN: "no code is generated here: there is no compiler, or codegen is off",
    ReasonCode.SMALL_REGION: "it is in a region that is too small or was refused",
}


def code_of(reason: str) -> ReasonCode:
    """The code that a reason begins with."""
    return ReasonCode(reason.partition(":")[0])
