"""The API page has every public name with the signature that the code has."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import api_page

ENTRY = re.compile(r"^#{3,4} `[^\n]+`\n\n(?:```\n.*?\n```)?", re.MULTILINE | re.DOTALL)


def test_every_name_and_signature_is_there():
    written, real = (ENTRY.findall(text) for text in (api_page.PAGE.read_text(), api_page.render()))
    assert written == real, "run python tests/docs/api_page.py"


def test_everything_public_says_what_it_is():
    entries = re.split(r"^(?=###? )", api_page.render(), flags=re.MULTILINE)
    silent = [each.splitlines()[0] for each in entries if not each.rstrip("`\n ").count("\n")]
    assert not silent
