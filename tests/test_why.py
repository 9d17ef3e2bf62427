"""``treadle why CODE`` prints the entry of the code in ``docs/reference/errors.md``."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.tools.cli import main
from treadle.tools.why import meaning_of

PATH = Path(__file__).parent.parent / "docs" / "reference" / "errors.md"
PAGE = PATH.read_text()


@pytest.mark.parametrize("code", sorted(set(re.findall(r"TR-\d{3}", PAGE))))
def test_every_code_has_an_entry_of_its_own(code):
    first, *rest = meaning_of(code).splitlines()
    assert code in first or " to " in first
    assert not any(line.startswith(("- **TR", "#")) for line in rest)


def test_an_entry_is_whole_and_no_more():
    assert meaning_of("TR-005").splitlines() == [
        "- **TR-005**: A step was copied or pickled. It is bound to the tensors of its model.",
        "  Example: `copy.deepcopy(step)`, `pickle.dumps(step)`.",
        "  Remedy: compile a step for the copied model. `step.save` and `treadle.load` avoid the "
        "compile.",
    ]
    assert meaning_of("TR-312").startswith("- **TR-312**: no lowering rule")
    assert "bug in treadle" in meaning_of("TR-901")
    assert "\n- **TR-" not in meaning_of("TR-312")


def test_a_terminal_gets_titles_of_pages_and_commands():
    text = meaning_of("TR-212")
    assert '("Let treadle split the batch" of the documentation)' in text
    assert meaning_of("TR-407").endswith("See also: treadle why TR-505, treadle why TR-506")
    everything = "".join(map(meaning_of, re.findall(r"TR-\d{3}", PAGE)))
    assert "](" not in everything
    assert ".md" not in everything


@pytest.mark.parametrize("target", re.findall(r"\[([^\]]*)\]\(([^)]*)\)", PAGE))
def test_links_of_the_page_are_titles(target):
    title, (path, _, anchor) = target[0], target[1].partition("#")
    text = (PATH.parent / path).read_text()
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    assert title in (headings if anchor else headings[:1])


@pytest.mark.parametrize("code", ["TR-102", "tr-102", "tr102", "102", "[TR-102]"])
def test_a_code_may_be_written_as_it_comes(code, capsys):
    assert main(["why", code]) == 0
    assert capsys.readouterr().out.startswith("- **TR-102**")


@pytest.mark.parametrize("code", ["TR-999", "no", ""])
def test_what_is_no_code_is_wrong_words(code, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["why", code])
    assert stop.value.code == 2
    assert "TR-102" in capsys.readouterr().err


def test_no_torch_is_needed():
    code = "import sys; from treadle.tools.cli import main; main(['why', '102'])"
    check = f"{code}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)
