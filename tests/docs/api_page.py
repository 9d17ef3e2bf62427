"""``docs/reference/api.md`` from the code: every public name, its signature and its docstring.

``python tests/docs/api_page.py`` writes it again.
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import treadle
from treadle import backend
from treadle.graph.core.arguments import Argument

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "api.md"
HEAD = """# API

Every public name of `treadle`, as the code has it. [The contract](contract.md) says what a step
promises, [how-tos](../howto/index.md) show each at work.
"""
FIRST = (
    "compile",
    "Step",
    "plan",
    "Plan",
    "Point",
    "load",
    "Options",
    "dynamic",
    "Dynamic",
    "pad_to_bucket",
)


def render():
    """The page's text."""
    names = [*FIRST, *(name for name in treadle.__all__ if name not in FIRST)]
    parts = [HEAD, *(_entry(f"treadle.{name}", getattr(treadle, name)) for name in names)]
    parts.append("## `treadle.backend`\n\nThe backend of `torch.compile`, and what it compiled.\n")
    parts += [_entry(f"treadle.backend.{name}", vars(backend)[name]) for name in backend.__all__]
    return "\n".join(parts)


def _entry(name, thing):
    if inspect.isclass(thing):
        return "\n".join([_heading(name, thing), _text(thing), *_members(name, thing)])
    if inspect.ismodule(thing):
        inside = [_entry(f"{name}.{each}", vars(thing)[each]) for each in _own(thing)]
        return "\n".join([f"### `{name}`\n\n{inspect.getdoc(thing)}\n", *inside])
    if callable(thing):
        return f"{_heading(name, thing)}\n{_text(thing)}"
    return f"### `{name}`\n\n`{thing!r}`. {_text(type(thing))}"


def _own(module):
    """What a module offers besides what the package does."""
    return [each for each in module.__all__ if each not in treadle.__all__]


def _heading(name, thing):
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        (base,) = [each for each in thing.__bases__ if each.__module__.startswith("treadle")] or [
            Exception
        ]
        return f"### `{name}`\n\nA kind of `{base.__name__}`.\n"
    return f"### `{name}`\n\n```\n{name.rpartition('.')[2]}{_signature(thing)}\n```\n"


def _signature(thing):
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    kept = [_shown(each) for each in signature.parameters.values() if each.name != "self"]
    shown = [str(each) for each in kept]
    returns = _annotation(signature.return_annotation)
    text = str(signature.replace(parameters=kept, return_annotation=returns))
    if len(text) > 88:
        marks, last = [], None
        alone = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        for each, line in zip(kept, shown, strict=True):
            if each.kind is each.KEYWORD_ONLY and last not in alone:
                marks.append("    *,")
            marks.append(f"    {line},")
            last = each.kind
        result = text[text.rindex(") ->") :] if ") ->" in text else ")"
        text = "\n".join(["(", *marks, result])
    return re.sub(r"(?<![\w.])(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text)


def _shown(parameter):
    default = parameter.default if _plain(parameter.default) else _Shown("...")
    return parameter.replace(default=default, annotation=_annotation(parameter.annotation))


def _annotation(found):
    """Annotations that are text stand without quotes, and long unions under their name."""
    if found is inspect.Parameter.empty:
        return found
    text = found if isinstance(found, str) else inspect.formatannotation(found)
    return _Shown(text.replace(inspect.formatannotation(Argument), "Argument").replace("~", ""))


class _Shown:
    """A default that is written as it is called, not as this machine has it."""

    def __init__(self, text):
        self._text = text

    def __repr__(self):
        return self._text


def _plain(default):
    return default is inspect.Parameter.empty or isinstance(
        default, bool | int | float | str | tuple | None
    )


def _text(thing):
    own = thing.__doc__ if not _is_generated(thing) else ""
    text = inspect.cleandoc(own or "").replace("``", "`").replace("\n::\n", "\n")
    return f"{text}\n" if text else ""


def _is_generated(thing):
    """Data classes without words of their own get their signature as docstring."""
    if not inspect.isclass(thing) or not dataclasses.is_dataclass(thing):
        return False
    return (thing.__doc__ or "").startswith(f"{thing.__name__}(")


def _members(name, kind):
    own = vars(kind)
    for member, value in own.items():
        if member.startswith("_") and member != "__call__":
            continue
        if isinstance(value, property):
            yield f"#### `{kind.__name__}.{member}`\n\n{_text(value)}"
        elif inspect.isfunction(value):
            shown = "" if member == "__call__" else f".{member}"
            head = f"#### `{kind.__name__}{shown}`\n\n```\n{member}{_signature(value)}\n```\n"
            yield f"{head}\n{_text(value)}"


if __name__ == "__main__":
    PAGE.write_text(render())
    sys.stdout.write(f"{PAGE}\n")
