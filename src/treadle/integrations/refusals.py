"""What of another library's loop cannot be part of a compiled step, in words."""

from treadle.util.errors import CaptureError, TreadleError, joined_with


def not_installed(error: ModuleNotFoundError) -> TreadleError:
    """TR-010, which is an ``ImportError``, for a library that was not found."""
    library = str(error.name).partition(".")[0]
    return joined_with(ImportError, TreadleError)(
        f"{library} is not installed", code="TR-010", remedy=f"pip install {library}"
    )


def refused(what: str, remedy: str) -> CaptureError:
    """TR-142: ``what`` keeps the step of a loop from being compiled whole."""
    return CaptureError(
        f"the step of this loop cannot be compiled whole: {what}", code="TR-142", remedy=remedy
    )


MODEL_ALONE = 'compile the model alone: model.compile(backend="treadle")'
"""The remedy for a loop that trains in a way of its own."""
