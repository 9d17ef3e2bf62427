"""The meaning of an error code: its entry in ``docs/reference/errors.md``, which is also in the
wheel.

::

    - **TR-138**: a note at ...         one code, with the lines below it that are further in
    - **TR-330, TR-331**: a kernel ...  several
    - **TR-311 to TR-317**: not ...     all that lie between
    ## TR-900, TR-901                   likewise, with what follows
"""

import re
import textwrap
from collections.abc import Iterator

from treadle.util.package import PACKAGE

_ENTRY = re.compile(r"( *- \*\*|## )(TR-\d{3}(?:(?:, | to )TR-\d{3})*)")
_CODE = re.compile(r"(?:TR-?)?(\d{3})", re.IGNORECASE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def meaning_of(code: str) -> str:
    """The entry of a code, written as ``TR-102``, ``tr102`` or ``102``; empty if there is none.

    For a terminal: a page is named by its title, and other codes by the command for them::

        more rows ([Let treadle split the batch](x.md))  ->  more rows ("Let treadle split the
                                                              batch" of the documentation)
        one of TR-502 to TR-505                          ->  the same, and at the end
                                                             See also: treadle why TR-502, ...
    """
    match = _CODE.fullmatch(code.strip().strip("[]"))
    if match is None:
        return ""
    lines = _page().splitlines()
    places = [*_places(lines, int(match[1]))]
    if not places:
        return ""
    innermost = max(places, key=lambda at: _indent(lines[at]))
    entry = _entry(lines, innermost).strip("\n")
    begins = _ENTRY.match(entry)
    own = begins[2] if begins else ""
    others = dict.fromkeys(re.findall(r"TR-\d{3}", entry.replace(own, "", 1)))
    told = _LINK.sub(r'"\1" of the documentation', entry)
    if not others:
        return told
    return f"{told}\nSee also: {', '.join(f'treadle why {code}' for code in others)}"


def _page() -> str:
    """The text: of the wheel, or in a checkout of the documentation."""
    shipped = PACKAGE / "docs" / "errors.md"
    checkout = PACKAGE.parent.parent / "docs" / "reference" / "errors.md"
    return (shipped if shipped.exists() else checkout).read_text(encoding="utf-8")


def _places(lines: list[str], number: int) -> Iterator[int]:
    """Where entries begin that speak of a number."""
    for at, line in enumerate(lines):
        begins = _ENTRY.match(line)
        if begins is None:
            continue
        numbers = [int(each) for each in re.findall(r"\d{3}", begins[2])]
        is_range = " to " in begins[2]
        if number in (range(numbers[0], numbers[-1] + 1) if is_range else numbers):
            yield at


def _entry(lines: list[str], start: int) -> str:
    """The line at ``start`` and those that belong to it, without what they are set in by."""
    first = lines[start]
    entry = [first]
    for line in lines[start + 1 :]:
        begins = line.startswith("#") or _ENTRY.match(line) is not None
        if begins and _indent(line) <= _indent(first):
            break
        if not first.startswith("#") and line and _indent(line) <= _indent(first):
            break  # a paragraph between entries
        entry.append(line)
    return textwrap.dedent("\n".join(entry))


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
