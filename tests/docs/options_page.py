"""``docs/reference/options.md`` from the code: options, arguments and variables of the environment.

``python tests/docs/options_page.py`` writes it again.
"""

import inspect
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import treadle
from treadle.options import OPTIONAL_PASSES, PREFIX, VARIABLES, Options

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "options.md"
HEAD = """# Options and environment

`treadle.compile` takes the options that are marked **compile** as arguments, and all of them as
`options=treadle.Options(...)`. An argument wins over `Options`. Without `options=`, variables of
the environment set the defaults.
"""
OTHER_VARIABLES = {
    "CACHE_DIR": "folder of the cache. Default: `~/.cache/treadle`, or in `$XDG_CACHE_HOME`",
}
ARGUMENTS = {
    "function": "the step: a function that runs forward, backward and update for one batch; "
    "without it, `compile` returns a decorator",
    "model": "the module that it uses, or a list or dict of them",
    "optimizer": "the optimizer that it steps, or a list or dict of them",
    "shapes": "dims that change, by `treadle.dynamic` ([how](../howto/dynamic-shapes.md))",
    "parallel": "`treadle.DataParallel()` on many ranks ([how](../howto/distributed.md))",
    "options": "a `treadle.Options`",
}
"""Of ``compile``, those that are no options."""
_ENTRY = re.compile(r"^- ``(\w+)``: (.*(?:\n  .*)*)", re.MULTILINE)


def render():
    """The page's text."""
    return "\n".join([HEAD, *_options(), *_arguments(), *_variables()])


def meanings():
    """What the docstring says of each option."""
    found = _ENTRY.findall(inspect.cleandoc(Options.__doc__))
    return {name: _linked(re.sub(r"\n\s+", " ", text)) for name, text in found}


def _options():
    yield "## Options\n"
    yield "| option | type | default | compile | what it does |\n|---|---|---|---|---|"
    said = meanings()
    taken = inspect.signature(treadle.compile).parameters
    for field in fields(Options):
        mark = "yes" if field.name in taken else ""
        row = f"`{field.name}`", _type(field.type), _default(field), mark, said[field.name]
        yield f"| {' | '.join(row)} |"
    yield f"\n`skip` takes these names: {', '.join(f'`{name}`' for name in OPTIONAL_PASSES)}."


def _type(annotation):
    """Without bars, which part the cells of a table."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text)
    return " or ".join(f"`{each}`" for each in text.split(" | "))


def _default(field):
    if field.name == "cache_dir":
        return "see `TREADLE_CACHE_DIR`"
    if field.name in ("regions", "planner"):
        return f"`{type(field.default).__name__}()`"
    assert field.default is not MISSING
    return f"`{field.default!r}`".replace("'", '"')


def _linked(text):
    """Pages as links, and inline code as Markdown has it."""
    text = re.sub(r"\(``docs/(howto/([\w-]+)\.md)``\)", r"([how](../\1))", text)
    return text.replace("``", "`")


def _arguments():
    yield "\n## Other arguments of `treadle.compile`\n"
    yield "| argument | default | what it is |\n|---|---|---|"
    for name, each in inspect.signature(treadle.compile).parameters.items():
        if name in {field.name for field in fields(Options)}:
            continue
        shown = "required" if each.default is inspect.Parameter.empty else f"`{each.default!r}`"
        yield f"| `{name}` | {shown} | {ARGUMENTS[name]} |"


def _variables():
    yield "\n## Environment\n\n| variable | value | sets |\n|---|---|---|"
    for name, each in VARIABLES.items():
        yield f"| `{PREFIX}{name}` | {each.meaning} | `{each.option}` |"
    yield "\n| other variable | what it does |\n|---|---|"
    for name, text in OTHER_VARIABLES.items():
        yield f"| `{PREFIX}{name}` | {text} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(render())
    sys.stdout.write(f"{PAGE}\n")
