"""Log records of steps, under the logger ``treadle``.

::

    treadle.compile      train_step: compiled in 2.31 s: 11 launches, 5 library calls, peak 1.2 GiB
    treadle.recompiles   train_step: argument x: shape [8, 32] became [4, 32]
    treadle.fallbacks    train_step: aten.sort.stable x1: TR-312: ..., train.py:31: ...

All records have level ``INFO``, which Python does not show by default: ``Options(logs=...)`` shows
them, and so does any handler of the user. Texts are formatted only if there is a listener.
"""

import logging
from collections.abc import Mapping, Sequence

from treadle.compiler.compiled import Compiled
from treadle.options import LOGS
from treadle.runtime.store.artifact import Launch
from treadle.session.breaks import breaks_of
from treadle.util.sizes import format_bytes

_LOGGERS: Mapping[str, logging.Logger] = {
    name: logging.getLogger(f"treadle.{name}") for name in LOGS
}
_FORMAT = logging.Formatter("%(name)s: %(message)s")


def show_logs(names: Sequence[str]) -> None:
    """From now on these are shown: by the handlers that there are, or on standard error."""
    for name in names:
        logger = _LOGGERS[name]
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(_FORMAT)
            logger.addHandler(handler)


def log_compiled(name: str, compiled: Compiled) -> None:
    """That a variant of the step ``name`` was made, in what time, and where generated code
    stops."""
    if _LOGGERS["compile"].isEnabledFor(logging.INFO):
        _LOGGERS["compile"].info("%s: %s", name, _summary(compiled))
    if _LOGGERS["fallbacks"].isEnabledFor(logging.INFO):
        for found, count in breaks_of(compiled.artifact).items():
            where = f", {found.where}" if found.where else ""
            words = f"{found.operation} x{count}: {found.reason}{where}"
            _LOGGERS["fallbacks"].info("%s: %s", name, words)


def log_recompiles(name: str, reasons: Sequence[str]) -> None:
    """Why the step ``name`` was compiled or captured again, or ran eagerly."""
    for reason in reasons:
        _LOGGERS["recompiles"].info("%s: %s", name, reason)


def _summary(compiled: Compiled) -> str:
    artifact = compiled.artifact
    launches = sum(isinstance(step, Launch) for step in artifact.steps)
    how = "compiled"
    if compiled.untraced:
        how = "taken from the cache, untraced,"
    elif compiled.from_cache:
        how = "traced, and taken from the cache,"
    return (
        f"{how} in {sum(compiled.seconds.values()):.2f} s: {launches} launches, "
        f"{len(artifact.steps) - launches} library calls, peak {format_bytes(artifact.peak_bytes)}"
    )
