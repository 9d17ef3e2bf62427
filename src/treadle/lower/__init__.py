"""Graph to loop IR: ``lower(step) -> Program``. One file per operator family."""

from treadle.lower.graph import lower

__all__ = ["lower"]
