"""Two printed steps compared: what a pass did, at a glance."""

import difflib


def diff(before: str, after: str, *, context: int = 2) -> str:
    """Unified diff of two ``show`` texts without the file headers; empty when equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=context
    )
    return "\n".join(list(lines)[2:])
