"""Every error code is documented, and every documented code exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE = re.compile(r"TR-\d{3}")


def codes(text: str) -> set[str]:
    return set(CODE.findall(text))


def test_codes_and_documentation_agree():
    raised = {code for path in (ROOT / "src").rglob("*.py") for code in codes(path.read_text())}
    assert codes((ROOT / "docs" / "reference" / "errors.md").read_text()) == raised


def test_what_is_refused_is_in_one_table():
    """Every code of capture but those for bugs and notes."""
    table = codes((ROOT / "docs" / "reference" / "refused.md").read_text())
    known = codes((ROOT / "docs" / "reference" / "errors.md").read_text())
    wanted = {code for code in known if code.startswith("TR-1")} - {"TR-138", "TR-199"}
    assert wanted <= table
    assert table <= known


def test_every_error_has_cause_example_and_remedy():
    """But for bugs of treadle's, notes, and reasons that are no errors."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    entries = re.split(r"^ *(?=- \*\*TR-)", page, flags=re.MULTILINE)[1:]
    assert len(entries) > 100
    for entry in entries:
        code, _, text = entry.partition("**: ")
        if re.search(r"a bug in treadle\b|^Not an? error|^A note|Not an error:", text):
            continue
        if int(CODE.search(code)[0][3:]) in (306, *range(311, 318)):  # reasons
            continue
        text = text.split("\n\n")[0]
        assert re.search(r"\n +Example: \S", text), entry
        assert re.search(r"\n +Remedy: \S", text), entry
