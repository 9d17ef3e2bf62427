"""``logging`` and ``warnings``: messages are shown once, or repeated, and are not state of the
step.

A logger is an object that any code gets by its name. Whether it takes a record depends on a few of
its attributes, which count. What handlers do with a record, and which records a list of them gets,
does not.
"""

import logging
import warnings

from treadle.capture.integrations.integration import Integration, OutputMethod, SharedObjects


def _label(logger: object) -> str:
    return f"logging.getLogger({_name(logger)!r})"


def _name(logger: object) -> str:
    return object.__getattribute__(logger, "name")


def _named(name: str) -> logging.Logger | None:
    found = logging.root.manager.loggerDict.get(name)
    if name == logging.root.name and found is None:
        return logging.root
    return found if isinstance(found, logging.Logger) else None


def _read_levels(logger: logging.Logger | None) -> None:
    """The levels from which the cached answers of a logger follow."""
    while logger is not None:
        _ = logger.level, logger.manager.disable
        logger = logger.parent


def _taken_apart(record: logging.LogRecord) -> tuple[tuple[object, ...], dict[str, object]]:
    """A record split into its message with arguments, and all its other fields."""
    fields = dict(vars(record))
    return (fields.pop("msg"), fields.pop("args")), fields


def _log(
    logger: logging.Logger,
    fields: dict[str, object],
    message: object,
    args: object,
    **later: object,
) -> None:
    """Log a record like the one that was split, with the time of this call."""
    record = logging.makeLogRecord({**fields, **later, "msg": message, "args": args})
    current = logging.LogRecord("", 0, "", 0, "", None, None)
    for name in ("created", "msecs", "relativeCreated"):
        setattr(record, name, getattr(current, name))
    logger.handle(record)


LOGGING = Integration(
    name="logging",
    reporting_files=frozenset({str(logging.__file__)}),
    shared=SharedObjects(
        kind=logging.Logger,
        registry=logging.root.manager.loggerDict,
        label=_label,
        name=_name,
        named=_named,
        deciding=frozenset({"level", "disabled", "parent", "manager", "name"}),
        behind={"_cache": _read_levels},
    ),
    events=(logging.LogRecord,),
    unseen=(logging.Filterer, logging.PlaceHolder),
    outputs=(OutputMethod(logging.Logger, "handle", _taken_apart, _log),),
)
WARNINGS = Integration(name="warnings", reporting_files=frozenset({str(warnings.__file__)}))
