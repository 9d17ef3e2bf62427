"""A compiled step as one HTML file that needs nothing else: no script, no font, no network."""

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from treadle.report.account import Account
from treadle.report.chart import HEIGHT, WIDTH, chart
from treadle.util.sizes import format_bytes


def page(account: Account) -> str:
    """The whole file. Names and source lines come from users: everything is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=True
    )
    environment.filters.update({"size": format_bytes, "ms": _ms, "counted": _counted})
    text = files("treadle.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        a=account,
        m=account.memory,
        c=chart(account),
        total=sum(count for _, count in account.operations),
        width=WIDTH,
        height=HEIGHT,
    )


def _ms(seconds: float) -> str:
    """0.00153 -> ``"1.530 ms"``; below a microsecond the zero says nothing."""
    return f"{1e3 * seconds:.3f} ms" if seconds >= 1e-6 or not seconds else "< 0.001 ms"


def _counted(operations: Sequence[str]) -> str:
    """``mul, add, mul`` -> ``"mul ×2, add"``."""
    found = Counter(operations)
    return ", ".join(name + (f" ×{n}" if n > 1 else "") for name, n in found.items())
