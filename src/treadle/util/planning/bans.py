"""Rules by which values are never recomputed, as users name them."""

from collections.abc import Mapping

from treadle.util.errors import TreadleError

BANS: Mapping[str, int | None] = {
    "compute-intensive": None,
    "library-calls": None,
    "small-reductions": None,
    "materialised": None,
    "used-far-apart": None,
    "long-chains": 100,
    "far-from-backward": 1000,
}
"""Each with its bound, if it has one. None is in force within a budget unless it is named: a price
decides there. Without a budget, ``compute-intensive`` always is."""


def known_bans(given: object) -> tuple[str, ...]:
    """Names, with their bounds where these are not the usual ones: ``long-chains=50``."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple):
        raise _unknown(given)
    return tuple(dict.fromkeys(map(_known, names)))


def _known(given: object) -> str:
    if not isinstance(given, str):
        raise _unknown(given)
    name, equals, bound = given.partition("=")
    has_bound = BANS.get(name) is not None
    if name not in BANS or (equals and not (has_bound and bound.isdecimal() and int(bound) > 0)):
        raise _unknown(given)
    return given


def bound_of(ban: str) -> tuple[str, int]:
    """The name and the bound of a known ban; 0 if it has none."""
    name, equals, bound = ban.partition("=")
    return name, int(bound) if equals else BANS[name] or 0


def _unknown(given: object) -> TreadleError:
    names = ", ".join(name if bound is None else f"{name}={bound}" for name, bound in BANS.items())
    return TreadleError(
        f"Planner(bans=...): there is no ban {given!r}",
        code="TR-001",
        remedy=f"name some of {names}",
    )
