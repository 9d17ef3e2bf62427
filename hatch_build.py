"""The README as a page of a package index: links into the repository lead nowhere there.

::

    [budgets](docs/howto/budget.md)      ->  budgets
    ![a picture](docs/pictures/x.svg)    ->  (nothing)
    [PyTorch](https://pytorch.org)       ->  [PyTorch](https://pytorch.org)
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+.*\n?\n?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)")


def for_package_page(readme):
    """``readme`` without pictures, with what is said under them, and with names for links that
    have no address of their own."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


class Readme(MetadataHookInterface):
    """Fills the dynamic field ``readme``."""

    def update(self, metadata):
        text = for_package_page(Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
