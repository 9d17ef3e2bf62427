"""Why an operation runs as a PyTorch kernel instead of a generated one: the one table of codes.

::

    "TR-312: aten.foo.default"  =  code  ": "  detail

Lowering gives such a reason to each call that was not made by choice, and ``explain``, ``strict``,
warnings and regions show it. ``docs/reference/errors.md`` has each code.
"""

import enum


class ReasonCode(enum.StrEnum):
    """A stable code, and beside it what it means."""

    SIZES_FROM_VALUES = "TR-150"  # a size depends on values, so it is known only at run time
    DTYPE = "TR-311"  # no code is generated for this dtype
    NO_RULE = "TR-312"  # no lowering rule says what one element of the result is
    CUSTOM_OPERATION = "TR-313"  # a custom operation, which treadle cannot see inside
    REFUSED = "TR-314"  # the lowering rule does not cover this call
    CHOSEN = "TR-315"  # the options of the step select PyTorch's kernel
    NO_CODEGEN = "TR-316"  # no code is generated here: there is no compiler, or codegen is off
    SMALL_REGION = "TR-317"  # it is in a region that is too small or was refused

    def because(self, detail: str) -> str:
        """The reason of one call: the code, and what it is about."""
        return f"{self}: {detail}"


def code_of(reason: str) -> ReasonCode:
    """The code that a reason begins with."""
    return ReasonCode(reason.partition(":")[0])
