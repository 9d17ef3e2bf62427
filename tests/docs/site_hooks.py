"""What MkDocs does besides: the site names its version, and asks nothing of the network."""

import re
import tomllib
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parent.parent.parent
_ELSEWHERE = r"""["']?(?:https?:)?//[^"' >]+"""
FETCHED = re.compile(
    rf"<(?:script|img|iframe)\b[^>]*\bsrc={_ELSEWHERE}"
    rf"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref={_ELSEWHERE}"
)
"""What a browser fetches from elsewhere when it shows a page; links are followed by readers."""
_LABEL = re.compile(r"^( +)(Example|Remedy): ", re.MULTILINE)


def on_config(config):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"treadle {project['version']}, {project['license']}"
    return config


def on_page_markdown(markdown, page, config, files):
    """What a terminal shows as lines of an error's entry is lines of the page as well."""
    return _LABEL.sub(r"\1<br>**\2:** ", markdown)


def on_post_page(output, page, config):
    found = FETCHED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} needs the network: {found[0]}")
    return output
