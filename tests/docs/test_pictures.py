"""The pictures are those that their data give."""

import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))

import pictures


def test_every_picture_is_drawn_from_the_data():
    for name, text in pictures.drawn().items():
        assert (pictures.PICTURES / name).read_text() == text, "run python tests/docs/pictures.py"


def test_every_picture_is_light_and_readable_on_any_ground():
    for name, text in pictures.drawn().items():
        assert len(text) < 30_000, name
        assert ElementTree.fromstring(text).find("{*}title") is not None
        assert "white" not in text
        assert "black" not in text


def test_the_peak_in_the_picture_is_the_promised_one():
    for plan in pictures.json.loads(pictures.DATA.read_text())["plans"]:
        assert plan["measured"] == plan["predicted"]
        assert max(sum(sizes) for _, *sizes in plan["alive"]) <= plan["predicted"]
