"""What of another library's loop cannot be part of a compiled step, in words."""

from treadle.util.errors import CaptureError


def refused(what: str, remedy: str) -> CaptureError:
    """TR-142: ``what`` keeps the step of a loop from being compiled whole."""
    return CaptureError(
        f"the step of this loop cannot be compiled whole: {what}", code="TR-142", remedy=remedy
    )


MODEL_ALONE = 'compile the model alone: model.compile(backend="treadle")'
"""The remedy for a loop that trains in a way of its own."""
