"""Every error code is documented, and every documented code exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE = re.compile(r"TR-\d{3}")


def codes(text: str) -> set[str]:
    return set(CODE.findall(text))


def test_codes_and_documentation_agree():
    raised = {code for path in (ROOT / "src").rglob("*.py") for code in codes(path.read_text())}
    assert codes((ROOT / "docs" / "errors.md").read_text()) == raised
