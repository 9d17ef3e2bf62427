"""The exit statuses of the command line, and its output streams."""

import enum
from pathlib import Path

STANDARD_OUTPUT = Path("-")
"""In the place of a file: figures are printed, and nothing else."""


class Exit(enum.IntEnum):
    """What a command's exit status means; ``docs/reference/command-line.md`` lists them."""

    DONE = 0
    NO = 1
    USAGE = 2
    REFUSED = 3
    USERS_CODE = 4
    BUG = 70
    INTERRUPTED = 130
    NO_READER = 141
